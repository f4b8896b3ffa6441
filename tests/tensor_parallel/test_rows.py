"""A step as rows of compiled halves on ranks: the bits of a whole step where there is no other rank, and with
`batch_invariant` the same bits of a request in every batch. Nothing here is close: all is equal."""

from __future__ import annotations

import random
from contextlib import ExitStack
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compiled_kernels import Backend, backend_problems
from compiled_kernels.decode_step import DecodeStep, StepShape
from tests.engine.invariant import KINDS, ROW_BUCKETS, SIZE, model_of, other_requests, subject
from tests.engine.scribe import Rows, Scribe, asked, differing, served
from tests.engine.tiny import weights_of
from tests.tensor_parallel.in_threads import Ranks, runner_of_ranks
from tests.tensor_parallel.specs import TRANSPORTS
from tests.thorough import THOROUGH, tries
from workbench.engine.config import EngineConfig
from workbench.engine.runner import Runner, generate
from workbench.executors.programs.decode_step import step_tensors
from workbench.executors.programs.rows import RowsProgram
from workbench.model.quantized import quantize
from workbench.request import Request
from workbench.tensor_parallel.rows import HalfSteps, RankRows

problem = backend_problems()[Backend.MLIR]
pytestmark = pytest.mark.skipif(problem is not None, reason=f"backend mlir: {problem}")

SHARED = (
    "sunk float32", "wide float32", "wide bfloat16", "int8 weights", "int8 activations", "int4 weights",
    "int4 weights with minima", "int4 keys, int8 values", "fp8 cache",
)  # fmt: skip
GIVEN: dict[str, Any] = {"page_size": SIZE, "pages": 120, "max_num_seqs": 9, "batch_invariant": True}


class Alone:
    """The only rank."""

    def all_reduce(self, part: Tensor) -> Tensor:
        return part


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", SHARED)
def test_a_step_in_halves_has_the_bits_of_the_whole_step(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    requests, given = [subject(kind), *other_requests(kind, [5, 19])], {"cache": KINDS[kind][3], "page_size": SIZE}
    whole = served(model_of(kind), requests, buckets=(8,), **given)
    right = RowsProgram._build

    def in_halves(self: RowsProgram, shape: StepShape) -> DecodeStep:
        own: Any = Alone()
        return HalfSteps(shape, step_tensors(self.model, self.store), own) if shape.layers else right(self, shape)

    monkeypatch.setattr(RowsProgram, "_build", in_halves)
    halves = served(model_of(kind), requests, buckets=(8,), **given)
    assert all(differing(halves[name], whole[name]) == [] for name in whole)


def rows_of(runner: Runner, requests: list[Request]) -> Rows:
    """Return the subject's rows, computed on a cache without prefixes."""
    scribe = Scribe(runner)
    try:
        ends = generate(runner, requests)
    finally:
        runner.core.executor = scribe.inner
    assert all(end.reason == "length" for end in ends.values()), {end.error for end in ends.values()}
    return scribe.rows["subject"]


COMPOSITIONS = st.lists(st.integers(1, 38), max_size=8)


@pytest.fixture
def few_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer numbers of rows are compiled for."""
    monkeypatch.setattr(RankRows, "SIZES", ROW_BUCKETS)


@pytest.mark.usefixtures("few_sizes")
@pytest.mark.sampled(5)
@pytest.mark.parametrize(("kind", "size"), [*((kind, 2) for kind in SHARED), ("wide float32", 4)])
def test_a_request_has_the_same_bits_in_every_batch(kind: str, size: int) -> None:
    spec, dtype, format, cache = KINDS[kind]
    state = quantize(weights_of(spec, dtype, 0), spec, format)
    with ExitStack() as stack:
        chunks = (64, 7, 21)
        runners = [
            stack.enter_context(
                runner_of_ranks(
                    spec, state, format, size, Backend.MLIR, cache=cache, max_num_batched_tokens=chunk, **GIVEN
                )
            )
            for chunk in chunks
        ]
        assert all(each.core.executor.gathers_logits for each in runners)
        expected = rows_of(runners[0], [subject(kind)])

        @settings(max_examples=tries(12), deadline=None, derandomize=not THOROUGH)
        @given(COMPOSITIONS, st.integers(0, 8), st.sampled_from(runners))
        def law(lengths: list[int], place: int, runner: Runner) -> None:
            requests = other_requests(kind, lengths)
            requests.insert(place, subject(kind))
            assert differing(rows_of(runner, requests), expected) == []

        law()


@pytest.mark.usefixtures("few_sizes")
def test_a_sum_whose_order_depends_on_the_batch_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: four ranks are summed backwards where there are many rows."""
    kind, right = "wide float32", Ranks.all_reduce

    def all_reduce(self: Ranks, x: Tensor) -> Tensor:
        if len(x) < 4:
            return right(self, x)
        group, gather = self.group, type(self.group).allgather.__get__(self.group)
        monkeypatch.setattr(group, "allgather", lambda rows, own: gather([rows[0][::-1]], own), raising=False)
        try:
            return right(self, x)
        finally:
            monkeypatch.delattr(group, "allgather", raising=False)

    monkeypatch.setattr(Ranks, "all_reduce", all_reduce)
    spec, dtype, format, _ = KINDS[kind]
    with runner_of_ranks(spec, weights_of(spec, dtype, 0), format, 4, Backend.MLIR, **GIVEN) as runner:
        alone, others = rows_of(runner, [subject(kind)]), other_requests(kind, [30] * 6)
        assert differing(rows_of(runner, [subject(kind), *others]), alone)


@pytest.mark.processes
def test_processes_on_each_transport_have_the_same_bits_in_every_batch() -> None:
    """Those of threads above, of either transport, whatever is computed beside; and not those of one process."""
    draw, vocab = random.Random(3), 200
    mine = asked("subject", 23, 6, vocab)
    beside = [[asked(f"other {i}", draw.randrange(1, 38), 4, vocab) for i in range(count)] for count in (0, 3, 7)]
    found = []
    for changes in ({"tensor": 2, "transport": TRANSPORTS[0]}, {"tensor": 2, "transport": TRANSPORTS[1]}, {}):
        runner = Runner(
            EngineConfig.build("shape:tiny", dtype="float32", max_num_batched_tokens=29, **GIVEN, **changes)
        )
        try:
            found.append([rows_of(runner, [*others[: len(others) // 2], mine, *others[len(others) // 2 :]])
                          for others in beside])  # fmt: skip
        finally:
            runner.close()
    shared, carried, one = found
    expected = shared[0]
    assert all(differing(rows, expected) == [] for rows in (*shared, *carried))
    assert differing(one[0], expected)
