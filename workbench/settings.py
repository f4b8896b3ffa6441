"""Base class of all settings: strict, frozen values, with a short `repr` and their comments as documentation."""

from __future__ import annotations

import ast
import functools
import inspect
import io
import textwrap
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
    """Return a class with the fields of `model`, but those of `without`; each is None where it is not given.

    It goes by the name of `model`, whose source has the comments of the fields (`field_comments`)."""
    if model is Settings:
        return Settings
    named = [name for name in model.__annotations__ if name in model.model_fields and name not in without]
    fields: Any = {name: (model.model_fields[name].rebuild_annotation() | None, None) for name in named}
    return create_model(
        model.__name__, __base__=optional_fields(model.__base__, without), __module__=model.__module__, **fields
    )


def parse_setting(adapter: TypeAdapter[Any], value: Any, where: str, example: str) -> Any:
    """Validate one setting by `adapter`.

    Raises:
        WorkbenchError: one line with the path below `where`, and `example`, which would be right.
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
    """Return by field its description or its comment in the source; nothing where there is neither."""
    found: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if base not in (BaseModel, object):
            found |= _source_comments(base)
    return found | {name: field.description for name, field in model.model_fields.items() if field.description}


def _source_comments(model: type[BaseModel]) -> dict[str, str]:
    try:
        source = textwrap.dedent(inspect.getsource(model))
    except (OSError, TypeError):  # made in a session that keeps no source
        return {}
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {each.start[0]: each for each in tokens if each.type == tokenize.COMMENT}
    (body,) = (node.body for node in ast.parse(source).body if isinstance(node, ast.ClassDef))
    comments_of = {}
    for node in body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            first = node.lineno
            while first - 1 in comments and comments[first - 1].line.lstrip().startswith("#"):
                first -= 1
            lines = range(first, (node.end_lineno or first) + 1)
            comments_of[node.target.id] = " ".join(comments[n].string.lstrip("# ") for n in lines if n in comments)
    return {name: words for name, words in comments_of.items() if words}
