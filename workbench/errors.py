"""Report mistakes that a user can correct: the fault, its place, and the valid values."""

from __future__ import annotations

import difflib
import errno
import re
import reprlib
import sys
import types
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Union, get_origin

from pydantic import ValidationError

# The messages of two union members about one value.
UNION_REPEAT = re.compile(r"(\S+): Input should be (.*?)( \(given .*?\)); \1: Input should be (.*?)\3")

DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # a full disk, a quota, a limit on file size
EXTRA = "'inference-workbench[{}]'"  # as a shell reads it
RED, PLAIN = "\033[31m", "\033[0m"


class WorkbenchError(ValueError):
    """An error about a mistake in the input or the environment, described in one line.

    The command line and notebook cells print it without a traceback. In a notebook `%tb` shows the traceback, and
    `%debug` opens the debugger there.
    """

    def _render_traceback_(self) -> list[str]:
        """Return the text for IPython: one line at the end of the failing cell; the full traceback for `%tb`."""
        shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
        if sys.exc_info()[1] is self or shell is None:
            return [f"{RED}{type(self).__name__}{PLAIN}: {self}"]
        return shell.InteractiveTB.structured_traceback(type(self), self, self.__traceback__)


def describe_error(error: BaseException | str) -> str:
    """Describe the error that ended a request; for a WorkbenchError, its message."""
    return str(error) if isinstance(error, str | WorkbenchError) else f"{type(error).__name__}: {error}"


def cannot_write(what: str, error: OSError) -> WorkbenchError:
    """Return the error for a file that could not be written, with the remedy: free disk space, or another file."""
    reason = error.strerror or " ".join(str(error).split())
    remedy = "make room there" if error.errno in DISK_FULL_ERRNOS else "name a file that can be written"
    return WorkbenchError(f"{what}: cannot be written ({reason}); {remedy}, and run it again")


@contextmanager
def installed_by(extra: str, what: str) -> Iterator[None]:
    """Import packages of an optional extra within the block; if one is not installed, raise a WorkbenchError that
    `what` needs it.

    Use: `with installed_by("serve", "a server"): import uvicorn`.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise WorkbenchError(f"{what}: {error.name} is not installed; pip install {EXTRA.format(extra)}") from None
    except ImportError as error:  # it is there, and too old or broken
        raise WorkbenchError(f"{what}: {error}; pip install --upgrade {EXTRA.format(extra)}") from None


def nearest(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean X?` if a name in `known` is similar to `word`, else an empty string."""
    close = difflib.get_close_matches(str(word), [str(name) for name in known], n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def require_tuple(values: object, kind: type, name: str) -> None:
    """Raise TypeError, with `name`, unless `values` is a tuple or list of `kind`."""
    if not isinstance(values, tuple | list) or not all(isinstance(value, kind) for value in values):
        raise TypeError(f"{name} must be a tuple of {kind.__name__} values; one alone is written (VALUE,)")


LONGEST_NAME = 200  # maximum characters that are compared with known names, to bound the time
SHORT = reprlib.Repr()
SHORT.maxlevel, SHORT.maxstring, SHORT.maxother = 6, 60, 60
SHORT.maxlist = SHORT.maxtuple = SHORT.maxdict = SHORT.maxset = 60


def explain(error: ValidationError, where: str, model: type | None = None) -> WorkbenchError:
    """Return a text for a pydantic error: one line per invalid path; an unknown key is named with the nearest valid
    key.

    The text starts with `where` if that is not empty.
    """
    message = "; ".join(_describe(item, model) for item in error.errors())
    message = UNION_REPEAT.sub(r"\1: Input should be \2, or \4\3", message)
    return WorkbenchError(f"{where}: {message}" if where else message)


def explain_by_path(error: ValidationError, model: type) -> list[tuple[tuple[str, ...], str]]:
    """Return the lines of `explain` as (path, line) pairs."""
    return [(tuple(_place(model, item["loc"])[0]), _describe(item, model)) for item in error.errors()]


def _describe(item: Any, model: type | None) -> str:
    pieces, around, inside = _place(model, item["loc"])
    path, given = ".".join(pieces), item["input"]
    match item["type"]:
        case "extra_forbidden":
            return f"{path}: unknown key{_hint(pieces[-1], _names(around))}"
        case "union_tag_not_found":
            return f"{path}.kind: is missing{_hint('', _tags(inside))}"
        case "union_tag_invalid":
            tag = item["ctx"]["tag"]
            return f"{path}.kind: {tag!r} is unknown{_hint(tag, _tags(inside))}"
        case "model_type" | "model_attributes_type":
            return f"{path}: must be a group of settings ({', '.join(_names(inside))}), not {_short(given)}"
    message = item["msg"].removeprefix("Value error, ")
    value = "" if isinstance(given, dict) else f" (given {_short(given)})"
    known = re.findall("'([^']*)'", item["ctx"]["expected"]) if item["type"] == "literal_error" else []
    hint = nearest(given, known) if known and isinstance(given, str) and len(given) < LONGEST_NAME else ""
    return f"{path}: {message}{value}{hint}" if path else message


def _short(value: object) -> str:
    text = repr(value[:60]) if isinstance(value, str) else SHORT.repr(value)  # repr may take long, or recurse too deep
    return text if len(text) <= 60 else text[:57] + "..."


def _hint(word: str, known: list[str]) -> str:
    return nearest(word, known) or (f"; known: {', '.join(known)}" if known else "")


def _place(model: type | None, loc: Sequence[int | str]) -> tuple[list[str], list[Any], list[Any]]:
    """Resolve `loc` to the path in the input, the models around its last piece, and the models inside.

    pydantic's own path also contains the names of tried union members.
    """
    path: list[str] = []
    here: list[Any] = [] if model is None else [model]  # annotations
    around: list[Any] = []
    for step in loc:
        models = _models_in(here)
        tagged = [m for m in models if _tag(m) == step] if len(models) > 1 else []
        if tagged or (not models and isinstance(step, str) and any(map(_is_union, here))):
            here = tagged
            continue
        path.append(str(step))
        around = models
        fields = [m.model_fields[step].annotation for m in models if step in m.model_fields]
        here = fields or [inner for annotation in here for inner in getattr(annotation, "__args__", ())]
    return path, around, _models_in(here)


def _is_union(annotation: object) -> bool:
    return get_origin(annotation) in (Union, types.UnionType)


def _models_in(annotations: Iterable[object]) -> list[Any]:
    found: list[Any] = []
    for annotation in annotations:
        inner = getattr(annotation, "__args__", ())
        found += [annotation] if hasattr(annotation, "model_fields") else _models_in(inner)
    return found


def _tag(model: Any) -> object:
    field = model.model_fields.get("kind")
    return field.default if field is not None else None


def _tags(models: list[Any]) -> list[str]:
    return [str(_tag(model)) for model in models]


def _names(models: list[Any]) -> list[str]:
    return sorted({name for model in models for name in model.model_fields})
