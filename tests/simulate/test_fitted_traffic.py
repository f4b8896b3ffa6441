"""The shipped generators against the traces they were fitted to, and what holds of them anywhere."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from statistics import quantiles

import pytest

from tests.simulate.traces import AZURE, MOONCAKE, trace
from workbench.simulate import fitted_traffic
from workbench.simulate.arrival import BLOCK_TOKENS, Arrival
from workbench.simulate.generators import azure_conversations, mooncake_conversations
from workbench.simulate.trace_files import read_trace

Generator = Callable[[random.Random], Iterator[Arrival]]
PAIRS = [
    pytest.param(AZURE, azure_conversations, fitted_traffic.AZURE.seconds, id="azure"),
    pytest.param(MOONCAKE, mooncake_conversations, fitted_traffic.MOONCAKE.seconds, id="mooncake"),
]


def hour(generator: Generator, seconds: float, seed: int = 0) -> list[Arrival]:
    return list(itertools.takewhile(lambda arrival: arrival.time <= seconds, generator(random.Random(seed))))


def shared(arrivals: Sequence[Arrival]) -> tuple[float, float]:
    """Of all blocks those that came before, and of all requests those that share more than the first block."""
    seen: set[int] = set()
    hits = [sum(1 for _ in itertools.takewhile(seen.__contains__, _noting(seen, a.blocks))) for a in arrivals]
    return sum(hits) / sum(len(a.blocks) for a in arrivals), sum(hit > 1 for hit in hits) / len(hits)


def _noting(seen: set[int], blocks: tuple[int, ...]) -> tuple[int, ...]:
    known = tuple(block for block in blocks if block in seen)
    seen.update(blocks)
    return known


@pytest.mark.parametrize(("name", "generator", "seconds"), PAIRS)
def test_quantiles_are_near_the_traces(name: str, generator: Generator, seconds: float) -> None:
    real, made = list(read_trace(trace(name))), hour(generator, seconds)
    assert len(made) == pytest.approx(len(real), rel=0.03)
    for field in ("prompt_tokens", "output_tokens"):
        ours, theirs = ([getattr(a, field) for a in each] for each in (made, real))
        assert sum(ours) == pytest.approx(sum(theirs), rel=0.06), field
        for q, (a, b) in enumerate(zip(quantiles(ours, n=20), quantiles(theirs, n=20), strict=True), 1):
            assert a == pytest.approx(b, rel=0.2, abs=6), f"{field}, quantile {q / 20}"
    for share in (0.25, 0.5, 0.75):
        ours, theirs = (each[int(share * len(each))].time for each in (made, real))
        assert ours == pytest.approx(theirs, rel=0.05)


def test_shared_prefixes_are_near_the_trace() -> None:
    ours = shared(hour(mooncake_conversations, fitted_traffic.MOONCAKE.seconds))
    theirs = shared(list(read_trace(trace(MOONCAKE))))
    assert ours == pytest.approx(theirs, rel=0.1)


def test_gaps_are_near_the_trace() -> None:
    gaps = []
    for arrivals in (list(read_trace(trace(AZURE))), hour(azure_conversations, fitted_traffic.AZURE.seconds)):
        gaps.append([b.time - a.time for a, b in itertools.pairwise(arrivals)])
    for a, b in zip(*(quantiles(each, n=10) for each in gaps), strict=True):
        assert a == pytest.approx(b, rel=0.15)


@pytest.mark.parametrize(("name", "generator", "seconds"), PAIRS)
def test_they_are_what_they_should_be_anywhere(name: str, generator: Generator, seconds: float) -> None:
    made = list(itertools.islice(generator(random.Random(1)), 2000))
    assert made == list(itertools.islice(generator(random.Random(1)), 2000))
    assert made != list(itertools.islice(generator(random.Random(2)), 2000))
    assert all(a.time <= b.time for a, b in itertools.pairwise(made))
    parents: dict[int, int | None] = {}
    for arrival in made:
        assert arrival.prompt_tokens >= 1 and arrival.output_tokens >= 1
        if arrival.blocks:
            assert len(arrival.blocks) == -(-arrival.prompt_tokens // BLOCK_TOKENS)
        before = None
        for block in arrival.blocks:  # a block's name tells all that came before it
            assert parents.setdefault(block, before) == before
            before = block
