"""Store served requests, and the steps that computed them, in a folder, so that each can be run again by its id.

    owner's thread: record(event) ---> pending lines ---> write(): files of the folder; the oldest files are deleted

A file begins with a description of the engine, and has one line for each request, step and end. Files hold prompts and
answers, so only their owner may read them.
"""

from __future__ import annotations

import logging
import os
import platform
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from workbench.engine.config import EngineConfig
from workbench.engine.loaded_model import LoadedModel
from workbench.engine.replay_request import RecordedEnd, ReplayWork, ServedRequest
from workbench.errors import WorkbenchError, nearest
from workbench.request import Request, SamplingParameters
from workbench.serve.json_bytes import dumps, loads
from workbench.serve.served_model import ServedModel
from workbench.trace.events import Event, Finished, SpanRecord, StepPlanned

LOG = logging.getLogger(__name__)
FILES = 8  # files within the bound; one file is deleted at a time
SUFFIX = ".requests.jsonl"
PLAIN = SamplingParameters().model_dump(mode="json")


def describe_software() -> dict[str, str]:
    """Return the versions of software that may change a result's bits, besides weights and settings."""
    return {"torch": torch.__version__, "python": platform.python_version(), "machine": platform.machine(),
            "threads": str(torch.get_num_threads())}  # fmt: skip


class KeptRequests:
    """The stored requests of one model. Only the model's thread may call `record`; any thread may call the other
    methods.

    Args:
        folder: folder of the files, created if missing.
        model: the model, with the engine that serves it.
        max_bytes: maximum bytes of all files in the folder, including other models' and servers' files.

    Raises:
        WorkbenchError: if the folder cannot be written.
    """

    def __init__(self, folder: Path, model: ServedModel, max_bytes: int):
        self._folder, self._model, self._max_bytes = folder, model, max_bytes
        self._lines: deque[Request | Event] = deque()
        self._writing = threading.Lock()
        self._began, self._number, self._path = f"{time.time_ns():x}-{os.getpid()}-{id(self):x}", 0, Path()
        self._size = max_bytes  # of the file that is written; a new one is begun beyond its share
        self._has_failed = False
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not os.access(folder, os.W_OK):
                raise PermissionError(None, "it may not be written")
        except OSError as error:
            raise WorkbenchError(f"server.replay_folder: {folder}: {error.strerror}; name another") from None

    def enter(self, request: Request) -> None:
        """Store a request before it is submitted to the engine."""
        self._lines.append(request)

    def record(self, event: Event) -> None:
        """Store an event, if a replay needs it."""
        if isinstance(event, StepPlanned | Finished):
            self._lines.append(event)

    def write(self, wait: bool = True) -> None:
        """Write pending lines; beyond the bound, delete the oldest files. Lines that cannot be written are lost, which
        is logged once. Without `wait`, return at once if another thread writes: its disk may be slow."""
        if not self._writing.acquire(blocking=wait):
            return
        try:
            lines = [self._lines.popleft() for _ in range(len(self._lines))]
            if self._has_failed or not lines:
                return
            try:
                self._append(b"".join(dumps(_values(each)) + b"\n" for each in lines))
            except OSError as error:
                self._has_failed = True
                LOG.error("%s: no more requests are kept: %s", self._folder, error)
        finally:
            self._writing.release()

    def _append(self, raw: bytes) -> None:
        created = self._size + len(raw) > self._max_bytes // FILES
        if created:
            self._path = self._folder / f"{self._began}-{self._number:08}{SUFFIX}"
            self._number, self._size = self._number + 1, 0
            raw = dumps(self._head()) + b"\n" + raw
        try:
            opened = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT * created, 0o600)
        except FileNotFoundError:  # another process has deleted it
            if created:
                raise
            self._size = self._max_bytes
            return self._append(raw)
        with os.fdopen(opened, "ab") as file:
            file.write(raw)
        self._size += len(raw)
        found = sorted(_ages_and_sizes(self._folder), reverse=True)
        left = self._max_bytes
        for _, path, size in found:
            left -= size
            if left < 0 and path != self._path:
                path.unlink(missing_ok=True)

    def _head(self) -> dict[str, Any]:
        runner = self._model.runner
        return {
            "server": self._began, "model": self._model.name, "loads": getattr(runner, "is_from_config", False),
            "config": runner.config.model_dump(mode="json"), "fingerprint": self._model.fingerprint,
            "software": describe_software(),
        }  # fmt: skip


