"""Hold the result of an agent's run: the answer, the conversation to continue, and each round's calls and tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from workbench.display import Displayable, Table, truncate_text
from workbench.prompt.conversation import Conversation
from workbench.prompt.turns import ToolCall
from workbench.units import format_seconds

# end_turn: the model has answered. tool_use: a call waits for a result of the caller's. max_tokens: the answer was cut
# at its own max_tokens. stop_sequence: a stop string ended it. max_rounds, max_seconds, max_total_tokens: a limit of
# the run. max_context: the model's context is full. cancelled: by `stop`, or by a cancelled request. error: a
# request of a later round failed or was refused, and `error` says why.
StopReason = Literal[
    "end_turn", "tool_use", "max_tokens", "stop_sequence", "max_rounds", "max_seconds", "max_total_tokens",
    "max_context", "cancelled", "error",
]  # fmt: skip
STOP_REASONS: tuple[str, ...] = get_args(StopReason)


@dataclass(frozen=True)
class CallRecord:
    """An executed tool call and its result, the text that the model read."""

    name: str
    arguments: dict[str, Any]
    result: str
    seconds: float
    error: str = ""
    printed: str = ""


@dataclass(frozen=True)
class TokenUsage:
    """The numbers of tokens of one round or of a whole run; times in seconds.

    `cached_tokens` and `computed_tokens` count prompt tokens found in the cache, and computed.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    output_tokens: int = 0  # thoughts included
    thinking_tokens: int = 0
    seconds: float = 0.0

    @classmethod
    def total(cls, each: Sequence[TokenUsage], seconds: float) -> TokenUsage:
        names = ("prompt_tokens", "cached_tokens", "computed_tokens", "output_tokens", "thinking_tokens")
        return cls(**{name: sum(getattr(one, name) for one in each) for name in names}, seconds=seconds)


@dataclass(frozen=True)
class Round:
    """One answer of the model, and its calls with their results."""

    usage: TokenUsage
    ttft: float | None  # seconds to the first token; None if there was none
    finish_reason: str
    text: str = ""
    thinking: str | None = None
    calls: tuple[CallRecord, ...] = ()


@dataclass(frozen=True)
class AgentResult(Displayable):
    """The result of a run.

    Args:
        answer: the text of the last answer.
        conversation: all turns; continue with `agent.run(result.conversation.user("..."))`.
        stop_reason: why it ended, see StopReason.
        rounds: the answers in order.
        usage: total tokens of the answers, and the seconds of the run, tools included.
        calls: for `tool_use`, the calls that wait for `conversation.result(...)`.
        error: for `error`, the error message.
    """

    answer: str
    conversation: Conversation = field(repr=False)
    stop_reason: StopReason
    rounds: tuple[Round, ...] = field(repr=False)
    usage: TokenUsage
    calls: tuple[ToolCall, ...] = ()
    error: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return the run as plain values, without generated ids and declarations."""
        turns = [each.model_dump(mode="json", exclude={"generated_ids"}) for each in self.conversation.turns]
        return {
            "answer": self.answer, "stop_reason": self.stop_reason, "error": self.error, "usage": asdict(self.usage),
            "rounds": [asdict(each) for each in self.rounds], "turns": turns,
            "calls": [each.model_dump(mode="json") for each in self.calls],
        }  # fmt: skip

    def _display_table(self) -> Table:
        headings = ["round", "prompt", "cached", "computed", "output", "thought", "TTFT", "calls and results"]
        rows: list[list[object]] = []
        for number, each in enumerate(self.rounds):
            used = each.usage
            ttft = format_seconds(each.ttft)
            said = [f"{call.name}({_json(call.arguments)}) → {call.result}" for call in each.calls]
            words = "\n".join(truncate_text(line.replace("\n", "⏎"), 80) for line in [*said, *[each.text] * (not said)])
            rows.append(
                [number, used.prompt_tokens, used.cached_tokens, used.computed_tokens, used.output_tokens,
                 used.thinking_tokens, ttft, words]
            )  # fmt: skip
        notes = [f"answer: {truncate_text(self.answer, 200)}"] if self.answer else []
        notes += [self.error] if self.error else []
        title = f"agent: {self.stop_reason} after {len(self.rounds)} rounds and {self.usage.seconds:.2f} s"
        return Table(title, rows, headings, "; ".join(notes), left=["calls and results"])


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
