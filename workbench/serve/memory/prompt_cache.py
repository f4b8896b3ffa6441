"""Convert the breakpoints of a call to pins of its prompt's pages, and the pins' results to usage.

prompt      | tools ......... | system ... | turn 0 ...... | turn 1 ... | <assistant>
breakpoints                   ^ 1 h                        ^ 5 min                      in tokens
pins        | page | page | page |.......| page | page |                                whole pages, rounded down
written     | read from the cache |  1 h |  5 min      |
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from workbench.prompt.assemble import Prompt, Segment
from workbench.request import PrefixPin
from workbench.serve.call import Breakpoint
from workbench.trace.events import PinnedPrefix


@dataclass(frozen=True)
class PlacedBreakpoint:
    """A breakpoint and the number of tokens up to the end of its part; 0 if the prompt does not have the part."""

    breakpoint: Breakpoint
    tokens: int


def place_breakpoints(
    breakpoints: Iterable[Breakpoint], prompt: Prompt | None, num_tokens: int
) -> tuple[PlacedBreakpoint, ...]:
    """Return the positions of a call's breakpoints in a prompt, in the prompt's order.

    Args:
        breakpoints: breakpoints of the call.
        prompt: the prompt by segment; if None, each breakpoint is at the end.
        num_tokens: length of the prompt.
    """
    placed = [PlacedBreakpoint(each, num_tokens if prompt is None else _end(each, prompt)) for each in breakpoints]
    return tuple(sorted(placed, key=lambda each: each.tokens))


def pins_of(placed: Iterable[PlacedBreakpoint]) -> tuple[PrefixPin, ...]:
    """Return a pin for each breakpoint that the prompt has, for the engine's request."""
    return tuple(PrefixPin(each.tokens, each.breakpoint.seconds) for each in placed if each.tokens)


def written_by_ttl(pinned: Iterable[PinnedPrefix], cached_tokens: int) -> tuple[tuple[float, int], ...]:
    """Return (lifetime in seconds, number of tokens) pairs: tokens of pinned pages that were written to the cache, not
    read from it. Each counts once, for the first breakpoint after it.
    """
    found: dict[float, int] = {}
    done = cached_tokens
    for each in sorted(pinned, key=lambda each: each.kept):
        if each.kept > done:
            found[each.seconds] = found.get(each.seconds, 0) + each.kept - done
            done = each.kept
    return tuple(sorted(found.items()))


def describe_pins(
    placed: Sequence[PlacedBreakpoint], pinned: Sequence[PinnedPrefix], cached_tokens: int, page_size: int | None
) -> dict[str, Any]:
    """Return a description of the breakpoints as plain values: for each one, the number of tokens to keep, the number
    kept, and the reason if fewer are kept.
    """
    made = list(pinned)
    breakpoints = []
    for each in placed:
        kept = made.pop(0).kept if each.tokens and made else 0
        values: dict[str, Any] = {
            "part": each.breakpoint.part, "index": each.breakpoint.index, "seconds": each.breakpoint.seconds,
            "tokens": each.tokens, "kept_tokens": kept,
        }  # fmt: skip
        if kept < each.tokens or not each.tokens:
            values["why"] = _why_fewer(each.tokens, kept, page_size)
        breakpoints.append(values)
    written = [{"seconds": seconds, "tokens": tokens} for seconds, tokens in written_by_ttl(pinned, cached_tokens)]
    return {"page_size": page_size, "read_tokens": cached_tokens, "written": written, "breakpoints": breakpoints}


def _why_fewer(tokens: int, kept: int, page_size: int | None) -> str:
    if page_size is None:
        return "this server has no prefix cache"
    if not tokens:
        return "the prompt does not have this part"
    if kept == tokens // page_size * page_size:
        return f"kept in whole pages of {page_size} tokens"
    return "the limit of pinned pages is reached"


def _end(breakpoint: Breakpoint, prompt: Prompt) -> int:
    """Return the end of a breakpoint's part, in tokens."""
    if breakpoint.part == "tools":
        numbers = {int(each.name.split(" ")[1]) for each in prompt.segments if each.name.startswith("tool ")}
        wanted = max(numbers, default=-1) if breakpoint.index < 0 else breakpoint.index
        return max((each.end for each in prompt.segments if each.name == f"tool {wanted}"), default=0)
    if breakpoint.part == "system":
        return _end_in_system(breakpoint.index, [each for each in prompt.segments if each.name == "system"], prompt)
    turns = prompt.conversation.turns
    wanted = len(turns) - 1 if breakpoint.index < 0 else breakpoint.index - len(prompt.cut)
    return max((each.end for each in prompt.segments if each.turn == wanted), default=0)


def _end_in_system(characters: int, segments: Sequence[Segment], prompt: Prompt) -> int:
    """Return the number of tokens within the first `characters` characters of the system prompt."""
    system = prompt.conversation.system or ""
    if not 0 <= characters < len(system):
        return max((each.end for each in segments), default=0)
    found = "".join(each.text for each in segments).find(system[:characters])
    if found < 0:  # the template changes the text
        return 0
    end = found + characters
    for segment in segments:
        if end <= len(segment.text):
            ids, low, high = segment.token_ids, 0, len(segment.token_ids)
            while low < high:  # find the most tokens with text inside the block
                middle = (low + high + 1) // 2
                low, high = (middle, high) if len(prompt.decode(ids[:middle])) <= end else (low, middle - 1)
            return segment.start + low
        end -= len(segment.text)
    return 0
