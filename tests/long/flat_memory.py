"""Check that a process's resident memory, after a collection and a heap trim, does not grow over time."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from workbench.engine.loaded_model import trim_heap
from workbench.machine.processor import resident_bytes

MIB = 2**20
WARM_UP = 0.3  # share of the requests, until every kernel is compiled and every buffer has its size
MAX_GROWTH_MIB = 4.0  # MiB a run may grow by after the warm-up, for fragmentation of the heap
MIN_SAMPLES = 9  # samples needed after the warm-up


@dataclass(frozen=True)
class Flatness:
    """The judgement of memory samples.

    `slope` is that of the line through the samples after the warm-up, in MiB a thousand requests; `grown` is the growth
    of the whole run by it. `difference` is the median of their last third less that of their first, in MiB. `flat` is
    None where samples are too few.
    """

    samples: int
    slope: float
    grown: float
    difference: float
    flat: bool | None


def resident_mib() -> float:
    """Return the resident MiB of this process, after freeing unused memory."""
    gc.collect()
    trim_heap()
    return resident_bytes() / MIB


def judge(samples: Sequence[tuple[int, float]], requests: int) -> Flatness:
    """Judge samples of (finished requests, MiB).

    Memory is flat if it grows by at most `MAX_GROWTH_MIB`, both by its slope over all requests and from its first third
    to its last.
    """
    settled_samples = [(ended, size) for ended, size in samples if ended >= WARM_UP * requests]
    if len(settled_samples) < MIN_SAMPLES:
        return Flatness(len(settled_samples), 0.0, 0.0, 0.0, None)
    slope = statistics.linear_regression(*zip(*settled_samples, strict=True)).slope
    sizes, third = [size for _, size in settled_samples], len(settled_samples) // 3
    difference = statistics.median(sizes[-third:]) - statistics.median(sizes[:third])
    grown = slope * requests
    return Flatness(len(settled_samples), 1000 * slope, grown, difference, max(grown, difference) <= MAX_GROWTH_MIB)
