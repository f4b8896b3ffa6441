"""Time the backends of one case side by side: in turn, on data from cache or from memory as in a model; medians.

A backend is timed as a model runs it, several calls in one compiled graph; the backend eager runs them one by one. A
backend that is not correct is not timed.
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
from torch.utils._pytree import tree_leaves

from compiled_kernels.agreement import disagreement
from compiled_kernels.backends import Backend, backend_problems, triton_interpreted
from compiled_kernels.capabilities import known_gap
from compiled_kernels.cases import Case, Suite, map_tensors
from compiled_kernels.check import copy_with_strides, device_of, to_device
from compiled_kernels.compiled_calls import compile_calls, compile_context
from compiled_kernels.rounds import rotations

# Weights and caches: read once a step.
COLD_OPERATORS = ("linear", "linear_quantized", "paged_attention", "quantized_attention")
COLD_WORKING_SET_BYTES = 2**28  # bytes in copies that no cache of one processor keeps
MAX_COPIES = 8192  # inputs so small that they needed more are in the cache in any model
CALLS_PER_GRAPH = 4  # in one graph
MIN_ROUNDS, MAX_ROUNDS = 5, 400
MIN_SAMPLE_SECONDS = 2e-4  # what one reading of the clock must last


@dataclass(frozen=True)
class KernelTiming:
    """Seconds of one call: the median, and the 10th and 90th percentile, over `rounds` samples."""

    seconds: float
    p10: float
    p90: float
    rounds: int


@dataclass(frozen=True)
class KernelMeasurement:
    """Timings of one case by backend; `refused` says why others were not timed.

    `data` says where the inputs lay: `memory`, in copies read in turn that no cache holds, or `cache`, the same ones
    again and again, as activations are.
    """

    data: str
    copies: int
    working_set_bytes: int  # of one call
    timings: Mapping[Backend, KernelTiming] = field(default_factory=dict)
    refused: Mapping[Backend, str] = field(default_factory=dict)


def measure(
    suite: Suite,
    case: Case,
    backends: Iterable[Backend],
    budget_seconds: float = 0.4,
    cold_bytes: int = COLD_WORKING_SET_BYTES,
    calls: int = CALLS_PER_GRAPH,
    clock: Callable[[], float] = time.perf_counter,
) -> KernelMeasurement:
    """Time backends on one case in interleaved rounds.

    Args:
        suite: the operator's cases.
        case: the case to time.
        backends: the backends; one whose result is wrong is refused, not timed.
        budget_seconds: time for each backend.
        cold_bytes: working set from which no cache serves repeated reads.
        calls: calls in one compiled graph.
        clock: the clock, for tests.

    Returns:
        Timings by backend, and the reasons of those refused.
    """
    inputs = suite.make_inputs(case)
    size = working_set(inputs)
    needed = max(1, -(-cold_bytes // (size * calls)))
    from_memory = suite.operator in COLD_OPERATORS and needed * calls <= MAX_COPIES
    groups = needed if from_memory else 1
    copies: dict[str, list[list[tuple]]] = {}
    ways: dict[Backend, Callable[[list[tuple]], object]] = {}
    refused: dict[Backend, str] = {}
    for backend in backends:
        device = device_of(backend)
        if device not in copies:
            copies[device] = [
                [map_tensors(copy_with_strides, to_device(inputs, device)) for _ in range(calls)] for _ in range(groups)
            ]
        form = compile_calls(suite, backend)
        if reason := _refusal(suite, case, backend, form, copies[device][0]):
            refused[backend] = reason
        else:
            ways[backend] = form
    taken = {backend: copies[device_of(backend)] for backend in ways}
    with _quick_calls():
        samples = time_interleaved(ways, taken, budget_seconds, clock)
    timings = {backend: _timing([each / calls for each in found]) for backend, found in samples.items()}
    return KernelMeasurement("memory" if from_memory else "cache", groups * calls, size, timings, refused)


def time_interleaved(
    ways: Mapping[Backend, Callable[[list[tuple]], object]],
    copies: Mapping[Backend, list[list[tuple]]],
    budget_seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[Backend, list[float]]:
    """Time a run of each backend over a group of copies, one sample of each a round, in seconds.

    Each round begins with another backend, and no run takes a group that was just taken.
    """
    turn = itertools.count()

    def sample(backend: Backend, repeats: int) -> float:
        groups, way = copies[backend], ways[backend]
        taken = [groups[next(turn) % len(groups)] for _ in range(repeats)]
        began = clock()
        for group in taken:
            way(group)
        _settle(backend)
        return (clock() - began) / repeats

    warm = {backend: min(sample(backend, 1) for _ in range(2)) for backend in ways}
    repeats = {backend: max(1, round(MIN_SAMPLE_SECONDS / max(seconds, 1e-7))) for backend, seconds in warm.items()}
    samples: dict[Backend, list[float]] = {backend: [] for backend in ways}
    began = clock()
    for number, order in enumerate(itertools.islice(rotations(ways), MAX_ROUNDS)):
        if number >= MIN_ROUNDS and clock() - began >= budget_seconds * len(order):
            break
        for backend in order:
            samples[backend].append(sample(backend, repeats[backend]))
    return samples


def working_set(inputs: tuple) -> int:
    """Return bytes of the tensors among `inputs`."""
    return sum(each.nbytes for each in tree_leaves(inputs) if isinstance(each, torch.Tensor))


def _refusal(
    suite: Suite, case: Case, backend: Backend, form: Callable[[list[tuple]], list[Any]], copies: list[tuple]
) -> str:
    """Return why a backend is not timed: it does not work here, it has a gap, or its result is wrong; empty where it
    is timed."""
    if problem := backend_problems()[backend]:
        return problem
    if backend is Backend.TRITON and triton_interpreted():
        return "interpreted: what it takes says nothing of the kernel"
    if gap := known_gap(suite.operator, backend, case.name):
        return gap.reason
    try:
        with compile_context():
            form(copies)
        with _quick_calls():
            outputs = form(copies)
        wrong = (disagreement(suite, case, copies[at], backend, lambda *_, at=at: outputs[at]) for at in (0, -1))
        return next(filter(None, wrong), "")
    except Exception as error:  # any exception refuses this backend; the others are timed
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


@contextmanager
def _quick_calls() -> Iterator[None]:
    """Skip the look of compiled forms at inputs that were seen before: in a model it is one a step."""
    with torch.inference_mode(), torch.compiler.set_stance("default", skip_guard_eval_unsafe=True):
        yield


def _settle(backend: Backend) -> None:
    if device_of(backend) == "cuda":
        torch.cuda.synchronize()


def _timing(samples: list[float]) -> KernelTiming:
    tenths = quantiles(samples, n=10, method="inclusive")
    return KernelTiming(tenths[4], tenths[0], tenths[-1], len(samples))
