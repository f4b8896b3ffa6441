"""Find models that were fetched, choose the one that speaks with people, remove one.

    DATA/models/FILE.gguf                     a known model
    DATA/models/OWNER/NAME[@REVISION][:PART]  a folder of the hub's files, under the name that a person gave
    DATA/models/.NAME                         what is being fetched; whoever fetches holds its lock

Nothing here fetches: that is `fetch.py`, which only `workbench model get` calls.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from workbench.errors import DISK_FULL_ERRNOS, WorkbenchError
from workbench.files import DATA_VARIABLE, data_directory
from workbench.models.known import KNOWN, KnownModel

PEOPLES_MODEL, BUNDLED_CHAT_MODEL = "smollm2", "demo-chat"
DEFAULT_VARIABLE = "WORKBENCH_DEFAULT_MODEL"
HUB_NAME = re.compile(
    r"(?P<repo>\w[\w.-]*/\w[\w.-]*?)(?:@(?P<revision>\w[\w./-]*))?(?::(?P<part>\w[\w.-]*))?", re.ASCII
)


def default_model() -> str:
    """Return the name of the model that speaks where a person names none: `smollm2` if it is at hand, else `demo-chat`.

    `WORKBENCH_DEFAULT_MODEL` names another. Tests, experiments and records name their model.

    Example: `runner = workbench.load(workbench.default_model())`
    """
    if given := os.environ.get(DEFAULT_VARIABLE):
        return given
    return PEOPLES_MODEL if is_at_hand(PEOPLES_MODEL) else BUNDLED_CHAT_MODEL


def models_folder() -> Path:
    """Return the folder of fetched models, which may not be there yet."""
    return data_directory() / "models"


def place_of(name: str) -> Path | None:
    """Return where a model of this name lies once it is fetched; None for a name of no such model."""
    if name in KNOWN:
        return models_folder() / KNOWN[name].file
    found = HUB_NAME.fullmatch(name)
    return None if found is None or ".." in name else models_folder() / _flat(name)


def _flat(name: str) -> str:
    """Return a model's name as OWNER and one folder: a revision may have slashes (`refs/pr/1`)."""
    owner, _, rest = name.partition("/")
    return f"{owner}/{rest.replace('/', '--')}" if rest else owner


def is_at_hand(name: str) -> bool:
    """Return whether a fetched model is there; of a known one the file has to have its length."""
    place = place_of(name)
    return place is not None and (_length(place) == KNOWN[name].bytes if name in KNOWN else place.is_dir())


def _length(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


def fetched_model(name: str) -> Path | None:
    """Return the file or folder of a fetched model; None for a name that is neither known nor one of the hub's here.

    Raises:
        WorkbenchError: for a known model that is not at hand, or whose file is cut short, with the command to fetch it.
    """
    place = place_of(name)
    if place is None or is_at_hand(name):
        return place
    if name not in KNOWN:
        return None
    model = KNOWN[name]
    if (length := _length(place)) is not None:
        raise WorkbenchError(
            f"model {name!r}: {place} has {length:,} bytes, must have {model.bytes:,}; `{model.command}` fetches it anew"
        )
    raise WorkbenchError(
        f"model {name!r} is not at hand: `{model.command}` fetches it ({model.bytes / 1e6:.0f} MB, {model.licence})"
    )


@dataclass(frozen=True)
class ListedModel:
    """A model as `workbench model list` shows it: a known one, or one of the hub's that was fetched."""

    name: str
    known: KnownModel | None
    bytes: int
    path: Path | None  # None: not at hand


def listed_models() -> list[ListedModel]:
    """Return the known models, and those of the hub that are at hand."""
    listed = [
        ListedModel(name, model, model.bytes, place_of(name) if is_at_hand(name) else None)
        for name, model in KNOWN.items()
    ]
    for folder in sorted(models_folder().glob("[!.]*/[!.]*")):
        if folder.is_dir():
            size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
            listed.append(ListedModel(f"{folder.parent.name}/{folder.name}", None, size, folder))
    return listed


def remove_model(name: str) -> Path:
    """Delete a fetched model, with what is left of a fetch that was broken off; return where it was."""
    place = place_of(name)
    if place is None or not (place.exists() or _gathered_in(name).exists()):
        here = [each.name for each in listed_models() if each.path is not None]
        raise WorkbenchError(f"no model {name!r} was fetched: {', '.join(here) or 'none'} can be removed")
    with fetching(name, lambda line: None) as folder, storing():
        shutil.rmtree(folder)
        if place.is_dir():
            shutil.rmtree(place)
            with suppress(OSError):  # other models of its owner
                place.parent.rmdir()
        else:
            place.unlink(missing_ok=True)
    return place


@contextmanager
def storing() -> Iterator[None]:
    """Turn what a disk refuses into one error that names the folder and what would be right."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or " ".join(str(error).split())
        remedy = "make room there" if error.errno in DISK_FULL_ERRNOS else "make it writable"
        message = f"models are kept in {models_folder()}: cannot be written ({reason})"
        raise WorkbenchError(f"{message}; {remedy}, or name another folder in {DATA_VARIABLE}") from None


@contextmanager
def fetching(name: str, report: Callable[[str], None]) -> Iterator[Path]:
    """Yield the folder in which a model's files are gathered, to one process at a time; others wait.

    It is there from then on: whoever is done with it deletes it.
    """
    import fcntl  # other systems lack it

    folder = _gathered_in(name)
    while True:
        with storing():
            folder.mkdir(parents=True, exist_ok=True)
            handle = os.open(folder, os.O_RDONLY)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                report(f"{name}: another process is fetching it; waiting")
                fcntl.flock(handle, fcntl.LOCK_EX)
            if _is_open(folder, handle):
                yield folder
                return  # else it was deleted by whoever had the lock
        finally:
            os.close(handle)


def _gathered_in(name: str) -> Path:
    return models_folder() / f".{_flat(name).replace('/', '--')}"


def _is_open(folder: Path, handle: int) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), folder.stat())
    except FileNotFoundError:
        return False
