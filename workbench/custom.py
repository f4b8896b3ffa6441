"""Load user-defined components by import path, or by a registered name."""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from workbench.errors import WorkbenchError, nearest
from workbench.files import own_file
from workbench.request import CustomPart

Found = TypeVar("Found")
_registered: dict[str, Any] = {}
NOT_OWN = {"workbench", "compiled_kernels", *sys.stdlib_module_names}  # no module of the user's


def register(name: str) -> Callable[[Found], Found]:
    """Return a decorator that registers a component as `name`, which can be used in place of an import path.

    The name is known for the life of the process; registering it again replaces the object (as when a notebook cell is
    run twice).

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
    """Return the component registered as `name`; None if there is none."""
    return _registered.get(name)


def load_registrations(path: str) -> None:
    """Run the file `FILE.py`, or import the module `package.module`, that registers components; unchanged files run
    once.

    Raises WorkbenchError if it is missing or cannot be imported.
    """
    _from_file(Path(path), path) if path.endswith(".py") else _from_package(path, path)


@contextmanager
def temporarily_registered(found: Any) -> Iterator[str]:
    """Register the component `found` under a temporary name within a block, and yield the name."""
    name = f"{getattr(found, '__qualname__', type(found).__qualname__)} #{id(found)}"
    register(name)(found)
    try:
        yield name
    finally:
        del _registered[name]


def load_custom(part: CustomPart) -> Any:
    """Load the component at `part.path` with its arguments.

    A class is instantiated with them; a function is the component itself and receives them in every call; any other
    object is used unchanged and takes no arguments.
    """
    found = resolve_path(part.path)
    return build_custom(found, part.arguments, part.path)


def load_verbs(part: CustomPart, kind: str, verbs: Mapping[str, str]) -> Any:
    """Load the component at `part.path` and check that it has the given methods.

    Args:
        part: the component.
        kind: kind of component, for error messages.
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
    """Return the component `found` with its arguments: an instance of a class, which gets `given_by_us` first, or a
    function with bound arguments. `name` is used in error messages.
    """
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
    """Return the object that `package.module:Name`, `folder/file.py:Name` or a registered name refers to."""
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
    # Named by path and content: an edited file is loaded again, an unchanged one is not.
    name = "own_" + hashlib.blake2b(str(file.resolve()).encode() + b"\0" + source, digest_size=8).hexdigest()
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None:
        raise WorkbenchError(f"{path}: {file} is not a Python source file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module while the file runs
    try:
        exec(compile(source, str(file), "exec"), module.__dict__)
    except Exception as error:
        del sys.modules[name]
        raise WorkbenchError(f"{path}: {file} cannot be imported: {_describe(error)}") from error
    return module


@contextmanager
def user_code(name: str, is_own: bool = True) -> Iterator[None]:
    """Turn an exception of user-defined code into a WorkbenchError that begins with `name` and names the last line of
    the user's that was reached. An exception of built-in code (not `is_own`) is a bug, and stays what it is.
    """
    try:
        yield
    except WorkbenchError:
        raise
    except Exception as error:
        if not is_own:
            raise
        raise WorkbenchError(f"{name}: {_describe(error)}") from error


def workload_code(workload: Any, must: str) -> AbstractContextManager[None]:
    """Return `user_code` for a workload, which may be built in; `must` is what it has to do."""
    return user_code(f"workload {workload.kind}: {must}", not type(workload).__module__.startswith("workbench."))


def check_arity(function: Any, count: int, name: str, shape: str) -> None:
    """Raise WorkbenchError, naming the function `name`, unless `function` can be called with `count` arguments."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some built-in callables have no signature
        return
    try:
        signature.bind(*range(count))
    except TypeError as error:
        raise WorkbenchError(f"{name}: takes {signature}, must take {shape}") from error


def _describe(error: Exception) -> str:
    """Describe an error in one line, which ends with the last line of the user's code that was reached."""
    lines = [
        f" ({frame.f_code.co_filename}, line {line})"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if frame.f_globals.get("__name__", "").partition(".")[0] not in NOT_OWN
        and "site-packages" not in frame.f_code.co_filename
    ]
    return f"{type(error).__name__}: {' '.join(str(error).split())}{''.join(lines[-1:])}"
