"""Backends of one case timed beside each other: in turn, on data from cache or memory as in a model, medians.

A lane is timed as a model runs it, several calls in one compiled graph; the lane eager runs them one by one. One that
is not correct is not timed.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import quantiles
from typing import Any

import torch

from compiled_kernels.cases import Case, Suite, disagreement
from compiled_kernels.check import copied, device_of, moved
from compiled_kernels.compiled import compiling, many_calls
from compiled_kernels.gaps import known_gap
from compiled_kernels.lanes import Lane, interpreted, lane_problems

# Weights and caches: read once a step.
FROM_MEMORY = ("linear", "linear_int8", "linear_int4", "paged_attention", "quantized_attention")
PAST_CACHES = 2**28  # bytes in copies that no cache of one processor keeps
MOST_COPIES = 8192  # inputs so small that they needed more are in the cache in any model
CALLS = 4  # in one graph
LEAST_ROUNDS, MOST_ROUNDS = 5, 400
SAMPLE_SECONDS = 2e-4  # what one reading of the clock must last


@dataclass(frozen=True)
class Timing:
    """Seconds of one call: the median, and the 10th and 90th percentile, over `rounds` samples."""

    seconds: float
    p10: float
    p90: float
    rounds: int


@dataclass(frozen=True)
class Measurement:
    """Timings of one case by backend; `refused` says why others were not timed.

    `data` says where the inputs lay: `memory`, in copies read in turn that no cache holds, or `cache`, the same ones
    again and again, as activations are.
    """

    data: str
    copies: int
    working_set_bytes: int  # of one call
    timings: Mapping[Lane, Timing] = field(default_factory=dict)
    refused: Mapping[Lane, str] = field(default_factory=dict)


def measure(
    suite: Suite,
    case: Case,
    lanes: Iterable[Lane],
    budget_seconds: float = 0.4,
    past_caches: int = PAST_CACHES,
    calls: int = CALLS,
    clock: Callable[[], float] = time.perf_counter,
) -> Measurement:
    """Time backends on one case in interleaved rounds.

    Args:
        suite: the operator's cases.
        case: the case to time.
        lanes: the backends; one whose result is wrong is refused, not timed.
        budget_seconds: time for each backend.
        cold_bytes: working set from which no cache serves repeated reads.
        calls: calls in one compiled graph.
        clock: the clock, for tests.

    Returns:
        Timings by backend, and the reasons of those refused.
    """
    inputs = suite.make(case)
    size = working_set(inputs)
    needed = max(1, -(-past_caches // (size * calls)))
    from_memory = suite.operator in FROM_MEMORY and needed * calls <= MOST_COPIES
    groups = needed if from_memory else 1
    copies: dict[str, list[list[tuple]]] = {}
    ways: dict[Lane, Callable[[list[tuple]], object]] = {}
    refused: dict[Lane, str] = {}
    for lane in lanes:
        device = device_of(lane)
        if device not in copies:
            copies[device] = [[_copied(moved(inputs, device)) for _ in range(calls)] for _ in range(groups)]
        form = many_calls(suite, lane)
        if reason := _refusal(suite, case, lane, form, copies[device][0]):
            refused[lane] = reason
        else:
            ways[lane] = form
    taken = {lane: copies[device_of(lane)] for lane in ways}
    with _quick_calls():
        samples = interleaved(ways, taken, budget_seconds, clock)
    timings = {lane: _timing([each / calls for each in found]) for lane, found in samples.items()}
    return Measurement("memory" if from_memory else "cache", groups * calls, size, timings, refused)


def interleaved(
    ways: Mapping[Lane, Callable[[list[tuple]], object]],
    copies: Mapping[Lane, list[list[tuple]]],
    budget_seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[Lane, list[float]]:
    """Time a run of each backend over a group of copies, one sample of each a round, in seconds.

    Each round begins with another backend, and no run takes a group that was just taken.
    """
    turn = itertools.count()

    def sample(lane: Lane, repeats: int) -> float:
        groups, way = copies[lane], ways[lane]
        taken = [groups[next(turn) % len(groups)] for _ in range(repeats)]
        began = clock()
        for group in taken:
            way(group)
        _settle(lane)
        return (clock() - began) / repeats

    order = list(ways)
    warm = {lane: min(sample(lane, 1) for _ in range(2)) for lane in order}
    repeats = {lane: max(1, round(SAMPLE_SECONDS / max(seconds, 1e-7))) for lane, seconds in warm.items()}
    samples: dict[Lane, list[float]] = {lane: [] for lane in order}
    began = clock()
    for number in range(MOST_ROUNDS if order else 0):
        if number >= LEAST_ROUNDS and clock() - began >= budget_seconds * len(order):
            break
        first = number % len(order)
        for lane in order[first:] + order[:first]:
            samples[lane].append(sample(lane, repeats[lane]))
    return samples


def working_set(inputs: tuple) -> int:
    """Return bytes of the tensors among `inputs`."""
    return sum(each.nbytes for each in inputs if isinstance(each, torch.Tensor))


def _refusal(
    suite: Suite, case: Case, lane: Lane, form: Callable[[list[tuple]], list[Any]], copies: list[tuple]
) -> str:
    """Return why a backend is not timed: it does not work here, it has a gap, or its result is wrong; empty where it
    is timed."""
    if problem := lane_problems()[lane]:
        return problem
    if lane is Lane.TRITON and interpreted():
        return "interpreted: what it takes says nothing of the kernel"
    if gap := known_gap(suite.operator, lane, case.name):
        return gap.reason
    try:
        with compiling():
            form(copies)
        with _quick_calls():
            outputs = form(copies)
        wrong = (disagreement(suite, case, copies[at], lane, lambda *_, at=at: outputs[at]) for at in (0, -1))
        return next(filter(None, wrong), "")
    except Exception as error:  # any exception refuses this backend; the others are timed
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


@contextmanager
def _quick_calls() -> Iterator[None]:
    """Skip the look of compiled forms at inputs that were seen before: in a model it is one a step."""
    with torch.inference_mode(), torch.compiler.set_stance("default", skip_guard_eval_unsafe=True):
        yield


def _settle(lane: Lane) -> None:
    if device_of(lane) == "cuda":
        torch.cuda.synchronize()


def _copied(inputs: tuple) -> tuple:
    return tuple(copied(each) if isinstance(each, torch.Tensor) else each for each in inputs)


def _timing(samples: list[float]) -> Timing:
    tenths = quantiles(samples, n=10, method="inclusive")
    return Timing(tenths[4], tenths[0], tenths[-1], len(samples))
