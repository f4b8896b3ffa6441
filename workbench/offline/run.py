"""Run a batch file, without streaming and in order; a stopped run is resumed.

    line -> dialect -> Call -> prompts -> runner -> pieces -> dialect -> line of the answers

Equal batches give equal files: results depend on no clock, no random source and no earlier line.
"""

from __future__ import annotations

import hashlib
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from workbench.constrained.grammar_trial import GrammarTrial, TrialUnavailable
from workbench.engine.runner import Runner
from workbench.errors import WorkbenchError
from workbench.offline.output_file import OutputFile
from workbench.serve.answers.answer_pieces import AnswerPieces
from workbench.serve.answers.pieces import Piece, ToolCallBegun, Used
from workbench.serve.batches.batch_requests import BatchItem
from workbench.serve.batches.lines import check_whole, read_lines, result_line
from workbench.serve.bodies.fields import IgnoredFields, invalid
from workbench.serve.call import Caller
from workbench.serve.config import ServerSettings
from workbench.serve.dialect import Dialect, read_call
from workbench.serve.dialects.anthropic.messages import AnthropicMessages
from workbench.serve.dialects.openai.chat import OpenAIChat
from workbench.serve.dialects.openai.completions import OpenAICompletions
from workbench.serve.dialects.responses.responses import OpenAIResponses
from workbench.serve.errors import ApiError
from workbench.serve.served_model import ServedModel, not_served
from workbench.trace.events import Event, Finished

MAX_PENDING_LINES = 256  # lines in progress before the first of them is written
SIGNING_KEY = b"offline"  # key for signing thoughts, equal in every run
TIMES = ("created", "created_at", "completed_at")  # timestamp fields of answers, set to 0 in the output file


@dataclass
class BatchProgress:
    """The progress of a batch. Token counts and ignored fields (reasons by name) are of this run only."""

    lines: int = 0
    already_written: int = 0  # lines that were in the output file at the start
    answered: int = 0  # answered lines in the output file, earlier runs included
    failed: int = 0  # failed lines in the output file, earlier runs included
    truncated_bytes: int = 0  # bytes of a truncated partial line
    prompt_tokens: int = 0
    completion_tokens: int = 0
    ignored: dict[str, str] = field(default_factory=dict)


class _Line(NamedTuple):
    """A line of the source, the id of its answer, and the random seed if the request has none."""

    id: str
    seed: int
    raw: bytes


@dataclass
class _PendingLine:
    """A line without a written answer, with the pieces of its answer so far."""

    line: _Line
    item: BatchItem
    error: ApiError | None = None
    reader: AnswerPieces | None = None
    pieces: list[Piece] = field(default_factory=list)
    num_unfinished: int = 0  # Finished events still to come