def _ages_and_sizes(folder: Path) -> Iterator[tuple[int, Path, int]]:
    """Yield (modification time, path, bytes) of each file; other processes may delete files meanwhile."""
    for path in folder.glob(f"*{SUFFIX}"):
        with suppress(FileNotFoundError):
            found = path.stat()
            yield found.st_mtime_ns, path, found.st_size


def _values(kept: Request | Event) -> dict[str, Any]:
    if isinstance(kept, Request):
        sampling = kept.sampling.model_dump(mode="json")
        sampling = {name: value for name, value in sampling.items() if value != PLAIN[name]}
        return {"request": kept.request_id, "prompt_ids": kept.prompt_ids, "sampling": sampling}
    if isinstance(kept, StepPlanned):
        return {"step": kept.step, "spans": [tuple(each) for each in kept.spans]}
    assert isinstance(kept, Finished)
    return {"end": kept.request_id, "sample": kept.sample, "reason": kept.reason, "token_ids": kept.token_ids}


@dataclass(frozen=True)
class KeptCall:
    """A stored call that can be run again, with the stored requests of its engine.

    `head` describes the engine; `asked` are the requests of the call, one for each of its prompts.
    """

    head: Mapping[str, Any]
    served: Mapping[str, ServedRequest]
    steps: tuple[StepPlanned, ...]
    asked: tuple[str, ...]
    call_id: str

    @property
    def config(self) -> EngineConfig:
        return EngineConfig.model_validate(self.head["config"])

    def work(self, model: LoadedModel) -> ReplayWork:
        """Return the replay of the call on a loaded model, ready to run (WorkbenchError if it cannot begin)."""
        return ReplayWork(self.config, self.served, self.steps, self.asked, model, self.call_id)

    @classmethod
    def read(cls, folder: Path, call_id: str) -> KeptCall:
        """Read a call by its id.

        Raises:
            WorkbenchError: for a folder without stored requests, an unknown id, or a call with a deleted beginning.
        """
        by_server: dict[str, list[dict[str, Any]]] = {}
        for path in sorted(folder.glob(f"*{SUFFIX}")):
            head, *lines = _lines_of(path) or [{}]
            if "server" in head:  # its first line is complete
                by_server.setdefault(head["server"], [head]).extend(lines)
        if not by_server:
            raise WorkbenchError(
                f"replay: {folder} holds no served requests; name the `server.replay_folder` of a server"
            )
        known = [line["request"] for lines in by_server.values() for line in lines if "request" in line]
        for head, *lines in by_server.values():
            names = [line["request"] for line in lines if "request" in line]
            if asked := tuple(name for name in names if name == call_id or _is_prompt_of(name, call_id)):
                return cls(head, _served(lines), tuple(_steps(lines)), asked, call_id)
        ended = any(line.get("end") == call_id for lines in by_server.values() for line in lines)
        hint = nearest(call_id[:200], known[-1000:])
        why = "its beginning is not kept any more" if ended else f"no request of this id is kept{hint}"
        listed = f"{len(known)} are, from {known[0]} to {known[-1]}" if known else "none is"
        raise WorkbenchError(
            f"replay: {call_id[:200]!r} in {folder}: {why}; {listed} (`server.replay_bytes` bounds them)"
        )


def _lines_of(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a file."""
    try:
        raw = path.read_bytes()
        return [loads(line) for line in raw[: raw.rfind(b"\n") + 1].splitlines()]
    except FileNotFoundError:  # deleted meanwhile
        return []
    except (OSError, ValueError) as error:
        raise WorkbenchError(f"replay: {path} is damaged ({error}); delete it to read the others") from None


def _is_prompt_of(name: str, call_id: str) -> bool:
    front, _, number = name.rpartition(".")
    return front == call_id and number.isdigit()


def _served(lines: list[dict[str, Any]]) -> dict[str, ServedRequest]:
    ends: dict[str, list[RecordedEnd]] = {}
    for line in lines:
        if "end" in line:
            end = RecordedEnd(line["sample"], line["reason"], tuple(line["token_ids"]))
            ends.setdefault(line["end"], []).append(end)
    return {
        line["request"]: ServedRequest(
            Request(line["request"], tuple(line["prompt_ids"]), SamplingParameters.model_validate(line["sampling"])),
            tuple(ends.get(line["request"], ())),
        )
        for line in lines if "request" in line
    }  # fmt: skip


def _steps(lines: list[dict[str, Any]]) -> Iterator[StepPlanned]:
    for line in lines:
        if "step" in line:
            yield StepPlanned(0.0, step=line["step"], spans=tuple(SpanRecord(*each) for each in line["spans"]))
