"""Rounds of one placement: a virtual machine's two cores are moved between one core complex and two, and with them what
memory and caches give. Runs are told apart by how long a cache line takes from core to core."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from compiled_kernels import Lane, lane_problems

APART = 1.5  # times the least latency of a placement: another one. One complex takes some 20 ns here, two some 100


def core_to_core_ns() -> float | None:
    """Nanoseconds in which a cache line goes from one core to another now; None where that cannot be measured."""
    if lane_problems()[Lane.MLIR]:
        return None
    from compiled_kernels.core_latency import core_to_core_seconds

    seconds = core_to_core_seconds()
    return None if seconds is None else 1e9 * seconds


def placements(latencies: Sequence[float | None]) -> list[int]:
    """The number of each run's placement, the nearest cores first; all 0 where nothing was measured."""
    numbers: dict[float, int] = {}
    least, number = 0.0, -1
    for each in sorted({each for each in latencies if each is not None}):
        if not numbers or each >= APART * least:
            least, number = each, number + 1
        numbers[each] = number
    return [0 if each is None else numbers[each] for each in latencies]


def of_one_placement(runs: Sequence[dict]) -> list[dict]:
    """The runs of the placement in which most were taken, of equal ones the nearest: what may be compared."""
    numbers = placements([run.get("core_to_core_ns") for run in runs])
    if not numbers:
        return []
    counts = Counter(numbers)
    chosen = min(counts, key=lambda number: (-counts[number], number))
    return [run for run, number in zip(runs, numbers, strict=True) if number == chosen]
