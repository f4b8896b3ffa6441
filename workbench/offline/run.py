"""Run a batch file: without streaming, in order, and from where it stopped."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from workbench.engine.runner import Runner
from workbench.errors import WorkbenchError
from workbench.offline.answers import answered, failed
from workbench.offline.lines import Asked, BadLine, Model, custom_id_of, read_line
from workbench.offline.output_file import OutputFile
from workbench.trace.events import Decoded, Event, Finished

AHEAD = 256  # lines in progress before the first of them is written


@dataclass
class Tally:
    """The progress of a batch. Tokens are those of this run."""

    lines: int = 0
    kept: int = 0  # already in the output file
    answered: int = 0  # in the output file, those from before included
    failed: int = 0  # likewise
    mended_bytes: int = 0  # of a partial line that was cut off
    prompt_tokens: int = 0
    completion_tokens: int = 0


@dataclass
class _Place:
    """A line that is not written yet, with the events that it still needs."""

    line_id: str
    asked: Asked | None = None
    owed: int = 0  # Finished events still to come
    ends: list[Finished] = field(default_factory=list)
    tokens: list[Decoded] = field(default_factory=list)
    answer: bytes = b""  # of a line that could not be asked


def run_batch(
    source: Path, out: Path, load: Callable[[], tuple[Runner, Model]], settings: str,
    tell: Callable[[Tally], None] = lambda tally: None, ahead: int = AHEAD,
) -> Tally:  # fmt: skip
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
    tally = Tally()
    lines = list(_lines(source, settings))
    tally.lines = len(lines)
    with OutputFile.open(out) as file:
        tally.kept, tally.mended_bytes = len(file.ids), file.cut
        tally.failed, tally.answered = file.failed, len(file.ids) - file.failed
        _check(file, lines)
        if tally.kept < tally.lines:
            runner, model = load()
            _Work(runner, model, file, tally, tell).run(lines, ahead)
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


class _Work:
    def __init__(self, runner: Runner, model: Model, file: OutputFile, tally: Tally, tell: Callable[[Tally], None]):
        self.runner, self.model, self.file, self.tally, self.tell = runner, model, file, tally, tell
        self.places: dict[str, _Place] = {}  # by line number, those not written, in order
        self.box: deque[Event] = deque()

    def run(self, lines: list[tuple[str, bytes]], ahead: int) -> None:
        names: dict[str, int] = {}
        try:
            for number, (line_id, raw) in enumerate(lines, 1):
                first = names.setdefault(name, number) if (name := custom_id_of(raw)) else number
                if number <= self.tally.kept:
                    continue
                self.ask(number, line_id, raw, first)
                while len(self.places) >= ahead:
                    self.go_on()
            while self.places:
                self.go_on()
        finally:
            self.runner.cancel_all(self.box)

    def ask(self, number: int, line_id: str, raw: bytes, first: int) -> None:
        place = self.places[str(number)] = _Place(line_id)
        try:
            place.asked = read_line(raw, number, self.model)
            if first != number:
                raise BadLine("invalid_request", f"custom_id: {place.asked.custom_id!r} is that of line {first} too")
        except BadLine as error:
            name = custom_id_of(raw)  # a line that has none is found by its number
            words = str(error) if name else f"line {number}: {error}"
            place.answer = failed(line_id, name, error.code, words)
        else:
            place.owed = self.runner.submit(place.asked.request, self.box)
        self.hear()

    def go_on(self) -> None:
        assert self.runner.busy, "answers are owed, and nobody computes them"
        self.runner.step(self.box)
        self.hear()

    def hear(self) -> None:
        """Collect events, and write every line whose predecessors are written."""
        while self.box:
            event = self.box.popleft()
            place = self.places.get(event.request_id)
            if place is None:
                continue
            if isinstance(event, Finished):
                place.owed -= 1
                place.ends.append(event)
            elif isinstance(event, Decoded):
                place.tokens.append(event)
        while self.places and self.places[name := next(iter(self.places))].owed == 0:
            self.write(self.places.pop(name))

    def write(self, place: _Place) -> None:
        good = bool(place.ends) and all(end.reason not in ("refused", "error") for end in place.ends)
        if place.asked is not None and place.ends:
            place.answer = answered(place.line_id, place.asked, self.model, place.ends, place.tokens)
        if good:
            self.tally.prompt_tokens += place.ends[0].prompt_tokens
            self.tally.completion_tokens += sum(len(end.token_ids) for end in place.ends)
        self.file.add(place.answer)
        self.tally.answered += good
        self.tally.failed += not good
        self.tell(self.tally)
