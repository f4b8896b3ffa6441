"""Find models that were fetched, choose the one that speaks with people, remove one.

    DATA/models/FILE.gguf                     a known model
    DATA/models/OWNER/NAME[@REVISION][:PART]  a folder of the hub's files, under the name that a person gave
    DATA/models/.NAME                         what is being fetched, by the process that has the lock

Nothing here fetches: that is `fetch.py` and `hub.py`, which only `workbench model get` calls.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from workbench.errors import DISK_FULL_ERRNOS, WorkbenchError
from workbench.files import DATA_VARIABLE, data_directory
from workbench.models.known import KNOWN

PEOPLES_MODEL, BUNDLED_CHAT_MODEL = "smollm2", "demo-chat"
HUB_NAME = re.compile(r"(\w[\w.-]*/\w[\w.-]*?)(?:@(\w[\w./-]*))?(?::(\w[\w.-]*))?", re.ASCII)  # name, revision, part


def default_model() -> str:
    """Return the name of the model that speaks where a person names none: `smollm2` if it is at hand, else `demo-chat`.

    `WORKBENCH_DEFAULT_MODEL` names another. Tests, experiments and records name their model.

    Example: `runner = workbench.load(workbench.default_model())`
    """
    decided = PEOPLES_MODEL if is_at_hand(PEOPLES_MODEL) else BUNDLED_CHAT_MODEL
    return os.environ.get("WORKBENCH_DEFAULT_MODEL") or decided


def models_folder() -> Path:
    """Return the folder of fetched models, which may not be there yet."""
    return data_directory() / "models"


def place_of(name: str) -> Path | None:
    """Return where a model of this name lies once it is fetched; None for a name of no such model."""
    if name in KNOWN:
        return models_folder() / KNOWN[name].file
    if HUB_NAME.fullmatch(name) is None:
        return None
    owner, _, rest = name.partition("/")
    return models_folder() / owner / rest.replace("/", "--")  # a revision may have slashes: refs/pr/1


def is_at_hand(name: str) -> bool:
    """Return whether a fetched model is there; of a known one the file has to have its length."""
    place = place_of(name)
    if place is None or name not in KNOWN:
        return place is not None and place.is_dir()
    return place.is_file() and place.stat().st_size == KNOWN[name].bytes


def fetched_model(name: str) -> Path | None:
    """Return the file or folder of a fetched model; None for a name that is neither known nor one of the hub's here.

    Raises:
        WorkbenchError: for a known model that is not at hand, with the command that fetches it.
    """
    if is_at_hand(name):
        return place_of(name)
    if name not in KNOWN:
        return None
    model = KNOWN[name]
    raise WorkbenchError(
        f"model {name!r} is not at hand, or not whole: `{model.command}` fetches it "
        f"({model.bytes / 1e6:.0f} MB, {model.licence})"
    )


def hub_models() -> list[str]:
    """Return the names of the hub's models that are at hand."""
    folder = models_folder()
    return [path.relative_to(folder).as_posix() for path in sorted(folder.glob("[!.]*/[!.]*")) if path.is_dir()]


def remove_model(name: str) -> Path:
    """Delete a fetched model, with what is left of a fetch that was broken off; return where it was."""
    place = place_of(name)
    with fetching(name, lambda line: None) as folder:
        if place is None or not (place.exists() or any(folder.iterdir())):
            here = ", ".join([*filter(is_at_hand, KNOWN), *hub_models()])
            raise WorkbenchError(f"no model {name!r} was fetched; {here or 'none'} can be removed")
        shutil.rmtree(folder)
        if place.is_dir():
            shutil.rmtree(place)
        place.unlink(missing_ok=True)
        if name not in KNOWN:
            with suppress(OSError):  # other models of its owner
                place.parent.rmdir()
    return place


@contextmanager
def fetching(name: str, report: Callable[[str], None]) -> Iterator[Path]:
    """Yield the folder in which a model's files are gathered, to one process at a time; empty ones do not stay.

    What a disk refuses meanwhile is one error that names the folder and what would be right.
    """
    folder = models_folder() / f".{name.replace('/', '--')}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (models_folder() / ".lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                report(f"{name}: another process is fetching a model; waiting")
                fcntl.flock(lock, fcntl.LOCK_EX)
            folder.mkdir(exist_ok=True)
            try:
                yield folder
            finally:
                with suppress(OSError):  # it is gone, or what is in it stays
                    folder.rmdir()
    except OSError as error:
        remedy = "make room there" if error.errno in DISK_FULL_ERRNOS else "make it writable"
        fault = f"{models_folder()}: models cannot be kept there ({error.strerror or error})"
        raise WorkbenchError(f"{fault}; {remedy}, or name another folder in {DATA_VARIABLE}") from None
