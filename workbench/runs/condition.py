"""Check the integrity of a run folder: complete, running, killed or damaged."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from workbench.errors import WorkbenchError
from workbench.files import read_bytes, read_json, read_json_file
from workbench.runs import process as alive

MARKER = "INCOMPLETE"
MANIFEST = "manifest.json"
MARKER_BYTES = 1024
State = Literal["complete", "running", "killed", "unfinished", "no manifest", "damaged"]


@dataclass(frozen=True)
class FolderCondition:
    """The state of a run folder.

    `damaged` describes each missing or changed file, `readable` names the others. `running` and `killed` are known only
    if the writer ran on this machine since its last boot; otherwise the state is `unfinished`. Without a manifest (a
    partial copy or an older record) the expected files are unknown.
    """

    state: State
    manifest: dict[str, dict] = field(default_factory=dict, repr=False)  # file name -> bytes, sha256
    damaged: tuple[str, ...] = ()
    readable: tuple[str, ...] = ()
    reason: str = ""  # reason of an abandoned run, if its marker has one

    def __str__(self) -> str:
        here = ", ".join(self.readable) or "nothing"
        match self.state:
            case "complete":
                return "complete"
            case "running":
                return f"unfinished (it is still running) and holds {here}; wait for its end"
            case "killed":
                return f"unfinished ({self.reason or 'it was killed or interrupted'}) and holds {here}; run it again"
            case "unfinished":
                return f"unfinished (it was killed or is still running) and holds {here}; run it again"
            case "no manifest":
                return f"{MANIFEST} is missing: this is no run folder, or only half of one was copied; it holds {here}"
            case "damaged":
                return f"{'; '.join(self.damaged)}; copy the whole folder or run it again"


def check_folder(path: Path, contents: bool = False) -> FolderCondition:
    """Check the run folder `path` by file names and sizes, and with `contents` also by SHA-256.

    Raises WorkbenchError if there is no such folder."""
    if not path.is_dir():
        raise WorkbenchError(f"run {path}: no such folder")
    here = tuple(sorted(p.name for p in path.glob("[!.]*") if p.name not in (MARKER, MANIFEST)))
    if (path / MARKER).exists():
        states: dict[bool | None, State] = {True: "running", False: "killed", None: "unfinished"}
        writer = _writer(path)
        why = writer.get("ended") if isinstance(writer, dict) else None
        ended = why is True or isinstance(why, str)  # True: in markers of older versions
        reason = " ".join(why.split()) if isinstance(why, str) else ""
        return FolderCondition(states[False if ended else alive.is_running(writer)], readable=here, reason=reason)
    if not (path / MANIFEST).exists():
        return FolderCondition("no manifest", readable=here)
    try:
        manifest = _manifest(path)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        return FolderCondition("damaged", damaged=(f"{MANIFEST} is damaged ({error})",), readable=here)
    wrong = {name: _wrong(path / name, expected, contents) for name, expected in manifest.items()}
    lacks = tuple(f"{name} {problem}" for name, problem in wrong.items() if problem)
    readable = tuple(name for name in here if not wrong.get(name))
    return FolderCondition("damaged" if lacks else "complete", manifest, lacks, readable)


def describe_unfinished(path: Path) -> str:
    """Return the state of a run that still has its INCOMPLETE marker, in words for a listing."""
    found = check_folder(path)
    reasons = {"running": "still running", "killed": found.reason or "killed or interrupted"}
    return "unfinished: " + reasons.get(found.state, "killed, or still running")


def fingerprint(path: Path) -> dict:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def marker_text(ended: str | None = None) -> bytes:
    """Return the content of the INCOMPLETE file: a sentence for readers, and the writing process or the reason why the
    run `ended`.

    The length is constant, so that a full disk has room to overwrite the marker."""
    writer = alive.describe_process() if ended is None else {"ended": ended[:MARKER_BYTES]}
    message = "This run was not finished, or still runs." if ended is None else "This run was not finished."
    while len(text := f"{message}\n{json.dumps(writer)}".encode()) >= MARKER_BYTES:
        assert writer is not None
        writer = {"ended": str(writer.get("ended", ""))[:-16]}
    return text.ljust(MARKER_BYTES - 1) + b"\n"


def _writer(path: Path) -> object:
    try:
        return read_json(read_bytes(path / MARKER).splitlines()[1])
    except (ValueError, IndexError):
        return None


def _manifest(path: Path) -> dict[str, dict]:
    files = read_json_file(path / MANIFEST)["files"]
    if not all(name == Path(name).name and set(entry) == {"bytes", "sha256"} for name, entry in files.items()):
        raise ValueError("an entry is not a file of this folder")
    return files


def _wrong(file: Path, expected: dict, contents: bool) -> str:
    if not file.is_file():
        return "is missing"
    if (size := file.stat().st_size) != expected["bytes"]:
        return f"has {size} bytes, {expected['bytes']} were written"
    if contents and fingerprint(file) != expected:
        return "is not what was written (its SHA-256 differs)"
    return ""
