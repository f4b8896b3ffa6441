"""Triton's interpreter, without what it does again and again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction


@pytest.fixture(autouse=True, scope="session")
def set_up_once_a_launch() -> Iterator[None]:
    """A launch puts the interpreter's operations in the place of triton.language's. So does every call of a function
    within it, where as a rule they are in place already: that is a third of the interpreter's time."""
    as_it_is = InterpretedFunction.__call__

    def call(self: InterpretedFunction, *arguments: Any, **named: Any) -> Any:
        languages = [each for each in self.fn.__globals__.values() if each is tl or each is tl.core]
        if any(tl.core.is_builtin(each.load) for each in languages):
            return as_it_is(self, *arguments, **named)
        return self.rewrite()(*arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpretedFunction, "__call__", call)
        yield
