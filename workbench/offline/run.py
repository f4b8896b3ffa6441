"""Run a batch file: without streaming, in order, and from where it stopped."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from workbench.engine.runner import Runner
from workbench.errors import WorkbenchError
from workbench.offline.output_file import OutputFile
from workbench.offline.requests import BatchModel, BatchRequest, InvalidLine, custom_id_of, parse_line
from workbench.offline.responses import error_line, response_line
from workbench.trace.events import Decoded, Event, Finished

MAX_PENDING_LINES = 256  # lines in progress before the first of them is written


@dataclass
class BatchProgress:
    """The progress of a batch. Tokens are those of this run."""

    lines: int = 0
    already_written: int = 0  # already in the output file
    answered: int = 0  # in the output file, those from before included
    failed: int = 0  # likewise
    truncated_bytes: int = 0  # of a partial line that was cut off
    prompt_tokens: int = 0
    completion_tokens: int = 0


@dataclass
class _PendingLine:
    """A line that is not written yet, with the events that it still needs."""

    line_id: str
    request: BatchRequest | None = None
    num_unfinished: int = 0  # Finished events still to come
    ends: list[Finished] = field(default_factory=list)
    tokens: list[Decoded] = field(default_factory=list)
    answer: bytes = b""  # of a line that could not be asked


def run_batch(
    source: Path, out: Path, load: Callable[[], tuple[Runner, BatchModel]], settings: str,
    report: Callable[[BatchProgress], None] = lambda tally: None, max_pending_lines: int = MAX_PENDING_LINES,
) -> BatchProgress:  # fmt: skip
    """Answer every line of `source` that `out` does not answer yet.

    Args:
        source: the batch file, JSON lines.
        out: the output file. One that was begun for other lines or settings is refused.
        load: loads the runner and its model, if there is work.
        settings: everything that decides a response besides its line.
        report: receives the progress after every line.
        max_pending_lines: the most lines in progress at once.
    """
    if source.resolve() == out.resolve():
        raise WorkbenchError(f"batch {source}: the answers must go to another file")
    tally = BatchProgress()
    lines = list(_lines(source, settings))
    tally.lines = len(lines)
    with OutputFile.open(out) as file:
        tally.already_written, tally.truncated_bytes = len(file.ids), file.truncated_bytes
        tally.failed, tally.answered = file.failed, len(file.ids) - file.failed
        _check(file, lines)
        if tally.already_written < tally.lines:
            runner, model = load()
            _BatchRun(runner, model, file, tally, report).run(lines, max_pending_lines)
    return tally


def _lines(source: Path, settings: str) -> Iterator[tuple[str, bytes]]:
    """Yield each line that is not blank, with the id of its response."""
    try:
        with source.open("rb") as file:
            number = 0
            for raw in file:
                if raw.strip():
                    number += 1
                    text = b"\0".join((settings.encode(), str(number).encode(), raw.strip()))
                    yield hashlib.sha256(text).hexdigest()[:24], raw.strip()
    except OSError as error:
        raise WorkbenchError(f"batch {source}: cannot be read ({error.strerror}); name a JSON-lines file") from None


def _check(file: OutputFile, lines: list[tuple[str, bytes]]) -> None:
    for number, found in enumerate(file.ids, 1):
        if number > len(lines) or found != f"batch_req_{lines[number - 1][0]}":
            raise WorkbenchError(
                f"output {file.path}, line {number}: answers another batch, or this one under other settings; name "
                "another file, or move this one away"
            )


class _BatchRun:
    def __init__(
        self,
        runner: Runner,
        model: BatchModel,
        file: OutputFile,
        tally: BatchProgress,
        tell: Callable[[BatchProgress], None],
    ):
        self.runner, self.model, self.file, self.tally, self.tell = runner, model, file, tally, tell
        self.pending: dict[str, _PendingLine] = {}  # by line number, those not written, in order
        self.queue: deque[Event] = deque()

    def run(self, lines: list[tuple[str, bytes]], ahead: int) -> None:
        names: dict[str, int] = {}
        try:
            for number, (line_id, raw) in enumerate(lines, 1):
                first = names.setdefault(name, number) if (name := custom_id_of(raw)) else number
                if number <= self.tally.already_written:
                    continue
                self.submit(number, line_id, raw, first)
                while len(self.pending) >= ahead:
                    self.step()
            while self.pending:
                self.step()
        finally:
            self.runner.cancel_all(self.queue)

    def submit(self, number: int, line_id: str, raw: bytes, first: int) -> None:
        place = self.pending[str(number)] = _PendingLine(line_id)
        try:
            place.request = parse_line(raw, number, self.model)
            if first != number:
                raise InvalidLine(
                    "invalid_request", f"custom_id: {place.request.custom_id!r} is that of line {first} too"
                )
        except InvalidLine as error:
            name = custom_id_of(raw)  # a line that has none is found by its number
            words = str(error) if name else f"line {number}: {error}"
            place.answer = error_line(line_id, name, error.code, words)
        else:
            place.num_unfinished = self.runner.submit(place.request.request, self.queue)
        self.collect()

    def step(self) -> None:
        assert self.runner.has_unfinished_requests, "lines are unfinished, and no request is running"
        self.runner.step(self.queue)
        self.collect()

    def collect(self) -> None:
        """Collect events, and write every line whose predecessors are written."""
        while self.queue:
            event = self.queue.popleft()
            place = self.pending.get(event.request_id)
            if place is None:
                continue
            if isinstance(event, Finished):
                place.num_unfinished -= 1
                place.ends.append(event)
            elif isinstance(event, Decoded):
                place.tokens.append(event)
        while self.pending and self.pending[name := next(iter(self.pending))].num_unfinished == 0:
            self.write(self.pending.pop(name))

    def write(self, place: _PendingLine) -> None:
        good = bool(place.ends) and all(end.reason not in ("refused", "error") for end in place.ends)
        if place.request is not None and place.ends:
            place.answer = response_line(place.line_id, place.request, self.model, place.ends, place.tokens)
        if good:
            self.tally.prompt_tokens += place.ends[0].prompt_tokens
            self.tally.completion_tokens += sum(len(end.token_ids) for end in place.ends)
        self.file.append(place.answer)
        self.tally.answered += good
        self.tally.failed += not good
        self.tell(self.tally)
