"""Time the backends on one case in turn, and report medians. Data comes from cache, or from memory as in a model.

A backend is timed as a model runs it, several calls in one compiled graph; eager runs them one by one. A backend with a
wrong result is not timed.
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
CALLS_PER_GRAPH = 4  # calls captured in one CUDA graph
MIN_ROUNDS, MAX_ROUNDS = 5, 400
MIN_SAMPLE_SECONDS = 2e-4  # minimum duration of one timed sample


@dataclass(frozen=True)
class KernelTiming:
    """The seconds of one call: the median, and the 10th and 90th percentile, over `rounds` samples."""

    seconds: float
    p10: float
    p90: float
    rounds: int


@dataclass(frozen=True)
class KernelMeasurement:
    """The timings of one case by backend; `refused` has the reason for each backend that was not timed.

    `data` is the place of the inputs. `memory`: many copies are read in turn, too many for any cache. `cache`: the same
    copy is read again and again, as activations are.
    """

    data: str
    copies: int
    working_set_bytes: int  # bytes that one call reads and writes
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
        backends: the backends; a backend with a wrong result is refused, not timed.
        budget_seconds: time for each backend.
        cold_bytes: size of a working set that no cache holds.
        calls: calls in one compiled graph.
        clock: the clock, for tests.

    Returns:
        Timings by backend, and the reasons for refused backends.
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
    """Return the seconds of each backend's runs over groups of copies; each round takes one sample of each backend.
    Each round begins with another backend, and no run uses the group that was used just before.
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
    """Return the number of bytes of the tensors among `inputs`."""
    return sum(each.nbytes for each in tree_leaves(inputs) if isinstance(each, torch.Tensor))


def _refusal(
    suite: Suite, case: Case, backend: Backend, form: Callable[[list[tuple]], list[Any]], copies: list[tuple]
) -> str:
    """Return why a backend is not timed (it does not work here, has a gap, or gives a wrong result); empty if it is
    timed."""
    if problem := backend_problems()[backend]:
        return problem
    if backend is Backend.TRITON and triton_interpreted():
        return "interpreted: its time says nothing about the kernel"
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
    """Skip the compiled forms' check of repeated inputs in this context: in a model it happens once a step."""
    with torch.inference_mode(), torch.compiler.set_stance("default", skip_guard_eval_unsafe=True):
        yield


def _settle(backend: Backend) -> None:
    if device_of(backend) == "cuda":
        torch.cuda.synchronize()


def _timing(samples: list[float]) -> KernelTiming:
    tenths = quantiles(samples, n=10, method="inclusive")
    return KernelTiming(tenths[4], tenths[0], tenths[-1], len(samples))
