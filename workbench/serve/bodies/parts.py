"""Validate objects within a body: blocks, tools and items, each with supported, ignored and refused fields; and lists
of objects of several types."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Tag, ValidationInfo, WithJsonSchema, model_validator

from workbench.serve.bodies.fields import Body, IgnoredFields


class Part(Body):
    """An object within a body. `REFUSED` and `IGNORED` work as in the body itself.

    Ignored fields are recorded in the validation context, an `IgnoredFields`, by class and field.
    """

    @model_validator(mode="before")
    @classmethod
    def _take_known_fields(cls, given: Any, info: ValidationInfo) -> Any:
        if not isinstance(given, Mapping):
            return given
        taken, known = {}, cls.carried_out()
        ignored = info.context if isinstance(info.context, IgnoredFields) else IgnoredFields(is_strict=True)
        for name, value in given.items():
            if name in known:
                if cls.takes(name, value):
                    taken[name] = value
            elif name in cls.IGNORED:
                if value is not None:
                    ignored.add(f"{cls.__name__}.{name}", cls.IGNORED[name])
            elif name in cls.REFUSED:
                if not cls.REFUSED[name].is_neutral(value):
                    raise ValueError(f"{name} is not supported: {cls.REFUSED[name].reason}")
            elif ignored.is_strict:
                taken[name] = value  # refused by its path
            elif value is not None:
                ignored.unknown(f"{cls.__name__}.{name}", [*known, *cls.REFUSED, *cls.IGNORED])
        return taken


def type_of(known: tuple[str, ...], otherwise: str = "") -> Callable[[Any], str]:
    """Return a function that tells the kind of an object by its `type`: the tag `<TYPE>` if the type is in `known`,
    else `<refused>`.

    `otherwise` is the type of an object without `type`. Brackets distinguish a tag from a field in an error's path.
    """

    def find(value: Any) -> str:
        kind = (value.get("type") or otherwise) if isinstance(value, Mapping) else getattr(value, "type", None)
        return f"<{kind}>" if isinstance(kind, str) and kind in known else "<refused>"

    return find


def refused_types(what: str, known: tuple[str, ...], reasons: Mapping[str, str]) -> Any:
    """Return the annotation for objects of refused types; the error has the reason for the type, or names it as
    unknown.
    """

    def refuse(value: Any) -> Any:
        kind = value.get("type") if isinstance(value, Mapping) else None
        if isinstance(kind, str) and kind in reasons:
            raise ValueError(f"{what} of type {kind!r} is not supported: {reasons[kind]}")
        given = f"not {str(kind)[:60]!r}" if isinstance(value, Mapping) else f"not a {type(value).__name__}"
        raise ValueError(f"must be {what} with a type, one of {', '.join(known)}, {given}")

    return Annotated[Any, BeforeValidator(refuse), WithJsonSchema({"not": {}}), Tag("<refused>")]
