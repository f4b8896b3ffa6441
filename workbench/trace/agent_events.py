"""Define the events of an agent's run: rounds, tool calls and the end. Their `request_id` is empty: `request` of
RoundStarted has the id of the round's request. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from workbench.trace.events import Event


@dataclass(frozen=True, slots=True)
class AgentEvent(Event):
    """An event in round `round` (counted from 0) of the run `agent`."""

    kind: ClassVar[str] = "agent_event"
    agent: str = ""
    round: int = 0


@dataclass(frozen=True, slots=True)
class RoundStarted(AgentEvent):
    """The start of a round: one answer of the model and its tool calls. `request` is the id of its request."""

    kind: ClassVar[str] = "round_started"
    request: str = ""
    prompt_tokens: int = 0


@dataclass(frozen=True, slots=True)
class AnswerPiece(AgentEvent):
    """A streamed piece of an answer; for a tool call, a piece of its JSON. Listeners do not receive it: they receive
    Decoded.

    `channel` is thought, text or call; `index` counts the calls of the round.
    """

    kind: ClassVar[str] = "answer_piece"
    channel: str = "text"
    index: int = 0


@dataclass(frozen=True, slots=True)
class CallStarted(AgentEvent):
    """The start of a tool call. `index` is its position among the calls of the round."""

    kind: ClassVar[str] = "call_started"
    index: int = 0
    call_id: str = ""
    name: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CallFinished(AgentEvent):
    """The end of a tool call. `result` is the text that the model reads, `error` the failure if there was one, and
    `printed` the tool's printed output.
    """

    kind: ClassVar[str] = "call_finished"
    index: int = 0
    call_id: str = ""
    name: str = ""
    result: str = ""
    seconds: float = 0.0
    error: str = ""
    printed: str = ""


@dataclass(frozen=True, slots=True)
class RoundFinished(AgentEvent):
    """The end of a round's answer; the calls of the round follow."""

    kind: ClassVar[str] = "round_finished"
    request: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens found in the cache
    computed_tokens: int = 0  # prompt tokens computed
    output_tokens: int = 0  # thinking tokens included
    thinking_tokens: int = 0
    ttft: float | None = None  # seconds from the round's start to its first token
    seconds: float = 0.0
    finish_reason: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class AgentFinished(AgentEvent):
    """The end of a run. `result` (an AgentResult) is None in the event that listeners receive."""

    kind: ClassVar[str] = "agent_finished"
    stop_reason: str = ""
    answer: str = ""
    error: str = ""
    result: Any = None
