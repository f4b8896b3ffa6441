"""Price recorded prompts as if their cache breakpoints had been placed elsewhere.

    prompt        | tools ..... | system ... | turn 0 | turn 1 | turn 2 |
    placement     ^ none        ^            ^        ^        ^ ...
    the cache     reads the longest entry that ended at a breakpoint, and writes the tokens up to the next ones

The cache is the one that `prompt_cache` models: whole prefixes that end at breakpoints, each for one TTL.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from workbench.economics.prices import Prices, Usage, total_usage
from workbench.economics.prompt_cache import CACHE_TTLS, CacheTTL, PromptCache, PromptCall, Seconds, uncached_usage

if TYPE_CHECKING:
    from workbench.prompt.assemble import Prompt

MAX_BREAKPOINTS = 4  # per request, for both vendors


@dataclass(frozen=True)
class TracedPrompt:
    """A prompt as it was sent.

    Args:
        time: seconds, rising from one prompt to the next.
        token_ids: the prompt's token ids.
        ends: the end of each part in tokens, by name: `tools`, `system`, `turn 0`, ...
        breakpoints: ends of marked prefixes, in tokens.
        output: tokens of the answer.
        tenant: owner of the prompt; tenants share no cache.
    """

    time: Seconds
    token_ids: tuple[int, ...]
    ends: Mapping[str, int]
    breakpoints: tuple[int, ...] = ()
    output: int = 0
    tenant: str = ""

    @classmethod
    def from_prompt(
        cls, time: Seconds, prompt: Prompt, breakpoints: Sequence[int] = (), output: int = 0, tenant: str = ""
    ) -> TracedPrompt:
        """Return an assembled prompt with the ends of its parts."""
        return cls(time, prompt.ids, prompt.part_ends(), tuple(breakpoints), output, tenant)


Placement = Callable[[TracedPrompt], Iterable[int]]  # returns the ends of the prefixes to mark, in tokens


def as_sent(prompt: TracedPrompt) -> Iterable[int]:
    return prompt.breakpoints


def after_parts(*names: str) -> Placement:
    """Return a placement after the named parts; `turn -1` is the last turn, `turn -2` the turn before it."""

    def place(prompt: TracedPrompt) -> list[int]:
        turns = sum(name.startswith("turn ") for name in prompt.ends)
        found = []
        for name in names:
            part, _, index = name.partition(" -")
            found.append(prompt.ends.get(f"{part} {turns - int(index)}" if index else name, 0))
        return found

    return place


PLACEMENTS: Mapping[str, Placement] = {
    "as sent": as_sent,
    "after tools and system": after_parts("tools", "system"),
    "after the last turn": after_parts("turn -1"),
    "after system and the last two turns": after_parts("tools", "system", "turn -2", "turn -1"),
}


@dataclass(frozen=True)
class PlacementCost:
    """The tokens and cost of traffic under one placement of breakpoints; without a TTL nothing is cached."""

    placement: str
    ttl: CacheTTL | None
    usage: Usage
    cost: Fraction


def placement_costs(
    prompts: Iterable[TracedPrompt],
    prices: Prices,
    placements: Mapping[str, Placement] = PLACEMENTS,
    page_size: int = 1,
    ttls: Iterable[CacheTTL] = CACHE_TTLS,
) -> list[PlacementCost]:
    """Return the cost of the traffic without a cache, and with each placement and TTL, the cheapest first.

    Args:
        prompts: recorded prompts, in order of time.
        prices: price table; TTLs without a price are left out.
        placements: placements by name; the last `MAX_BREAKPOINTS` breakpoints of a prompt count.
        page_size: tokens per page; breakpoints are rounded down to pages.
        ttls: TTLs to try, each for all breakpoints.

    Raises:
        WorkbenchError: for prompts that are not in order of time.
    """
    listed = list(prompts)
    plain = total_usage([Usage(), *uncached_usage(_call(each, (), page_size) for each in listed)])
    costs = [PlacementCost("none", None, plain, prices.cost(plain))]
    for ttl in ttls:
        if getattr(prices, ttl.kind) is None:
            continue
        for name, place in placements.items():
            cache = PromptCache(ttl)
            usage = total_usage([Usage(), *(cache.serve(_call(each, place(each), page_size)) for each in listed)])
            costs.append(PlacementCost(name, ttl, usage, prices.cost(usage)))
    return sorted(costs, key=lambda each: each.cost)


def _call(prompt: TracedPrompt, marked: Iterable[int], page_size: int) -> PromptCall:
    """Return the request as cacheable segments up to its last breakpoint, cut at the ends of parts, where earlier
    entries may have ended."""
    length = len(prompt.token_ids)

    def in_pages(places: Iterable[int]) -> list[int]:
        return sorted({min(each, length) // page_size * page_size for each in places} - {0})

    marks = in_pages(marked)[-MAX_BREAKPOINTS:]
    last = marks[-1] if marks else 0
    ends = [each for each in in_pages((*prompt.ends.values(), *marks)) if each <= last]
    starts = [0, *ends]
    segments = tuple(
        ((prompt.tenant, prompt.token_ids[start:end]), end - start) for start, end in zip(starts, ends, strict=False)
    )
    numbers = frozenset(number for number, end in enumerate(ends, 1) if end in marks)
    return PromptCall(prompt.time, segments, length - last, prompt.output, numbers)
