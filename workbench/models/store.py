"""Find and remove downloaded models, and choose the default chat model.

    DATA/models/FILE.gguf                     a known model
    DATA/models/OWNER/NAME[@REVISION][:PART]  a folder of the hub's files, under the name that a person gave
    DATA/models/.NAME                         a download in progress, by the process that holds the lock

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
from workbench.units import format_bytes

PEOPLES_MODEL, BUNDLED_CHAT_MODEL = "smollm2", "demo-chat"
HUB_NAME = re.compile(r"(\w[\w.-]*/\w[\w.-]*?)(?:@(\w[\w./-]*))?(?::(\w[\w.-]*))?", re.ASCII)  # name, revision, part


def default_model() -> str:
    """Return the name of the default chat model: `smollm2` if it is downloaded, else `demo-chat`.

    `WORKBENCH_DEFAULT_MODEL` names another. Tests, experiments and records name their model.

    Example: `runner = workbench.load(workbench.default_model())`
    """
    decided = PEOPLES_MODEL if is_at_hand(PEOPLES_MODEL) else BUNDLED_CHAT_MODEL
    return os.environ.get("WORKBENCH_DEFAULT_MODEL") or decided


def models_folder() -> Path:
    """Return the folder of downloaded models, which may not exist yet."""
    return data_directory() / "models"


def place_of(name: str) -> Path | None:
    """Return the path of a downloaded model of this name; None if no model can have this name."""
    if name in KNOWN:
        return models_folder() / KNOWN[name].file
    if HUB_NAME.fullmatch(name) is None:
        return None
    owner, _, rest = name.partition("/")
    return models_folder() / owner / rest.replace("/", "--")  # a revision may have slashes: refs/pr/1


def is_at_hand(name: str) -> bool:
    """Return whether a model is downloaded; the file of a known model must also have the known length."""
    place = place_of(name)
    if place is None or name not in KNOWN:
        return place is not None and place.is_dir()
    return place.is_file() and place.stat().st_size == KNOWN[name].bytes


def fetched_model(name: str) -> Path | None:
    """Return the file or folder of a downloaded model; None for a name that is neither known nor downloaded from the
    hub.

    Raises:
        WorkbenchError: for a known model that is not downloaded; the message has the download command.
    """
    if is_at_hand(name):
        return place_of(name)
    if name not in KNOWN:
        return None
    model = KNOWN[name]
    raise WorkbenchError(
        f"model {name!r} is not fetched, or incomplete: `{model.command}` fetches it "
        f"({format_bytes(model.bytes)}, {model.licence})"
    )


def hub_models() -> list[str]:
    """Return the names of downloaded hub models."""
    folder = models_folder()
    return [path.relative_to(folder).as_posix() for path in sorted(folder.glob("[!.]*/[!.]*")) if path.is_dir()]


def remove_model(name: str) -> Path:
    """Delete a downloaded model, and what an interrupted download of it left; return its former path."""
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
    """Yield the download folder of a model, locked for one process; an empty folder is removed afterwards.

    Disk errors within the block become one error that names the folder and the remedy.
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
