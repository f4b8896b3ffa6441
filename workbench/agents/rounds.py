"""Run rounds: an answer, its calls, their results, and again, until there is an answer without calls or a limit.

    conversation -> answer (pieces) -> calls (at once, in threads) -> results -> conversation -> answer ...

Each round reuses the pages of the previous round: of its prompt, only results and turn marks are computed.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from workbench.agents.calls import CallOutcome, carry_out, cut, failed, unknown_tool
from workbench.agents.limits import Limits, deadline
from workbench.agents.result import AgentResult, CallRecord, Round, StopReason, TokenUsage
from workbench.engine.runner import Runner
from workbench.errors import WorkbenchError
from workbench.prompt.answers import AnswerFormat, AnswerParser, ChannelText
from workbench.prompt.conversation import Conversation
from workbench.prompt.tools import Tool
from workbench.prompt.turns import AssistantTurn, ToolCall
from workbench.request import FinishReason, Request, SamplingParameters
from workbench.trace.agent_events import (
    AgentEvent,
    AgentFinished,
    AnswerPiece,
    CallFinished,
    CallStarted,
    RoundFinished,
    RoundStarted,
)
from workbench.trace.events import Decoded, Event, Finished

CUT_ANSWER = "not run: the answer was cut before its end"
MIN_RESULT_CHARACTERS = 80
STOPPED: dict[str, StopReason] = {
    "max_tokens": "max_tokens", "context": "max_context", "stop_string": "stop_sequence"
}  # by `Finished.ended_by`; other ends keep their name  # fmt: skip


class RoundSettings(Protocol):
    """The settings of an agent that its rounds use."""

    runner: Runner
    limits: Limits
    sampling: SamplingParameters

    def answer_format(self, tools: tuple[Tool, ...]) -> AnswerFormat: ...
    def sampling_of(self, conversation: Conversation, format: AnswerFormat, tokens_left: int | None) -> dict: ...
    def with_thinking(self, conversation: Conversation) -> Conversation: ...
    def function_of(self, tool: Tool) -> Tool: ...


@dataclass
class _Answer:
    """An answer in progress or complete."""

    request: Request
    parser: AnswerParser
    started: float
    first_token: float | None = None
    finished: Finished = field(default_factory=lambda: Finished(0.0))


class AgentRun(Iterator[AgentEvent]):
    """A run in progress: iterate over it for its events. `result` is available after the last event."""

    def __init__(self, agent: RoundSettings, conversation: Conversation, name: str):
        self.agent, self.name, self.conversation = agent, name, conversation
        self._runner, self._limits = agent.runner, agent.limits
        self._format: AnswerFormat = agent.answer_format(conversation.tools)
        self._rounds: list[Round] = []
        self._stop = threading.Event()
        self._is_late = False
        self._request_id = ""  # id of the current answer's request
        self._result: AgentResult | None = None
        self._began = self._runner.clock()
        self._events = self._run()

    def __next__(self) -> AgentEvent:
        return next(self._events)

    def __enter__(self) -> AgentRun:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def result(self) -> AgentResult:
        """Return the result (WorkbenchError before the end of the run)."""
        if self._result is None:
            raise WorkbenchError("the agent's run has no result yet: iterate to its end")
        return self._result

    def stop(self) -> None:
        """Stop the run without waiting, with the reason `cancelled`; any thread may call it."""
        self._stop.set()
        if self._request_id:
            self._runner.cancel_soon(self._request_id)

    def close(self) -> None:
        """Cancel the run at once, in the thread that iterates; `result` then has the rounds so far."""
        self._events.close()

    def _run(self) -> Generator[AgentEvent]:
        self._began = self._runner.clock()
        try:
            while True:
                ended = yield from self._round(len(self._rounds))
                if ended is not None:
                    break
        except (GeneratorExit, KeyboardInterrupt):
            self._answer_for("the run was stopped")
            self._finish("cancelled")
            raise
        yield self._finish(*ended)

    def _finish(self, reason: StopReason, error: str = "") -> AgentFinished:
        now = self._runner.clock()
        usage = TokenUsage.total([each.usage for each in self._rounds], now - self._began)
        answer = self._rounds[-1].text if self._rounds else ""
        waiting = tuple(self.conversation.unanswered_calls)
        self._result = AgentResult(answer, self.conversation, reason, tuple(self._rounds), usage, waiting, error)
        last = max(0, len(self._rounds) - 1)
        event = AgentFinished(now, agent=self.name, round=last, stop_reason=reason, answer=answer, error=error)
        self._runner.emit(event)
        return replace(event, result=self._result)

    def _round(self, number: int) -> Generator[AgentEvent, None, tuple[StopReason, str] | None]:
        before = self._limit_before(number)
        if before is not None:
            return before, ""
        answer = yield from self._answer(number)
        finished, cut_short = answer.finished, self._cut_short(answer)
        if finished.reason in (FinishReason.REFUSED, FinishReason.ERROR):
            if not self._rounds:
                raise WorkbenchError(finished.error)
            return "error", finished.error
        turn = answer.parser.turn()
        is_whole = finished.reason == FinishReason.STOP
        if finished.reason == FinishReason.CANCELLED and turn.tool_calls:
            turn = AssistantTurn(content=_text_before_calls(answer.parser), thinking=turn.thinking)
        turn = _with_ids(turn, self.conversation)
        self.conversation = self.conversation.with_turn(turn)
        used = self._usage(answer)
        ttft = None if answer.first_token is None else answer.first_token - answer.started
        self._rounds.append(Round(used, ttft, finished.ended_by or str(finished.reason), turn.content, turn.thinking))
        yield self._emit(
            RoundFinished, round=number, request=answer.request.request_id, ttft=ttft, error=finished.error,
            finish_reason=self._rounds[-1].finish_reason, **asdict(used),
        )  # fmt: skip
        if finished.reason == FinishReason.CANCELLED:
            return cut_short or "cancelled", ""
        if turn.tool_calls:
            yield from self._call_tools(number, turn.tool_calls, is_whole)
        if not turn.tool_calls or not is_whole:
            return cut_short or "end_turn", ""
        if self._stop.is_set():
            self._answer_for("the run was stopped")
            return "cancelled", ""
        if self.conversation.unanswered_calls:
            return "tool_use", ""
        self._fit_results(len(turn.tool_calls))
        return None

    def _limit_before(self, number: int) -> StopReason | None:
        """Return the limit that forbids another round."""
        if self._stop.is_set():
            return "cancelled"
        if number >= self._limits.rounds:
            return "max_rounds"
        if self._seconds_left() <= 0:
            return "max_seconds"
        return "max_total_tokens" if self._tokens_left() == 0 else None

    def _cut_short(self, answer: _Answer) -> StopReason | None:
        """Return the stop reason if a limit or error, not the model, ended the answer; else None."""
        if answer.finished.reason == FinishReason.CANCELLED:
            late = self._is_late or self._seconds_left() <= 0
            return "max_seconds" if late and not self._stop.is_set() else "cancelled"
        reason = STOPPED.get(answer.finished.ended_by)
        lowered = answer.request.sampling.max_tokens < self.agent.sampling.max_tokens
        return "max_total_tokens" if reason == "max_tokens" and lowered else reason

    def _seconds_left(self) -> float:
        if self._limits.seconds is None:
            return float("inf")
        return self._began + self._limits.seconds - self._runner.clock()

    def _tokens_left(self) -> int | None:
        if self._limits.tokens is None:
            return None
        return max(0, self._limits.tokens - sum(each.usage.output_tokens for each in self._rounds))

    def _answer(self, number: int) -> Generator[AgentEvent, None, _Answer]:
        """Generate one answer."""
        sampling = self.agent.sampling_of(self.conversation, self._format, self._tokens_left())
        started = self._runner.clock()
        try:
            (request,) = self._runner.make_requests(self.agent.with_thinking(self.conversation), sampling)
        except WorkbenchError as error:
            request = Request(f"{self.name}: round {number}", (), invalid_reason=str(error))
        in_thought = self._format.ends_in_thought(request.prompt_ids)
        assert self._runner.tokenizer is not None
        stops, before = self.agent.sampling.stop, request.prompt_ids
        parser = AnswerParser(self._runner.tokenizer, self._format, in_thought, stops, before)
        answer = _Answer(request, parser, started)
        if request.invalid_reason:
            answer.finished = Finished(started, reason=FinishReason.REFUSED, error=request.invalid_reason)
            return answer
        yield self._emit(
            RoundStarted, started, round=number, request=request.request_id, prompt_tokens=len(request.prompt_ids)
        )
        self._request_id = request.request_id
        try:
            events = self._runner.stream([request])
            with deadline(self._seconds_left(), self._expire), closing(events):  # type: ignore[type-var] (a generator)
                yield from self._pieces(number, answer, events)
        finally:
            self._request_id = ""
        return answer

    def _expire(self) -> None:
        self._is_late = True
        self._runner.cancel_soon(self._request_id)

    def _pieces(self, number: int, answer: _Answer, events: Iterator[Event]) -> Iterator[AgentEvent]:
        cancelled = False
        for event in events:
            if isinstance(event, Decoded):
                answer.first_token = event.time if answer.first_token is None else answer.first_token
                yield from self._shown(number, answer.parser.push(event.token_id))
            elif isinstance(event, Finished):
                answer.finished = event
            elif not cancelled and (self._stop.is_set() or self._seconds_left() <= 0):
                cancelled = True
                self._runner.cancel_soon(answer.request.request_id)
        yield from self._shown(number, answer.parser.finish())

    def _shown(self, number: int, pieces: list[ChannelText]) -> Iterator[AnswerPiece]:
        for piece in pieces:
            now = self._runner.clock()
            yield AnswerPiece(
                now, text=piece.text, agent=self.name, round=number, channel=piece.channel, index=piece.index
            )

    def _usage(self, answer: _Answer) -> TokenUsage:
        finished, prompt = answer.finished, len(answer.request.prompt_ids)
        cached = min(finished.cached_tokens, prompt)
        seconds = finished.time - answer.started
        return TokenUsage(prompt, cached, prompt - cached, len(finished.token_ids), finished.thinking_tokens, seconds)

    def _call_tools(self, number: int, calls: tuple[ToolCall, ...], is_whole: bool) -> Iterator[AgentEvent]:
        """Run the calls of an answer and add their results; calls of tools without a function are left out."""
        tools = {tool.name: self.agent.function_of(tool) for tool in self.conversation.tools}
        outcomes: dict[int, CallOutcome] = {}
        carried: list[int] = []
        for place, call in enumerate(calls):
            tool = tools.get(call.name)
            if not is_whole:
                outcomes[place] = failed(CUT_ANSWER)
            elif tool is None:
                outcomes[place] = unknown_tool(call.name, self.conversation.tools)
            elif tool.function is not None:
                carried.append(place)
            else:
                continue
            yield self._emit(
                CallStarted, round=number, index=place, call_id=call.id, name=call.name, arguments=call.arguments
            )
        for place, outcome in list(outcomes.items()):
            yield self._call_finished(number, place, calls[place], outcome)
        work = carry_out(
            [(tools[calls[place].name], calls[place]) for place in carried],
            max(0.0, min(self._limits.tool_seconds, self._seconds_left())),
            self._limits.result_characters,
            self._stop.is_set,
        )
        try:
            with closing(work):
                for at, outcome in work:
                    outcomes[carried[at]] = outcome
                    yield self._call_finished(number, carried[at], calls[carried[at]], outcome)
        finally:  # also if the run is closed meanwhile
            self._add_results(calls, outcomes)

    def _add_results(self, calls: tuple[ToolCall, ...], outcomes: dict[int, CallOutcome]) -> None:
        for place in sorted(outcomes):
            self.conversation = self.conversation.result(outcomes[place].result, calls[place])
        made = [
            CallRecord(calls[place].name, calls[place].arguments, each.result, each.seconds, each.error, each.printed)
            for place, each in sorted(outcomes.items())
        ]
        self._rounds[-1] = replace(self._rounds[-1], calls=tuple(made))

    def _call_finished(self, number: int, place: int, call: ToolCall, outcome: CallOutcome) -> AgentEvent:
        return self._emit(CallFinished, round=number, index=place, call_id=call.id, name=call.name, **asdict(outcome))

    def _answer_for(self, words: str) -> None:
        """Give every waiting call an error as its result, so that the conversation can continue."""
        for call in self.conversation.unanswered_calls:
            self.conversation = self.conversation.result(failed(words).result, call)

    def _fit_results(self, count: int) -> None:
        """Cut the results of this round, the longest first, until the next prompt leaves room for an answer."""
        context = self._runner.model.spec.max_position_embeddings
        room = context - min(self.agent.sampling.max_output_tokens, context // 4)
        turns = list(self.conversation.turns)
        first = len(turns) - count
        while (excess := self._prompt_length() - room) > 0:
            sizes = {place: len(turns[place].content) for place in range(first, len(turns))}
            longest = max(sizes, key=lambda place: sizes[place])
            if sizes[longest] <= MIN_RESULT_CHARACTERS:
                return  # results are not the cause of the overflow: the overflow rule decides
            keep = max(MIN_RESULT_CHARACTERS, min(sizes[longest] - excess, sizes[longest] * 3 // 4))
            turns[longest] = turns[longest].model_copy(update={"content": cut(turns[longest].content, keep)})
            self.conversation = self.conversation.model_copy(update={"turns": tuple(turns)})

    def _prompt_length(self) -> int:
        try:
            return len(self.agent.with_thinking(self.conversation).prompt(self._runner).ids)
        except WorkbenchError:  # the template refuses results: the next answer's error says so
            return 0

    def _emit(self, kind: type[AgentEvent], time: float | None = None, **values: Any) -> AgentEvent:
        event = kind(self._runner.clock() if time is None else time, agent=self.name, **values)
        self._runner.emit(event)
        return event


def _text_before_calls(parser: AnswerParser) -> str:
    return parser.text("text")


def _with_ids(turn: AssistantTurn, conversation: Conversation) -> AssistantTurn:
    """Return a turn with ids for its calls: nine letters and digits, as some templates require, and unused before."""
    if not turn.tool_calls:
        return turn
    number = sum(len(each.tool_calls) for each in conversation.turns if isinstance(each, AssistantTurn))
    calls = tuple(
        call if call.id else call.model_copy(update={"id": f"call{number + place:05}"})
        for place, call in enumerate(turn.tool_calls)
    )
    return turn.model_copy(update={"tool_calls": calls})
