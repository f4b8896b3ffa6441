"""Convert the engine's events of a call to the pieces of its answer: thoughts, texts, tool calls, ends, usage."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from workbench.prompt.answers import AnswerFormat, AnswerParser, ChannelText
from workbench.prompt.tokenization.tokenizer import Tokenizer
from workbench.request import FinishReason
from workbench.serve.answers.pieces import (
    Ended,
    EndReason,
    Failed,
    Piece,
    PromptRead,
    Text,
    Thought,
    TokenLogprob,
    ToolArguments,
    ToolCallBegun,
    Used,
)
from workbench.serve.answers.tool_call_text import CallText, ToolCallText
from workbench.serve.call import Call
from workbench.serve.errors import ENGINE_FAILED, STATUS
from workbench.serve.memory.prompt_cache import written_by_ttl
from workbench.serve.served_model import PreparedPrompt
from workbench.trace.events import Decoded, Event, Finished, PinnedPrefix, Prefilled, Verified

FLEET_REFUSALS = {"overloaded": "overloaded_error", "unavailable": "unavailable_error"}  # by `ended_by`
STOPPED: dict[str, EndReason] = {
    "eos": "stop", "grammar": "stop", "stop_token": "stop_sequence", "stop_string": "stop_sequence",
    "max_tokens": "length", "context": "context",
}  # fmt: skip


def new_call_id(is_short: bool = False) -> str:
    """Return an id of a tool call; nine letters and digits (`is_short`) if the model's template requires them."""
    return secrets.token_hex(5)[:9] if is_short else f"call_{secrets.token_hex(12)}"


@dataclass
class _Choice:
    """One answer in progress. `tokens` are not in a piece yet; `held` is white space that may precede a tool call."""

    number: int
    parser: AnswerParser | None
    end_token_ids: frozenset[int]  # the template's end tokens; they end every answer, so they are not reported as stops
    tokens: list[TokenLogprob] = field(default_factory=list)
    held: str = ""
    call: ToolCallText | None = None
    num_calls: int = 0
    num_tokens: int = 0
    finished: Finished | None = None


@dataclass
class _PromptUse:
    """The engine's work for one prompt, in tokens."""

    is_read: bool = False
    cached_tokens: int = 0
    computed: int = 0
    logprobs: list[TokenLogprob] = field(default_factory=list)
    pinned: list[PinnedPrefix] = field(default_factory=list)

    @property
    def written_by_ttl(self) -> tuple[tuple[float, int], ...]:
        return written_by_ttl(self.pinned, self.cached_tokens)


