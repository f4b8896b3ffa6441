"""Measuring, on a clock that tests set: no time is asserted, only what follows from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import compiled_kernels.measure as measure_module
from compiled_kernels.backends import Backend
from compiled_kernels.cases import case_of, suite_of, suites
from compiled_kernels.measure import MAX_ROUNDS, MIN_ROUNDS, measure, time_interleaved, working_set

BACKENDS = (Backend.EAGER, Backend.INDUCTOR, Backend.MLIR)


class Clock:
    """A clock that advances only by work."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def played(seconds: dict[Backend, float], groups: int, budget: float) -> tuple[dict[Backend, list[float]], list[tuple]]:
    clock, calls = Clock(), []

    def way(backend: Backend) -> Callable[[list[tuple]], None]:
        def run(group: list[tuple]) -> None:
            calls.append((backend, group[0][0]))
            clock.now += seconds[backend]

        return run

    copies = dict.fromkeys(seconds, [[(index,)] for index in range(groups)])
    return time_interleaved({backend: way(backend) for backend in seconds}, copies, budget, clock), calls


@given(
    st.dictionaries(st.sampled_from(BACKENDS), st.floats(1e-5, 0.5), min_size=1),
    st.integers(1, 6),
    st.floats(0, 3),
)
def test_each_backend_gets_its_own_time_in_equal_rounds(seconds: dict, groups: int, budget: float) -> None:
    samples, calls = played(seconds, groups, budget)
    rounds = {len(found) for found in samples.values()}
    assert len(rounds) == 1 and MIN_ROUNDS <= rounds.pop() <= MAX_ROUNDS
    for backend, found in samples.items():
        assert found == pytest.approx([seconds[backend]] * len(found), rel=1e-6)
    if groups > 1:  # data just read lies in a cache: it is not read next
        assert all(before[1] != after[1] for before, after in zip(calls, calls[1:], strict=False))


def test_each_round_begins_with_another_backend() -> None:
    _, calls = played(dict.fromkeys(BACKENDS, 0.1), 2, 10.0)
    rounds = [calls[at : at + 3] for at in range(6, len(calls), 3)]  # two warm-ups each
    assert [each[0][0] for each in rounds[:4]] == [Backend.EAGER, Backend.INDUCTOR, Backend.MLIR, Backend.EAGER]
    assert all({backend for backend, _ in each} == set(BACKENDS) for each in rounds)


@given(st.floats(0.01, 0.2), st.floats(0.5, 5))
def test_the_budget_ends_it(seconds: float, budget: float) -> None:
    samples, _ = played({Backend.EAGER: seconds}, 1, budget)
    assert sum(samples[Backend.EAGER]) <= max(budget + seconds, MIN_ROUNDS * seconds) * 1.001


def test_nothing_to_time_is_no_time() -> None:
    assert time_interleaved({}, {}, 1.0) == {}


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> list[Backend]:
    """Every backend runs the specification, one call after another; mlir gives a wrong result. Who was called."""
    called: list[Backend] = []

    def compile_calls(suite: Any, backend: Backend) -> Callable[[list[tuple]], list]:
        def calls(inputs: list[tuple]) -> list:
            called.append(backend)
            wrong = 1.0 if backend is Backend.MLIR else 0.0
            return [suite.call(*each, backend=Backend.EAGER) + wrong for each in inputs]

        return calls

    monkeypatch.setattr(measure_module, "compile_calls", compile_calls)
    monkeypatch.setattr(
        measure_module, "backend_problems", lambda: {**dict.fromkeys(Backend), Backend.TRITON: "no GPU"}
    )
    return called


def test_a_backend_that_is_wrong_or_absent_is_not_timed(uncompiled: list[Backend]) -> None:
    suite = suite_of("rotary")
    found = measure(suite, suite.cases[0], tuple(Backend), budget_seconds=0.001)
    assert set(found.timings) == {Backend.EAGER, Backend.INDUCTOR} and set(found.refused) == {
        Backend.TRITON,
        Backend.MLIR,
    }
    assert "against float64" in found.refused[Backend.MLIR] and found.refused[Backend.TRITON] == "no GPU"
    assert uncompiled.count(Backend.MLIR) == 2  # seen wrong, and never again
    timing = found.timings[Backend.EAGER]
    assert 0 < timing.p10 <= timing.seconds <= timing.p90 and timing.rounds >= MIN_ROUNDS


def test_a_backends_exception_is_why_it_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: Any) -> Callable:
        def calls(inputs: list[tuple]) -> list:
            raise ValueError("not\nhere")

        return calls

    monkeypatch.setattr(measure_module, "compile_calls", refuses)
    suite = suite_of("rotary")
    found = measure(suite, suite.cases[0], (Backend.EAGER,), budget_seconds=0.001)
    assert found.timings == {} and found.refused == {Backend.EAGER: "ValueError: not here"}


@pytest.mark.usefixtures("uncompiled")
def test_weights_are_read_from_memory_and_activations_from_the_cache() -> None:
    suite = suite_of("linear_quantized")
    case = case_of(suite, "33x64x17 int8 float32")
    size = working_set(suite.make_inputs(case))
    found = measure(suite, case, (Backend.EAGER,), budget_seconds=0.001, cold_bytes=10 * size, calls=2)
    assert (found.data, found.copies, found.working_set_bytes) == ("memory", 10, size)
    found = measure(suite, case, (Backend.EAGER,), budget_seconds=0.001, cold_bytes=9000 * size)
    assert (found.data, found.copies) == ("cache", 4)  # a matrix as small as that lies there in any model
    suite = suite_of("rotary")
    found = measure(suite, suite.cases[0], (Backend.EAGER,), budget_seconds=0.001, calls=2)
    assert (found.data, found.copies) == ("cache", 2)


def test_a_working_set_is_its_tensors() -> None:
    assert working_set((torch.zeros(3, 5), torch.zeros(2, dtype=torch.int8), None, 0.5)) == 62
    assert set(measure_module.COLD_OPERATORS) <= {suite.operator for suite in suites()}
