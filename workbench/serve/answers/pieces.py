"""Define the pieces of an answer, in no protocol's words: what the engine's events become, and dialects write.

Of one call: `PromptRead` of every prompt, then texts, thoughts and calls of each choice, `Ended` of every choice, and
`Used` once at the very end; or `Failed` in place of all that is missing. Nothing follows `Used` or `Failed`. Of a call
that embeds its prompts there are `Embedded` and `Used`; of one that tokenizes them `PromptRead`, or `Text`, and `Used`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from workbench.trace.events import PinnedPrefix

EndReason = Literal["stop", "stop_sequence", "length", "context", "tool_calls", "content_filter", "cancelled"]


class TokenLogprob(NamedTuple):
    """A token, its log-probability, and the likeliest tokens in its place; None before the first token of a prompt."""

    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Piece:
    choice: int = 0


@dataclass(frozen=True, slots=True)
class PromptRead(Piece):
    """A prompt was read, just before its first token: `choice` is its first choice.

    `logprobs` are those of the prompt's tokens where they were asked for. `cache_written_by_ttl` is by seconds of life.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0  # found in the prefix cache
    written_tokens: int = 0  # written up to a breakpoint, to be kept
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    cache_written_by_ttl: tuple[tuple[float, int], ...] = ()
    pinned: tuple[PinnedPrefix, ...] = ()  # what came of the breakpoints


def num_values(pieces: Iterable[Piece]) -> int:
    """Return how many values the JSON of pieces has, about: the time to write them goes with it."""
    found = 0
    for each in pieces:
        found += 1
        if isinstance(each, PromptRead | Text) and each.logprobs:
            found += len(each.logprobs) * (1 + len(each.logprobs[-1].top))
    return found


def prompt_tokens(pieces: Iterable[Piece]) -> int:
    """Return the tokens of the prompts that were read."""
    return sum(each.prompt_tokens for each in pieces if isinstance(each, PromptRead))


@dataclass(frozen=True, slots=True)
class Text(Piece):
    """Text to show now; `logprobs` and `token_ids` of the tokens since the last piece of this choice."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Thought(Piece):
    """Text of a thought before the answer."""

    text: str = ""
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolCallBegun(Piece):
    """A call of a tool begins; `index` counts the calls of this choice from 0, `id` is its own."""

    index: int = 0
    id: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class ToolArguments(Piece):
    """More of the JSON text of a call's arguments."""

    index: int = 0
    text: str = ""


@dataclass(frozen=True, slots=True)
class Embedded(Piece):
    """The vector of a prompt that was to be embedded; `choice` is the prompt's number."""

    vector: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Ended(Piece):
    """A choice has ended. `stop` is the stop string or token id that ended it; `token_ids` are all of its tokens."""

    reason: EndReason = "stop"
    stop: str | int | None = None
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Used(Piece):
    """Tokens that the whole call used. `written_tokens` were written up to a breakpoint, to be kept;
    `cache_written_by_ttl` has them by seconds of life."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    written_tokens: int = 0
    thinking_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    cache_written_by_ttl: tuple[tuple[float, int], ...] = ()
    from_kept_answer: bool = False


@dataclass(frozen=True, slots=True)
class Failed(Piece):
    """The call failed: an error's status, kind and message, and the detail that no client sees (`errors.ApiError`)."""

    status: int = 500
    kind: str = "api_error"
    message: str = ""
    detail: str = ""
