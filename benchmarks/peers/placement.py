"""Group runs by the placement of their cores: the two cores of a virtual machine may lie in one core complex or in two.

Memory and cache bandwidth depend on the placement, which is recognized by the latency of passing a cache line from core
to core."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from compiled_kernels import Backend, backend_problems

MIN_LATENCY_RATIO = (
    1.5  # a latency this many times the least is another placement: some 20 ns in one complex, 100 over two
)


def core_to_core_ns() -> float | None:
    """Measure the nanoseconds that a cache line takes from one core to another; None if the mlir backend does not work
    here."""
    if backend_problems()[Backend.MLIR]:
        return None
    from compiled_kernels.core_latency import core_to_core_seconds

    seconds = core_to_core_seconds()
    return None if seconds is None else 1e9 * seconds


def group_by_placement(latencies: Sequence[float | None]) -> list[int]:
    """Return the number of each run's placement: 0 for the lowest latency, then upwards. Runs without a measured
    latency get 0."""
    numbers: dict[float, int] = {}
    least, number = 0.0, -1
    for each in sorted({each for each in latencies if each is not None}):
        if not numbers or each >= MIN_LATENCY_RATIO * least:
            least, number = each, number + 1
        numbers[each] = number
    return [0 if each is None else numbers[each] for each in latencies]


def largest_placement(runs: Sequence[dict]) -> list[dict]:
    """Return the runs of the placement that has most runs (of equally many, the placement with the lowest latency):
    only runs of one placement are comparable."""
    numbers = group_by_placement([run.get("core_to_core_ns") for run in runs])
    if not numbers:
        return []
    counts = Counter(numbers)
    chosen = min(counts, key=lambda number: (-counts[number], number))
    return [run for run, number in zip(runs, numbers, strict=True) if number == chosen]
