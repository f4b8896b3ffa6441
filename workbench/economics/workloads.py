"""Workloads to be priced: a system prompt asked again and again, a recorded or drawn traffic, an agent's calls."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator
from fractions import Fraction

from workbench.economics.prompt_cache import Call, Seconds
from workbench.errors import WorkbenchError
from workbench.traffic.arrival import Arrival
from workbench.traffic.settings import Poisson
from workbench.traffic.times import poisson

DAY = 86_400  # seconds
SYSTEM = "system prompt"


def even(requests: int, seconds: int | Fraction = DAY) -> list[Fraction]:
    """So many times, equally far apart, the first at second 0, exactly."""
    _some(requests)
    gap = Fraction(seconds) / requests
    return [number * gap for number in range(requests)]


def random_times(requests: int, seconds: int | Fraction = DAY, seed: int = 0) -> list[float]:
    """So many times of a Poisson process with `requests` in `seconds` in the mean."""
    _some(requests)
    drawn = poisson(Poisson(rate=float(requests / Fraction(seconds))), random.Random(seed))
    return list(itertools.islice(drawn, requests))


def system_prompt(times: Iterable[Seconds], prompt: int, question: int = 0, output: int = 0) -> Iterator[Call]:
    """The same `prompt` tokens each time, then `question` tokens that differ, and `output`."""
    return (Call(time, ((SYSTEM, prompt),), question, output) for time in times)


def traffic(arrivals: Iterable[Arrival], system: int = 0) -> Iterator[Call]:
    """The requests of a traffic, after a system prompt of so many tokens. Its full blocks may be cached, for their
    names say what stands in them; what no block names is like no other's."""
    before: tuple[tuple[str, int], ...] = ((SYSTEM, system),) if system else ()
    for arrival in arrivals:
        full = arrival.prompt_tokens // arrival.block_tokens if arrival.blocks else 0
        blocks = (((arrival.tenant, name), arrival.block_tokens) for name in arrival.blocks[:full])
        rest = arrival.prompt_tokens - full * arrival.block_tokens
        yield Call(arrival.time, (*before, *blocks), rest, arrival.output_tokens)


def agent_loop(
    calls: int, start: int, new: int, output: int = 0, seconds: Seconds = 10, warm: bool = False
) -> Iterator[Call]:
    """One user message that becomes `calls` calls: the first has `start` tokens before it, and each sends the whole
    conversation again with `new` tokens more, the last call's `output` among them. Where it is `warm`, a call that
    found `start` tokens came before, and is the first that is given."""
    _some(calls)
    pieces: tuple[tuple[int, int], ...] = ((0, start),) if start else ()
    if warm:
        yield Call(0, pieces)
    for number in range(calls):
        pieces = (*pieces, (number + 1, new))
        yield Call((number + warm) * seconds, pieces, 0, output)


def _some(count: int) -> None:
    if count < 1:
        raise WorkbenchError(f"{count} requests: give at least 1")
