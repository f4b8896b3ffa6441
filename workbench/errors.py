"""One kind of error for everything a user can put right: what is wrong, where, and what would be right."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from pydantic import ValidationError


class WorkbenchError(ValueError):
    """A mistake in the input or the surroundings, told in one line. The command line prints it bare."""


def nearest(word: str, known: Iterable[str]) -> str:
    """`; did you mean X?` when something known is near, else nothing."""
    close = difflib.get_close_matches(str(word), [str(name) for name in known], n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def explain(error: ValidationError, where: str, model: type | None = None) -> WorkbenchError:
    """A pydantic error as ours: every wrong path on one line, unknown keys with the nearest right name."""
    parts = []
    for item in error.errors():
        path = ".".join(str(piece) for piece in item["loc"])
        if item["type"] == "extra_forbidden":
            known = _known_keys(model, item["loc"][:-1])
            hint = nearest(str(item["loc"][-1]), known) or (f"; known: {', '.join(known)}" if known else "")
            parts.append(f"{path}: unknown key{hint}")
        else:
            message = item["msg"].removeprefix("Value error, ")
            given = "" if isinstance(item["input"], dict) else f" (given {_short(item['input'])})"
            parts.append(f"{path}: {message}{given}" if path else message)
    return WorkbenchError(f"{where}: " + "; ".join(parts))


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _known_keys(model: type | None, path: tuple) -> list[str]:
    """The field names of the pydantic model found at `path` below `model`; a union offers all its members'."""
    models = [model] if model is not None else []
    for step in path:
        fields = [m.model_fields[step] for m in models if step in getattr(m, "model_fields", {})]
        if fields:
            models = [inner for field in fields for inner in _models_in(field.annotation)]
        else:  # a union's tag or a list's index stands in the path too: it keeps the place, a tag narrows it
            tagged = [m for m in models if _tag(m) == step]
            models = tagged or models
    return sorted({name for m in models for name in getattr(m, "model_fields", {})})


def _tag(model: type) -> object:
    field = getattr(model, "model_fields", {}).get("kind")
    return field.default if field is not None else None


def _models_in(annotation: object) -> list[type]:
    if isinstance(annotation, type) and hasattr(annotation, "model_fields"):
        return [annotation]
    return [inner for argument in getattr(annotation, "__args__", ()) for inner in _models_in(argument)]
