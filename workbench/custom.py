"""Load user-defined components by import path, or by a registered name."""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from workbench.errors import WorkbenchError, nearest
from workbench.files import own_file
from workbench.request import CustomPart

Found = TypeVar("Found")
_registered: dict[str, Any] = {}


def register(name: str) -> Callable[[Found], Found]:
    """Return a decorator that registers a component as `name`, to use wherever an import path may be.

    The name is known as long as the process runs; registered again, it means the newer object (a notebook's cell run
    twice).

        @workbench.register("even")
        def even(query, key):  # a mask; then workbench.load("demo", attention={"mask": {"path": "even"}})
            return (key <= query) & (key % 2 == 0)
    """
    if not name or ":" in name:
        raise WorkbenchError(f"a part cannot be registered as {name!r}: give it a plain name, without a colon")

    def keep(found: Found) -> Found:
        _registered[name] = found
        return found

    return keep


def registered(name: str) -> Any:
    """Return the component that is registered as `name`; None where there is none."""
    return _registered.get(name)


def load_registrations(path: str) -> None:
    """Run the file `FILE.py`, or import the module `package.module`, that registers components; once a content.

    Raises WorkbenchError where it is not there, or cannot be imported.
    """
    _from_file(Path(path), path) if path.endswith(".py") else _from_package(path, path)


@contextmanager
def temporarily_registered(found: Any) -> Iterator[str]:
    """Register `found` under a temporary name for the length of a block."""
    name = f"{getattr(found, '__qualname__', type(found).__qualname__)} #{id(found)}"
    register(name)(found)
    try:
        yield name
    finally:
        del _registered[name]


def load_custom(part: CustomPart) -> Any:
    """Load the component at `part.path` with its arguments.

    A class is built with them; a function is itself the component and gets them with every call; any other object is
    used as it is and takes none.
    """
    found = resolve_path(part.path)
    return build_custom(found, part.arguments, part.path)


def load_verbs(part: CustomPart, kind: str, verbs: Mapping[str, str]) -> Any:
    """Load the component at `part.path`, which has these methods.

    Args:
        part: the component.
        kind: what it is, for errors.
        verbs: the parameters of each method, as `(logits, histories)`.
    """
    made = load_custom(part)
    for verb, shape in verbs.items():
        method = getattr(made, verb, None)
        if not callable(method):
            raise WorkbenchError(f"{kind} {part.path}: has no {verb}; a {kind} needs {verb}{shape}")
        check_arity(method, 0 if shape == "()" else shape.count(",") + 1, f"{kind} {part.path}: {verb}", shape)
    return made


def build_custom(found: Any, arguments: Mapping[str, Any], name: str, *given_by_us: Any) -> Any:
    """Build `found` with its arguments; a class gets `given_by_us` first. Errors name it `name`."""
    if inspect.isclass(found):
        try:
            return found(*given_by_us, **arguments)
        except Exception as error:
            given = ", ".join(f"{key}={value!r}" for key, value in arguments.items()) or "no arguments"
            ours = ", ".join(type(value).__name__ for value in given_by_us)
            first = f"; a class takes {ours} first" if ours else ""
            raise WorkbenchError(f"{name}: could not be built with {given}: {_describe(error)}{first}") from error
    if inspect.isroutine(found):
        return functools.partial(found, **arguments) if arguments else found
    if arguments:
        raise WorkbenchError(f"{name}: is an object, not a class or function, and takes no arguments")
    return found


def resolve_path(path: str) -> Any:
    """Resolve `package.module:Name`, `folder/file.py:Name` or a registered name."""
    if path in _registered:
        return _registered[path]
    place, _, name = path.rpartition(":")
    if not place or not name:
        known = f"; registered: {', '.join(_registered)}" if _registered else ""
        hint = nearest(path, _registered) or known
        raise WorkbenchError(f"{path!r}: write package.module:Name or folder/file.py:Name{hint}")
    module = _from_file(Path(place), path) if place.endswith(".py") else _from_package(place, path)
    if not hasattr(module, name):
        public = [known for known in vars(module) if not known.startswith("_")]
        raise WorkbenchError(f"{path}: {place} has no {name!r}{nearest(name, public)}")
    return getattr(module, name)


def _from_package(place: str, path: str) -> ModuleType:
    try:
        return importlib.import_module(place)
    except Exception as error:
        raise WorkbenchError(f"{path}: {place} cannot be imported: {_describe(error)}") from error


def _from_file(file: Path, path: str) -> ModuleType:
    file = own_file(file)
    if not file.is_file():
        raise WorkbenchError(f"{path}: there is no file {file} (seen from {Path.cwd()})")
    source = file.read_bytes()
    # Named by place and content: a file edited in a notebook session is read again, an unchanged one is not.
    name = "own_" + hashlib.blake2b(str(file.resolve()).encode() + b"\0" + source, digest_size=8).hexdigest()
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None:
        raise WorkbenchError(f"{path}: {file} is not a Python source file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up while the file runs
    try:
        exec(compile(source, str(file), "exec"), module.__dict__)
    except Exception as error:
        del sys.modules[name]
        raise WorkbenchError(f"{path}: {file} cannot be imported: {_describe(error)}") from error
    return module


def check_arity(function: Any, count: int, name: str, shape: str) -> None:
    """Check that `function` can be called with `count` values; WorkbenchError, naming it `name`, otherwise."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some built-in callables have none
        return
    try:
        signature.bind(*range(count))
    except TypeError as error:
        raise WorkbenchError(f"{name}: takes {signature}, must take {shape}") from error


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
