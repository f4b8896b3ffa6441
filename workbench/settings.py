"""Define the base class of all settings: strict, frozen values, with a short `repr` and with comments as
documentation.
"""

from __future__ import annotations

import functools
import inspect
import sys
import tokenize
from collections.abc import Collection, Iterator
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, create_model

from workbench.errors import WorkbenchError

Count = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Seed = NonNegative
Fraction01 = Annotated[float, Field(ge=0, le=1)]


class Settings(BaseModel):
    """A frozen value that refuses unknown keys. Its `repr` leaves out defaults: shorter, and read back the same."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        known = type(self).model_fields
        for name, value in super().__repr_args__():
            field = known.get(name or "")
            if field is None or field.is_required() or value != field.get_default(call_default_factory=True):
                yield name, value


def optional_fields(model: Any, without: Collection[str] = ()) -> type[Settings]:
    """Return a class with the fields of `model`, except those in `without`; each field is optional, with the default
    None.

    The class has the name of `model`, so that `field_comments` finds the comments in the source of `model`."""
    if model is Settings:
        return Settings
    named = [name for name in model.__annotations__ if name in model.model_fields and name not in without]
    fields: Any = {name: (model.model_fields[name].rebuild_annotation() | None, None) for name in named}
    return create_model(
        model.__name__, __base__=optional_fields(model.__base__, without), __module__=model.__module__, **fields
    )


def parse_setting(adapter: TypeAdapter[Any], value: Any, where: str, example: str) -> Any:
    """Return one setting, validated by `adapter`.

    Raises:
        WorkbenchError: one line with the path below `where`, and `example`, a valid value.
    """
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        fault = error.errors()[0]
        place = ".".join(str(part) for part in (where, *fault["loc"]))
        raise WorkbenchError(f"{place}: {fault['msg'].removeprefix('Value error, ')}; {example}") from None


def non_default_settings(value: Any, path: str = "", baseline: Any = None) -> Iterator[tuple[str, object]]:
    """Yield (dotted path, value) for settings that differ from their defaults, or from those of `baseline`.

    If one kind of settings replaces another, the kind comes first.
    """
    for name, field in type(value).model_fields.items():
        mine = getattr(value, name)
        usual = getattr(baseline, name) if baseline is not None else field.get_default(call_default_factory=True)
        if mine == usual and (baseline is not None or not field.is_required()):
            continue
        if hasattr(mine, "model_fields"):
            same = type(mine) is type(usual)
            if not same and hasattr(mine, "kind"):
                yield f"{path}{name}.kind", mine.kind
            yield from non_default_settings(mine, f"{path}{name}.", usual if same else None)
        elif isinstance(mine, dict) and mine and all(isinstance(inner, dict) for inner in mine.values()):
            yield from ((f"{path}{name}.{key}", inner) for key, inner in mine.items())
        else:
            yield f"{path}{name}", mine


@functools.cache
def field_comments(model: type[BaseModel]) -> dict[str, str]:
    """Return a text for each field by name: its description, or else its comment in the source. Fields with neither are
    left out.
    """
    found: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if base not in (BaseModel, object):
            found |= _source_comments(base)
    return found | {name: field.description for name, field in model.model_fields.items() if field.description}


def _source_comments(model: type[BaseModel]) -> dict[str, str]:
    try:
        lines = inspect.findsource(sys.modules[model.__module__])[0]  # that of a class parses its whole file
        first = next(at for at, line in enumerate(lines) if line.lstrip().startswith(f"class {model.__name__}("))
    except (OSError, KeyError, StopIteration):  # made in a session that keeps no source
        return {}
    found, line, words = {}, [], []
    depth = -lines[first].startswith(" ")
    for token in tokenize.generate_tokens(iter(inspect.getblock(lines[first:])).__next__):
        depth += (token.type == tokenize.INDENT) - (token.type == tokenize.DEDENT)
        if token.type == tokenize.COMMENT:
            words.append(token.string.lstrip("# "))
        elif token.type == tokenize.NEWLINE:
            if depth == 1 and line[1:2] == [":"] and words:
                found[line[0]] = " ".join(words)
            line, words = [], []
        elif token.string.strip():
            line.append(token.string)
    return found
