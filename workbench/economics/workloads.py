"""Workloads to be priced: a repeated system prompt, a recorded or drawn traffic, an agent's calls."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator
from fractions import Fraction

from workbench.economics.prompt_cache import PromptCall, Seconds
from workbench.errors import WorkbenchError
from workbench.traffic.arrival import Arrival
from workbench.traffic.settings import Poisson
from workbench.traffic.times import poisson_arrivals

DAY = 86_400  # seconds
SYSTEM = "system prompt"


def even_times(requests: int, seconds: int | Fraction = DAY) -> list[Fraction]:
    """Return `requests` equally spaced times, the first at second 0, exactly."""
    _require_positive(requests)
    gap = Fraction(seconds) / requests
    return [number * gap for number in range(requests)]


def random_times(requests: int, seconds: int | Fraction = DAY, seed: int = 0) -> list[float]:
    """Return `requests` times of a Poisson process with `requests` in `seconds` on average."""
    _require_positive(requests)
    drawn = poisson_arrivals(Poisson(rate=float(requests / Fraction(seconds))), random.Random(seed))
    return list(itertools.islice(drawn, requests))


def system_prompt_calls(times: Iterable[Seconds], prompt: int, question: int = 0, output: int = 0) -> Iterator[PromptCall]:
    """Yield calls with the same `prompt` tokens, then `question` tokens that differ, and `output`."""
    return (PromptCall(time, ((SYSTEM, prompt),), question, output) for time in times)


def traffic_calls(arrivals: Iterable[Arrival], system: int = 0) -> Iterator[PromptCall]:
    """Yield the calls of a traffic, after a system prompt of `system` tokens.

    Full blocks are cacheable, since their names identify their content; other tokens equal no others."""
    before: tuple[tuple[str, int], ...] = ((SYSTEM, system),) if system else ()
    for arrival in arrivals:
        full = arrival.prompt_tokens // arrival.block_tokens if arrival.blocks else 0
        blocks = (((arrival.tenant, name), arrival.block_tokens) for name in arrival.blocks[:full])
        rest = arrival.prompt_tokens - full * arrival.block_tokens
        yield PromptCall(arrival.time, (*before, *blocks), rest, arrival.output_tokens)


def agent_loop_calls(
    calls: int, start: int, new: int, output: int = 0, seconds: Seconds = 10, warm: bool = False
) -> Iterator[PromptCall]:
    """Yield the calls of an agent for one user message.

    Args:
        calls: Number of calls.
        start: Tokens before the first call.
        new: Tokens that each call adds to the whole conversation, which is sent again.
        output: Output tokens of the last call, part of `new`.
        seconds: Time between calls.
        warm: A call with `start` tokens came before, and is yielded first.
    """
    _require_positive(calls)
    pieces: tuple[tuple[int, int], ...] = ((0, start),) if start else ()
    if warm:
        yield PromptCall(0, pieces)
    for number in range(calls):
        pieces = (*pieces, (number + 1, new))
        yield PromptCall((number + warm) * seconds, pieces, 0, output)


def _require_positive(count: int) -> None:
    if count < 1:
        raise WorkbenchError(f"{count} requests: give at least 1")
