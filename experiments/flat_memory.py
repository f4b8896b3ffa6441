"""Whether the memory of a process stays where it is: what is resident after a collection and a heap trim, over time."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from workbench.engine import heap
from workbench.study.memory import resident_bytes

MIB = 2**20
WARM_UP = 0.3  # of the requests: until every kernel was compiled, and every buffer has its size
MOST = 4.0  # MiB that a run may grow by after the warm-up: allocators leave a few pieces behind
FEWEST = 9  # samples after the warm-up that are judged


@dataclass(frozen=True)
class Flatness:
    """`slope` is that of the line through the samples after the warm-up, in MiB a thousand requests, and `grown` what
    the whole run would grow by with it; `difference` is the median of their last third less that of their first, in
    MiB; `flat` is None where they are too few to tell."""

    samples: int
    slope: float
    grown: float
    difference: float
    flat: bool | None


def resident() -> float | None:
    """MiB of this process in memory, without what could be given back."""
    gc.collect()
    heap.trim()
    found = resident_bytes()
    return None if found is None else found / MIB


def judge(samples: Sequence[tuple[int, float]], requests: int) -> Flatness:
    """`samples` are MiB by how many of the `requests` had ended. Flat is what grows by no more than `MOST`, neither by
    its slope over all requests nor from its first third to its last."""
    kept = [(ended, size) for ended, size in samples if ended >= WARM_UP * requests]
    if len(kept) < FEWEST:
        return Flatness(len(kept), 0.0, 0.0, 0.0, None)
    slope = statistics.linear_regression(*zip(*kept, strict=True)).slope
    sizes, third = [size for _, size in kept], len(kept) // 3
    difference = statistics.median(sizes[-third:]) - statistics.median(sizes[:third])
    grown = slope * requests
    return Flatness(len(kept), 1000 * slope, grown, difference, max(grown, difference) <= MOST)
