"""Process outputs: detokenize sampled tokens, detect a request's end, and deliver events to the queue of each
stream.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from workbench.constrained.thought import ThoughtState, thinking_budget
from workbench.engine.best_of import BestOf
from workbench.errors import WorkbenchError, describe_error
from workbench.prompt.tokenization.detokenize import Detokenizer, WholeTextDetokenizer
from workbench.prompt.tokenization.tokenizer import Tokenizer
from workbench.request import FinishReason, Request
from workbench.sampling.samplers import SampledToken
from workbench.trace.events import Event, Submitted


class StopCause(NamedTuple):
    """The cause of a text's end; its fields are empty as long as the text has not ended.

    `by` is eos, stop_token, stop_string, grammar (the answer is complete), max_tokens or context (the model's context
    is full); `stop` is the token id or the stop string.
    """

    by: str = ""
    stop: int | str | None = None


NOT_STOPPED = StopCause()


class StopChecker:
    """A stop checker for one request: it detokenizes, and detects the end by an end token, a stop string, a grammar or
    a limit.

    A thought before the answer is a separate text: stop strings do not apply to it, and max_tokens does not count it by
    default.
    """

    def __init__(
        self, request: Request, tokenizer: Tokenizer | None, eos_token_ids: tuple[int, ...], max_model_len: int
    ):
        sampling = request.sampling
        if sampling.stop and tokenizer is None:
            raise WorkbenchError(
                f"request {request.request_id}: stop strings need a tokenizer, and this model has none; "
                "use stop_token_ids"
            )
        self._tokenizer, self._stop = tokenizer, sampling.stop
        self._is_whole = request.final_only and not sampling.stop  # a stop string needs every token's text
        self._before = [] if tokenizer is None else tokenizer.context(request.prompt_ids)
        self._detokenizer = self._new_detokenizer()
        self._stop_ids = frozenset(sampling.stop_token_ids)
        self._eos_token_ids = frozenset(() if sampling.ignore_eos else eos_token_ids)
        self._max_tokens, self._max_output_tokens = sampling.max_tokens, sampling.max_output_tokens
        self.cause, self.channel = NOT_STOPPED, "text"  # the channel of the last token
        self.end_token_ids = {*self._stop_ids, *self._eos_token_ids}
        self.max_output_tokens = min(sampling.max_output_tokens, max_model_len - len(request.prompt_ids))
        self._count = self._answer_count = 0
        self.thought: ThoughtState | None = None
        self._thought_detokenizer: Detokenizer | None = None
        if sampling.thinking is not None:
            self.thought = ThoughtState.start(request, tokenizer, thinking_budget(request, max_model_len))
            if sampling.thinking.shown and tokenizer is not None:
                self._thought_detokenizer = Detokenizer(tokenizer, before=self._before)

    def push(self, token_id: int, constraint: FinishReason | None = None) -> tuple[str, FinishReason | None]:
        """Take the next token; return the text to show now, and the finish reason if this is the end.

        Args:
            token_id: the token.
            constraint: the finish reason of the request's constraint if no token may follow. A limit reached with this
                token takes precedence.
        """
        self._count += 1
        self.channel = "text"
        if self.thought is not None:
            before, self.thought = self.thought, self.thought.after(token_id)
            if "open" in (before.phase, self.thought.phase):
                return self._push_thought(before, token_id)
        self._answer_count += 1
        if token_id in self.end_token_ids:
            self.cause = StopCause("eos" if token_id in self._eos_token_ids else "stop_token", token_id)
            return "", FinishReason.STOP
        text = self._detokenizer.push(token_id) if self._detokenizer is not None else ""
        if self._detokenizer is not None and self._detokenizer.matched_stop is not None:
            self.cause = StopCause("stop_string", self._detokenizer.matched_stop)
            return text, FinishReason.STOP
        reason = self._limit()
        return text, self.end_by_constraint(constraint) if constraint is not None and reason is None else reason

    def _new_detokenizer(self) -> Detokenizer | WholeTextDetokenizer | None:
        """Return a detokenizer of the answer, which follows the prompt and the thought."""
        if self._tokenizer is None:
            return None
        if self._is_whole:
            return WholeTextDetokenizer(self._tokenizer, self._before)
        return Detokenizer(self._tokenizer, self._stop, self._before)

    def _limit(self) -> FinishReason | None:
        """Return the finish reason if a limit is reached."""
        if self._answer_count < self._max_tokens and self._count < self.max_output_tokens:
            return None
        return self.end_by_constraint(FinishReason.LENGTH)

    def end_by_constraint(self, reason: FinishReason) -> FinishReason:
        """Record why a constrained answer ends (it is complete, or has no room), and return the finish reason."""
        if reason == FinishReason.STOP:
            self.cause = StopCause("grammar")
            return reason
        full = self._answer_count < self._max_tokens and self.max_output_tokens < self._max_output_tokens
        self.cause = StopCause("context" if full else "max_tokens")
        return FinishReason.LENGTH

    def _push_thought(self, before: ThoughtState, token_id: int) -> tuple[str, FinishReason | None]:
        assert self.thought is not None
        self.channel = "thought"
        self._before.append(token_id)
        if self.thought.phase == "after":
            self._detokenizer = self._new_detokenizer()
        if self._thought_detokenizer is None:
            return "", self._limit()
        if before.phase == self.thought.phase:
            return self._thought_detokenizer.push(token_id), self._limit()
        return self._thought_detokenizer.finish() if self.thought.phase == "after" else "", self._limit()

    @property
    def thinking_tokens(self) -> int:
        return 0 if self.thought is None else self.thought.tokens

    @property
    def thought_text(self) -> str:
        """Return the text of the thought as far as it was shown."""
        return "" if self._thought_detokenizer is None else self._thought_detokenizer.text

    def finish(self) -> str:
        """End the text, and return the rest of it that was held back."""
        if self._thought_detokenizer is not None:
            self._thought_detokenizer.finish()
        return self._detokenizer.finish() if self._detokenizer is not None else ""

    @property
    def text(self) -> str:
        return self._detokenizer.text if self._detokenizer is not None else ""


@dataclass(frozen=True)
class DetokenizedTokens:
    """The sampled tokens of one request in one step: the text and channel (text or thought) of each, and the finish
    reason if there is one.
    """

    tokens: list[SampledToken]
    texts: list[str]
    channels: list[str]
    finish_reason: FinishReason | None = None
    error: str = ""
    num_accepted: int = 0  # number of accepted draft tokens

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(choice.token_id for choice in self.tokens)


def detokenize(stop_checker: StopChecker, sampled: list[SampledToken]) -> DetokenizedTokens:
    """Push tokens to the stop checker until one of them ends the request or cannot be detokenized; all tokens but the
    last are accepted drafts.
    """
    texts: list[str] = []
    channels: list[str] = []
    accepted = len(sampled) - 1
    for place, choice in enumerate(sampled):
        if choice.error:
            return DetokenizedTokens(sampled[:place], texts, channels, error=choice.error, num_accepted=accepted)
        if choice.token_id < 0 and choice.finish_reason is not None:
            reason = stop_checker.end_by_constraint(choice.finish_reason)
            return DetokenizedTokens(sampled[:place], texts, channels, reason, num_accepted=accepted)
        try:
            text, reason = stop_checker.push(choice.token_id, choice.finish_reason)
        except Exception as error:  # for example an id of the model that the tokenizer lacks
            taken = sampled[: place + 1]
            return DetokenizedTokens(taken, texts, channels, error=describe_error(error), num_accepted=accepted)
        texts.append(text)
        channels.append(stop_checker.channel)
        if reason is not None:
            return DetokenizedTokens(sampled[: place + 1], texts, channels, reason, num_accepted=accepted)
    return DetokenizedTokens(sampled, texts, channels, num_accepted=accepted)


class OutputProcessor:
    """The processor of all outputs: it has one output queue per stream, by request id, and passes every event to `emit`
    too.

    If a request has several samples, each has its own id in the engine; its events carry the request's id and the
    sample number.
    """

    def __init__(self, emit: Callable[[Event], None]):
        self._emit = emit
        self._queues: dict[str, deque[Event]] = {}
        self._samples: dict[str, tuple[str, int]] = {}
        self._best_of: dict[str, BestOf] = {}

    def add_request(self, name: str, queue: deque[Event], sample_of: tuple[str, int] | None = None) -> None:
        """Send events of the sequence `name` to `queue` from now on; `sample_of` is its (request id, sample number)."""
        self._queues[name] = queue
        if sample_of is not None:
            self._samples[name] = sample_of

    def defer(self, request: Request) -> None:
        """Hold back the events of a request's samples, except Submitted, if the samples to return are chosen at the
        end.
        """
        sampling = request.sampling
        if not sampling.beams and sampling.num_sequences > sampling.n:
            self._best_of[request.request_id] = BestOf(sampling.num_sequences, sampling.n)

    def rank(self, request: Request) -> None:
        """Choose among the samples of a request by its own ranking; raises WorkbenchError if that is not a ranking."""
        if (part := request.sampling.ranking) is not None:
            self._best_of[request.request_id].rank_by(part)

    def remove_request(self, name: str) -> None:
        del self._queues[name]
        self._samples.pop(name, None)

    def emit(self, event: Event) -> None:
        box, events = self._queues.get(event.request_id), [event]
        if event.request_id in self._samples:
            owner, number = self._samples[event.request_id]
            events = [replace(event, request_id=owner, sample=number)]
            contest = self._best_of.get(owner)
            if contest is not None and not isinstance(event, Submitted):
                events = contest.add(events[0])
                if events:
                    del self._best_of[owner]
        for each in events:
            self._emit(each)
            if box is not None:
                box.append(each)

    def request_ids_of(self, queue: deque[Event]) -> list[str]:
        """Return the ids of the requests whose events go to `queue`."""
        return [name for name, owner in self._queues.items() if owner is queue]

    def sample_ids_of(self, request_id: str) -> list[str]:
        """Return the sequence ids of a request's unfinished samples; a request with a single sample has one, its own
        id.
        """
        return [name for name, (owner, _) in self._samples.items() if owner == request_id] or [request_id]
