"""Describe an agent's run as events: rounds, calls of tools and the end. They have no `request_id`: that of a round's
request is in `request`. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from workbench.trace.events import Event


@dataclass(frozen=True, slots=True)
class AgentEvent(Event):
    """An event of the run `agent`, in its round `round`, counted from 0."""

    kind: ClassVar[str] = "agent_event"
    agent: str = ""
    round: int = 0


@dataclass(frozen=True, slots=True)
class RoundStarted(AgentEvent):
    """A round: one answer of the model, and the calls in it. `request` is the id of its request."""

    kind: ClassVar[str] = "round_started"
    request: str = ""
    prompt_tokens: int = 0


@dataclass(frozen=True, slots=True)
class AnswerPiece(AgentEvent):
    """A piece of an answer as it comes; of a call, its JSON. Not sent to listeners, which have Decoded.

    `channel` is thought, text or call; `index` counts the calls of the round.
    """

    kind: ClassVar[str] = "answer_piece"
    channel: str = "text"
    index: int = 0


@dataclass(frozen=True, slots=True)
class CallStarted(AgentEvent):
    """A call of a tool begins. `index` is its place among the calls of the round."""

    kind: ClassVar[str] = "call_started"
    index: int = 0
    call_id: str = ""
    name: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CallFinished(AgentEvent):
    """A call has its result: the text that the model reads. `error` says what went wrong, and `printed` what the tool
    printed beside the result."""

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
    """The answer of a round is complete; its calls follow."""

    kind: ClassVar[str] = "round_finished"
    request: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt, found in the cache
    computed_tokens: int = 0  # of the prompt, computed anew
    output_tokens: int = 0  # a thought included
    thinking_tokens: int = 0
    ttft: float | None = None  # seconds from the round's start to its first token
    seconds: float = 0.0
    finish_reason: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class AgentFinished(AgentEvent):
    """The end of a run. `result` (an AgentResult) is None in what listeners receive."""

    kind: ClassVar[str] = "agent_finished"
    stop_reason: str = ""
    answer: str = ""
    error: str = ""
    result: Any = None