class AnswerPieces:
    """A converter of one call's events to pieces. Choices begin in the order 0, 1, 2: pieces of a later choice wait
    until the earlier ones have begun.
    """

    def __init__(
        self,
        call: Call,
        prepared: Sequence[PreparedPrompt],
        tokenizer: Tokenizer | None,
        new_id: Callable[[], str] | None = None,
    ):
        self.call, self._prepared, self._new_id = call, prepared, new_id
        self._has_text = tokenizer is not None  # otherwise each token is a piece, with its id alone
        self._prompts = {each.request.request_id: place for place, each in enumerate(prepared)}
        self._uses = [_PromptUse() for _ in prepared]
        self._n = call.sampling.n
        self._choices: list[_Choice] = []
        for each in prepared:
            sampling = each.request.sampling
            own = frozenset(sampling.stop_token_ids) - frozenset(call.sampling.stop_token_ids)
            for _ in range(self._n):
                parser = None
                if each.format is not None and tokenizer is not None:
                    before = each.request.prompt_ids
                    parser = AnswerParser(tokenizer, each.format, each.in_thought, sampling.stop, before)
                self._choices.append(_Choice(len(self._choices), parser, own))
        self._shows_thought = call.sampling.thinking is None or call.sampling.thinking.shown
        self._waiting: list[list[Piece]] = [[] for _ in self._choices]
        self._begun = 0  # number of the last choice that may be shown
        self._completion_tokens = self._thinking_tokens = self._drafted = self._accepted = 0
        self._accepting: dict[tuple[str, int], int] = {}  # accepted draft tokens still to come; a stop may cut them
        self.failure: Failed | None = None

    @property
    def used(self) -> Used:
        """Return the usage so far; of a prompt that is not yet computed to its end, only the computed tokens count."""
        lengths = [len(each.request.prompt_ids) for each in self._prepared]
        unfinished = sum(each.num_tokens for each in self._choices if each.finished is None)
        written: dict[float, int] = {}
        for seconds, tokens in (each for use in self._uses for each in use.written_by_ttl):
            written[seconds] = written.get(seconds, 0) + tokens
        return Used(
            prompt_tokens=sum(map(min, lengths, (each.computed for each in self._uses))),
            completion_tokens=self._completion_tokens + unfinished,
            cached_tokens=sum(each.cached_tokens for each in self._uses),
            written_tokens=sum(written.values()),
            thinking_tokens=self._thinking_tokens,
            drafted_tokens=self._drafted,
            accepted_tokens=self._accepted,
            cache_written_by_ttl=tuple(sorted(written.items())),
        )

    def push(self, events: Iterable[Event]) -> list[Piece]:
        """Take the events of a step; return the pieces to show now. Nothing follows `Failed`."""
        found: list[Piece] = []
        for event in events:
            place = self._prompts.get(event.request_id)
            if place is None or self.failure is not None:
                continue
            if isinstance(event, Prefilled):
                use = self._uses[place]
                if not use.computed:
                    use.cached_tokens = event.computed - event.tokens
                use.computed = max(use.computed, event.computed)
                use.logprobs += (TokenLogprob(*each) for each in event.logprobs)
                use.pinned += event.pinned
            elif isinstance(event, Verified):
                self._drafted += event.drafted
                self._accepting[event.request_id, event.sample] = event.accepted
            elif isinstance(event, Decoded | Finished):
                found += self._of_sample(place, event)
        return found

    def _of_sample(self, place: int, event: Decoded | Finished) -> list[Piece]:
        """Return the pieces that may be shown after an event of a sample."""
        failed = isinstance(event, Finished) and event.reason in (FinishReason.ERROR, FinishReason.REFUSED)
        if failed:
            assert isinstance(event, Finished)
            is_refused = event.reason == FinishReason.REFUSED
            words = event.error.removeprefix(f"request {event.request_id}: ")
            if is_refused:  # refused for its size, or by a fleet temporarily
                kind = FLEET_REFUSALS.get(event.ended_by, "invalid_request_error")
                self.failure = Failed(kind=kind, status=STATUS[kind], message=words)
            else:
                self.failure = Failed(message=ENGINE_FAILED, detail=words)
            return [self.failure]
        if isinstance(event, Finished):
            self._completion_tokens += len(event.token_ids)
            self._thinking_tokens += event.thinking_tokens
        elif coming := self._accepting.get((event.request_id, event.sample), 0):
            self._accepting[event.request_id, event.sample] = coming - 1
            self._accepted += 1
        if event.sample >= self._n:  # an extra sample of best_of: counted, not shown
            return []
        choice = self._choices[place * self._n + event.sample]
        before = self._read_prompt(place) if isinstance(event, Decoded) or event.token_ids else []
        pieces = self._decoded(choice, event) if isinstance(event, Decoded) else self._finished(choice, event)
        return [*self._in_order(place * self._n, before), *self._in_order(choice.number, pieces)]

    def _read_prompt(self, place: int) -> list[Piece]:
        use, prepared = self._uses[place], self._prepared[place]
        if use.is_read:
            return []
        use.is_read, ids = True, prepared.request.prompt_ids
        use.computed = len(ids)
        written = use.written_by_ttl
        return [
            PromptRead(
                place * self._n, len(ids), use.cached_tokens, sum(tokens for _, tokens in written), ids,
                tuple(use.logprobs), written, tuple(use.pinned),
            )
        ]  # fmt: skip

    def _in_order(self, number: int, pieces: list[Piece]) -> list[Piece]:
        """Return the pieces that may be shown: pieces of a choice wait until all choices before it have begun.

        A `PromptRead` does not begin a choice.
        """
        if number < self._begun:
            return pieces
        self._waiting[number] += pieces
        shown: list[Piece] = []
        while self._begun < len(self._choices) and (waiting := self._waiting[self._begun]):
            shown += waiting
            self._waiting[self._begun] = []
            if all(isinstance(piece, PromptRead) for piece in waiting):
                break
            self._begun += 1
        return shown

    def _decoded(self, choice: _Choice, event: Decoded) -> list[Piece]:
        choice.num_tokens += 1
        token = TokenLogprob(event.token_id, event.logprob, event.top_logprobs)
        choice.tokens.append(token)
        if choice.parser is None:
            channel = "thought" if event.channel == "thought" else "text"
            is_shown = event.text or not self._has_text
            return self._shown(choice, [ChannelText(channel, 0, event.text)] if is_shown else [])
        before = choice.parser.channel
        parts = choice.parser.push(event.token_id)
        if choice.parser.channel != before:  # a control token, which is text of neither channel
            choice.tokens.pop()
            pieces = self._shown(choice, parts)
            choice.tokens.clear()
            return [*pieces, *(self._end_call(choice) if before == "call" else [])]
        return self._shown(choice, parts)

    def _shown(self, choice: _Choice, parts: Iterable[ChannelText]) -> list[Piece]:
        found: list[Piece] = []
        for part in parts:
            if part.channel == "thought":
                found += self._thought(choice, part.text)
            elif part.channel == "call":
                choice.tokens.clear()
                choice.held = ""
                if choice.call is None:
                    choice.call = ToolCallText(choice.num_calls, self._format(choice) or AnswerFormat())
                found += self._calls(choice, choice.call.push(part.text))
            else:
                found += self._text(choice, part.text)
        return found

    def _thought(self, choice: _Choice, text: str) -> list[Piece]:
        ids, choice.tokens = tuple(each.token_id for each in choice.tokens), []
        return [Thought(choice.number, text, ids)] if self._shows_thought else []

    def _text(self, choice: _Choice, text: str) -> list[Piece]:
        """Show text, except white space between it and a tool call."""
        text = choice.held + text
        choice.held = ""
        if choice.num_calls and not text.strip():
            choice.held = text
            return []
        if choice.parser is not None and self._closes_calls(choice) and text.endswith("\n"):
            text, choice.held = text[:-1], "\n"
        if not text and self._has_text:
            return []
        tokens, choice.tokens = tuple(choice.tokens), []
        logprobs = tokens if self.call.sampling.logprobs is not None else ()
        return [Text(choice.number, text, tuple(each.token_id for each in tokens), logprobs)]

    def _format(self, choice: _Choice) -> AnswerFormat | None:
        return self._prepared[choice.number // self._n].format

    def _closes_calls(self, choice: _Choice) -> bool:
        format = self._format(choice)
        return format is not None and format.call is not None and format.call[1] is not None

    def _calls(self, choice: _Choice, parts: Iterable[CallText]) -> list[Piece]:
        found: list[Piece] = []
        format = self._format(choice)
        for part in parts:
            if part.name:
                choice.num_calls = part.index + 1
                id = new_call_id(format is not None and format.short_ids) if self._new_id is None else self._new_id()
                found.append(ToolCallBegun(choice.number, part.index, id, part.name))
            elif part.arguments:
                found.append(ToolArguments(choice.number, part.index, part.arguments))
        return found

    def _end_call(self, choice: _Choice) -> list[Piece]:
        """End the text of an open tool call; the part that is no call is shown as text."""
        if choice.call is None:
            return []
        parts, rest = choice.call.finish()
        choice.call = None
        return [*self._calls(choice, parts), *([Text(choice.number, rest)] if rest.strip() else [])]

    def _finished(self, choice: _Choice, event: Finished) -> list[Piece]:
        choice.finished = event
        by_token = event.ended_by in ("eos", "stop_token")
        # The end token is no text. A completion has its log-probability: clients count one a token of `max_tokens`.
        is_counted = choice.parser is None and self.call.sampling.logprobs is not None
        if by_token and choice.tokens and not is_counted:
            choice.tokens.pop()
        if choice.parser is None:
            rest = [ChannelText("text", 0, event.text)] if event.text else []
        else:
            rest = choice.parser.finish()
        pieces = [*self._shown(choice, rest), *self._end_call(choice)]
        if choice.held and not choice.num_calls:
            pieces.append(Text(choice.number, choice.held))
        is_whole = event.ended_by in ("max_tokens", "context") or (by_token and is_counted)
        if is_whole and choice.tokens and choice.call is None:
            ids = tuple(each.token_id for each in choice.tokens)  # tokens without text
            logprobs = tuple(choice.tokens) if self.call.sampling.logprobs is not None else ()
            pieces.append(Text(choice.number, "", ids, logprobs))
        return [*pieces, self._end(choice, event)]

    def _end(self, choice: _Choice, event: Finished) -> Ended:
        reason, stop = STOPPED.get(event.ended_by, "stop"), event.stop_reason
        if event.reason == FinishReason.CANCELLED:
            reason = "cancelled"
        elif stop is not None and (event.ended_by == "eos" or stop in choice.end_token_ids):
            reason, stop = "stop", None
        if reason == "stop" and choice.num_calls:
            reason = "tool_calls"
        shown = stop if reason == "stop_sequence" else None
        return Ended(choice.number, reason, shown, event.token_ids)