def run_batch(
    source: Path, out: Path, load: Callable[[], ServedModel], settings: str,
    report: Callable[[BatchProgress], None] = lambda tally: None, max_pending_lines: int = MAX_PENDING_LINES,
) -> BatchProgress:  # fmt: skip
    """Answer every line of `source` that has no answer in `out` yet.

    Args:
        source: the batch file, JSON lines.
        out: the output file. A file started with other lines or settings is refused.
        load: loads the model, if there is work; no other thread may use its runner during the batch.
        settings: all settings that affect a response, besides its line.
        report: receives the progress after every line.
        max_pending_lines: maximum lines in progress at once.
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
            _BatchRun(load(), file, tally, report).run(lines, max_pending_lines)
    return tally


def _lines(source: Path, settings: str) -> Iterator[_Line]:
    """Yield each line that is not blank. Seeds do not depend on the settings: runs with other settings draw the same
    numbers.
    """
    try:
        with source.open("rb") as file:
            for number, raw in enumerate(filter(None, map(bytes.strip, file)), 1):
                digest = hashlib.sha256(b"%d\0%b" % (number, raw))
                seed = int.from_bytes(digest.digest()[:8]) >> 2
                digest.update(b"\0" + settings.encode())
                yield _Line(digest.hexdigest()[:24], seed, raw)
    except OSError as error:
        raise WorkbenchError(f"batch {source}: cannot be read ({error.strerror}); name a JSON-lines file") from None


def _check(file: OutputFile, lines: list[_Line]) -> None:
    for number, found in enumerate(file.ids, 1):
        if number > len(lines) or found != f"batch_req_{lines[number - 1].id}":
            raise WorkbenchError(
                f"output {file.path}, line {number}: answers another batch, or this one under other settings; name "
                "another file, or move this one away"
            )


class _BatchRun:
    def __init__(
        self, model: ServedModel, file: OutputFile, tally: BatchProgress, tell: Callable[[BatchProgress], None]
    ):
        assert isinstance(model.runner, Runner), "a batch file is run by one runner, not by a cluster"
        self.model, self.runner, self.file, self.tally, self.tell = model, model.runner, file, tally, tell
        dialects: list[Any] = [OpenAICompletions(), OpenAIChat(), OpenAIResponses(SIGNING_KEY)]
        dialects.append(AnthropicMessages(SIGNING_KEY))
        self.dialects: dict[str, Dialect] = {each.path: each for each in dialects}
        self.settings, self.ignored = ServerSettings(), IgnoredFields()
        tokenizer = model.tokenizer
        self.trial = GrammarTrial({} if tokenizer is None or tokenizer.byte_rule is None else {model.name: tokenizer})
        self.pending: deque[_PendingLine] = deque()  # lines in order
        self.asking: dict[str, _PendingLine] = {}  # lines by request id
        self.queue: deque[Event] = deque()

    def run(self, lines: list[_Line], ahead: int) -> None:
        items = read_lines((line.raw for line in lines), self.dialects, self.ignored)
        with self.trial:
            try:
                for number, (line, item) in enumerate(zip(lines, items, strict=True), 1):
                    if number <= self.tally.already_written:
                        continue
                    self.submit(_PendingLine(line, item, item.error))
                    while len(self.pending) >= ahead:
                        self.step()
                while self.pending:
                    self.step()
            finally:
                self.runner.cancel_all(self.queue)

    def submit(self, place: _PendingLine) -> None:
        self.pending.append(place)
        if place.error is None:
            try:
                self.begin(place)
            except TrialUnavailable:  # a temporary condition of this machine: a later run resumes here
                raise
            except WorkbenchError as error:
                place.error = invalid(error)
        self.collect()

    def begin(self, place: _PendingLine) -> None:
        """Parse a line's call and submit its prompts (WorkbenchError if it is refused)."""
        dialect, model = self.dialects[place.item.path], self.model
        call = read_call(
            dialect, {"model": model.name, **place.item.body}, lambda: self.find(place), self.settings, Caller()
        )
        check_whole(call)
        self.ignored.add_all(call.ignored)
        sampling = call.sampling if call.has_seed else call.sampling.model_copy(update={"seed": place.line.seed})
        call = replace(call, id=_own_id(call.id, place.line.id), sampling=sampling)
        prepared = model.prepare(call)
        grammar = prepared[0].request.sampling.response_format
        if grammar is not None and model.name in self.trial.vocabularies:
            self.trial.check(model.name, grammar)
        place.reader = AnswerPieces(call, prepared, model.tokenizer)
        for each in prepared:
            shows_tokens = each.format is not None or sampling.logprobs is not None or call.options.get("token_ids")
            self.asking[each.request.request_id] = place
            place.num_unfinished += self.runner.submit(replace(each.request, final_only=not shows_tokens), self.queue)

    def find(self, place: _PendingLine) -> ServedModel:
        """Return the batch's model if the line names it or no model (ApiError for another model)."""
        name = place.item.body.get("model", self.model.name)
        if name != self.model.name:
            raise not_served(name, [self.model.name])
        return self.model

    def step(self) -> None:
        assert self.runner.has_unfinished_requests, "lines are unfinished, and no request is running"
        self.runner.step(self.queue)
        self.collect()

    def collect(self) -> None:
        """Collect events, and write finished lines in order, up to the first unfinished one."""
        while self.queue:
            event = self.queue.popleft()
            place = self.asking.get(event.request_id)
            if place is not None and place.reader is not None:
                place.pieces += place.reader.push([event])
                place.num_unfinished -= isinstance(event, Finished)
        while self.pending and not self.pending[0].num_unfinished:
            self.write(self.pending.popleft())

    def write(self, place: _PendingLine) -> None:
        status, body = self.answer(place)
        is_answered = status == 200
        if is_answered and place.reader is not None:
            self.tally.prompt_tokens += place.reader.used.prompt_tokens
            self.tally.completion_tokens += place.reader.used.completion_tokens
        self.file.append(result_line(place.line.id, place.item.custom_id, (status, body)))
        self.tally.answered += is_answered
        self.tally.failed += not is_answered
        self.tally.ignored = dict(self.ignored)
        self.asking = {id: each for id, each in self.asking.items() if each is not place}
        self.tell(self.tally)

    def answer(self, place: _PendingLine) -> tuple[int, Mapping[str, Any]]:
        """Return the status and body of a line's answer or error."""
        line_id = place.line.id
        dialect = self.dialects.get(place.item.path) or self.dialects[OpenAIChat.path]
        error, reader = place.error, place.reader
        if reader is not None and (failure := reader.failure) is not None:
            error = ApiError(failure.kind, failure.detail or failure.message)
        if error is not None:
            return dialect.error(error, f"req_{line_id}")
        assert reader is not None
        pieces = [
            replace(each, id=_own_id(each.id, line_id, each.choice, each.index))
            if isinstance(each, ToolCallBegun)
            else each
            for each in place.pieces
        ]
        used = reader.used  # cache and draft counts are left out: they depend on other lines
        pieces.append(Used(0, used.prompt_tokens, used.completion_tokens, thinking_tokens=used.thinking_tokens))
        body = dialect.answer(reader.call, self.model, pieces)
        return 200, body | {name: 0 for name in TIMES if body.get(name)}


def _own_id(drawn: str, *place: object) -> str:
    """Return an id in the format of the random id `drawn`, derived from its position `place`."""
    digest = hashlib.sha256(repr(place).encode()).hexdigest()
    return re.sub("[0-9a-f]+$", lambda digits: digest[: len(digits[0])], drawn)
