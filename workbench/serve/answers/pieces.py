"""Define the protocol-independent pieces of an answer, converted from the engine's events and written by dialects.

A call yields `PromptRead` for every prompt, then texts, thoughts and tool calls of each choice, `Ended` for every
choice, and `Used` once at the end; or `Failed` in place of the missing pieces. Nothing follows `Used` or `Failed`. A
call that embeds its prompts yields `Embedded` and `Used`; one that tokenizes them `PromptRead`, or `Text`, and `Used`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from workbench.trace.events import PinnedPrefix

EndReason = Literal["stop", "stop_sequence", "length", "context", "tool_calls", "content_filter", "cancelled"]


class TokenLogprob(NamedTuple):
    """A token, its log-probability, and the likeliest tokens at its position. For the first token of a prompt the
    log-probability is None.
    """

    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Piece:
    choice: int = 0


@dataclass(frozen=True, slots=True)
class PromptRead(Piece):
    """The notice that a prompt was read, just before the first token of its answer. `choice` is the first choice of
    this prompt.

    `logprobs` belong to the prompt's tokens, if requested. `cache_written_by_ttl` has (TTL in seconds, tokens).
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0  # found in the prefix cache
    written_tokens: int = 0  # written up to a breakpoint, to be kept
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    cache_written_by_ttl: tuple[tuple[float, int], ...] = ()
    pinned: tuple[PinnedPrefix, ...] = ()  # results of the breakpoints


def num_values(pieces: Iterable[Piece]) -> int:
    """Return the approximate number of JSON values in the pieces; the time to write them is proportional to it."""
    found = 0
    for each in pieces:
        found += 1
        if isinstance(each, PromptRead | Text) and each.logprobs:
            found += len(each.logprobs) * (1 + len(each.logprobs[-1].top))
    return found


def prompt_tokens(pieces: Iterable[Piece]) -> int:
    """Return the number of tokens of the prompts that were read, by their `PromptRead` pieces."""
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
    """A tool call begins; `index` counts the calls of this choice from 0."""

    index: int = 0
    id: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class ToolArguments(Piece):
    """The next part of the JSON text of a tool call's arguments."""

    index: int = 0
    text: str = ""


@dataclass(frozen=True, slots=True)
class Embedded(Piece):
    """The embedding of a prompt; `choice` is the prompt's number."""

    vector: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Ended(Piece):
    """A choice has ended. `stop` is the stop string or token id that ended it; `token_ids` are all its tokens."""

    reason: EndReason = "stop"
    stop: str | int | None = None
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Used(Piece):
    """The numbers of tokens that the whole call used. `written_tokens` were written to the cache up to a breakpoint, to
    be kept; `cache_written_by_ttl` divides them by seconds of life.
    """

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
    """The notice that the call failed: status, kind and message of the error, and a detail that no client sees
    (`errors.ApiError`).
    """

    status: int = 500
    kind: str = "api_error"
    message: str = ""
    detail: str = ""
