"""An object that stands for one of a real class in a test, and cannot have what that class has not."""

from __future__ import annotations

import ast
import inspect
import textwrap
from functools import cache
from typing import Any


class StandIn:
    """Some attributes of a real class; another one's name, given or set, fails the test, and so does a function that
    takes fewer arguments than the method for which it stands."""

    _real: type

    def __init__(self, real: type, attributes: dict[str, Any]):
        self.__dict__["_real"] = real
        for name, value in attributes.items():
            setattr(self, name, value)

    def __setattr__(self, name: str, value: Any) -> None:
        assert name in attributes_of(self._real), f"{self._real.__name__} has no {name!r}"
        method = inspect.getattr_static(self._real, name, None)
        if inspect.isfunction(method) and inspect.isfunction(value):
            needed = [each for each in list(inspect.signature(method).parameters.values())[1:] if _is_needed(each)]
            inspect.signature(value).bind(*needed)  # TypeError where it cannot be called so
        self.__dict__[name] = value


def stand_in(real: type, **attributes: Any) -> Any:
    """Return an object with these attributes, each of which an object of `real` has."""
    return StandIn(real, attributes)


@cache
def attributes_of(real: type) -> frozenset[str]:
    """Return the names of a class's attributes: of its body, annotated ones, and those that methods set on `self`."""
    names = set(dir(real))
    for each in real.__mro__[:-1]:
        names |= set(vars(each).get("__annotations__", ()))
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(each)))
        except (OSError, TypeError):  # written in C
            continue
        names |= {
            node.attr for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name) and node.value.id == "self"
        }  # fmt: skip
    return frozenset(names)


def _is_needed(parameter: inspect.Parameter) -> bool:
    return parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
