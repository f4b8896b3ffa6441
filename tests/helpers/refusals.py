"""A call that is refused: one error of one line, with the words that it must have."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from compiled_kernels import BackendError
from workbench.errors import WorkbenchError


def refuses(
    words: str,
    call: Callable[..., object],
    *arguments: object,
    _error: type[Exception] = WorkbenchError,
    **named: object,
) -> None:
    """Hold a call to its refusal.

    Args:
        words: a regular expression that is found in the message.
        call: what is called with the further arguments.
    """
    with pytest.raises(_error, match=words) as caught:
        call(*arguments, **named)
    assert "\n" not in str(caught.value)


kernel_refuses = partial(refuses, _error=BackendError)
