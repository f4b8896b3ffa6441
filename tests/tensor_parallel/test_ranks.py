"""Exchanges between ranks: sums in their order, failures on either side, and what was computed by each."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
import tempfile
import weakref
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from compiled_kernels import Backend
from tests.patience import limit, until
from tests.tensor_parallel.in_threads import runner_of_ranks, serving
from workbench.batch import TokenBatch
from workbench.engine.runner import generate
from workbench.errors import WorkbenchError
from workbench.model.hf.weights import random_weights
from workbench.model.memory import cache_shapes
from workbench.model.quantized import WeightFormat
from workbench.model.shapes import named_shape
from workbench.request import Request, SamplingParameters
from workbench.tensor_parallel import executor, shared_memory
from workbench.tensor_parallel.cut import spec_of_rank
from workbench.tensor_parallel.executor import TensorParallelStore, tasks_of
from workbench.tensor_parallel.processes import ProcessPeers
from workbench.tensor_parallel.ranks import CHUNK_BYTES, RankFailed, Ranks

DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def numbers(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(rank), dtype=torch.float32).to(dtype)


@given(st.integers(2, 4), st.integers(1, 600), st.sampled_from(DTYPES))
@example(2, CHUNK_BYTES // 4 * 2 + 5, torch.float32)  # more than a slot goes in chunks
def test_a_sum_is_in_the_order_of_ranks_and_rounded_once(size: int, count: int, dtype: torch.dtype) -> None:
    seen: dict[int, torch.Tensor] = {}

    def tasks(ranks: Ranks) -> dict[str, Any]:
        def both(content: Any) -> torch.Tensor | None:
            x = numbers(ranks.rank, count, dtype)
            seen[ranks.rank] = ranks.all_reduce(x)
            return ranks.gather(x)

        return {"both": both}

    with serving(tasks, size) as first:
        gathered = first.lead("both", None, lambda: tasks(first)["both"](None))
    parts = [numbers(rank, count, dtype) for rank in range(size)]
    total = parts[0].to(torch.promote_types(dtype, torch.float32))
    for part in parts[1:]:
        total = total + part
    assert all(torch.equal(found, total.to(dtype)) for found in seen.values()) and len(seen) == size
    assert torch.equal(gathered, torch.stack(parts))
    assert first.traffic.bytes == 2 * parts[0].nbytes and first.traffic.exchanges == 2


def failing(ranks: Ranks) -> dict[str, Any]:
    def fail(content: Any) -> None:
        if ranks.rank in content:
            raise WorkbenchError(f"no memory left here ({ranks.rank})")
        ranks.all_reduce(torch.ones(3))

    return {"fail": fail, "add": lambda content: ranks.all_reduce(torch.ones(3))}


@pytest.mark.parametrize("who", [(0,), (1,), (2,), (1, 2)])
def test_what_fails_on_one_rank_ends_the_step_on_all_and_the_next_is_computed(who: tuple[int, ...]) -> None:
    with serving(failing, 3) as first:
        own = failing(first)
        for _ in range(3):
            with pytest.raises(WorkbenchError, match=f"no memory left here .[{who[0]}{who[-1]}]"):
                first.lead("fail", who, lambda: own["fail"](who))
            assert first.lead("add", None, lambda: own["add"](None)).tolist() == [3.0, 3.0, 3.0]


def test_a_rank_that_computes_another_step_is_found() -> None:
    def tasks(ranks: Ranks) -> dict[str, Any]:
        return {"step": lambda pages: ranks.record([torch.tensor(pages) + (ranks.rank == 2)])}

    with serving(tasks, 2) as first:
        first.lead("step", [4, 7], lambda: first.record([torch.tensor([4, 7])]))
    with pytest.raises(RankFailed, match="rank 2 computed another step"), serving(tasks, 3) as first:
        first.lead("step", [4, 7], lambda: first.record([torch.tensor([4, 7])]))


def test_a_rank_that_does_not_answer_is_given_up_in_time() -> None:
    waits = [True]

    def tasks(ranks: Ranks) -> dict[str, Any]:
        return {"hang": lambda content: until(lambda: not waits)}

    said, timeout = f"rank 1 did not answer for {limit(0.02):g} s", limit(0.02)
    with pytest.raises(RankFailed, match=said), serving(tasks, 2, timeout=timeout) as first:
        try:
            first.lead("hang", None, lambda: first.all_reduce(torch.ones(2)))
        finally:
            waits.clear()


class Pages:
    """Stand for the pages of a rank."""


def test_pages_of_a_collected_store_are_given_back_by_all_ranks() -> None:
    """With the next store that is opened, whichever of those before it was collected."""
    shapes, pages = cache_shapes(spec_of_rank(named_shape("tiny"), 0, 2)), list[weakref.ref[Any]]()

    def open_store(*layout: Any) -> Any:
        pages.append(weakref.ref(store := Pages()))
        return store

    def tasks(ranks: Ranks) -> dict[str, Any]:
        return tasks_of(lambda: pytest.fail("no model is asked for"), open_store)

    def held() -> list[bool]:
        gc.collect()
        return [each() is not None for each in pages]

    with serving(tasks, 2) as first:
        layout = shapes, (3,), 4, torch.float32
        stores = [TensorParallelStore(first, *layout) for _ in range(3)]
        assert held() == [True] * 3
        del stores[0]
        gc.collect()
        stores.append(TensorParallelStore(first, *layout))
        assert held() == [False, True, True, True]
        stores.clear()
        gc.collect()
        stores.append(TensorParallelStore(first, *layout))
        assert held() == [False] * 4 + [True]


@pytest.mark.parametrize("times", [0, 1, 2, 3])
def test_a_rank_that_does_not_zero_its_pages_computes_no_more(times: int) -> None:
    """It may fail once; where it fails again the ranks are broken, since no digest covers what pages hold."""
    shapes, failures, zeroed = cache_shapes(spec_of_rank(named_shape("tiny"), 0, 2)), [times], list[list[int]]()

    class RankPages:
        def zero_pages(self, group: int, pages: list[int]) -> None:
            failures[0] -= 1
            if failures[0] >= 0:
                raise WorkbenchError("no memory left here")
            zeroed.append(pages)

        def copy_pages(self, group: int, sources: list[int], targets: list[int]) -> None:
            """Stand for a task that computes."""

    def open_store(*layout: Any) -> Any:
        return RankPages()

    def tasks(ranks: Ranks) -> dict[str, Any]:
        return tasks_of(lambda: pytest.fail("no model is asked for"), open_store)

    left = contextlib.nullcontext() if times < 2 else pytest.raises(RankFailed, match="keep old contents")
    with left, serving(tasks, 2) as first:
        store = TensorParallelStore(first, shapes, (3,), 4, torch.float32)
        for tensor in store.page_tensors(0):
            tensor.fill_(1)
        store.zero_pages(0, [2])
        assert all(not tensor[2].any() and tensor[1].all() for tensor in store.page_tensors(0))
        assert zeroed == [[2]] * (times < 2)
        if times >= 2:
            with pytest.raises(RankFailed, match="rank 1: no memory left here; its pages keep old contents"):
                store.copy_pages(0, [1], [2])
        else:
            store.copy_pages(0, [1], [2])


def test_numbers_of_calls_and_rounds_go_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "CALLS", 8)
    monkeypatch.setattr(shared_memory, "ROUNDS", 4)
    with serving(failing, 3) as first:
        own = failing(first)
        for _ in range(9):
            for _ in range(9):
                assert first.lead("add", None, lambda: own["add"](None)).tolist() == [3.0, 3.0, 3.0]
            with pytest.raises(WorkbenchError, match="no memory left here"):
                first.lead("fail", (1,), lambda: own["fail"]((1,)))


def test_a_shared_model_computes_in_steps_alone() -> None:
    with serving(failing, 2) as first, pytest.raises(WorkbenchError, match="only in the runner's steps"):
        first.all_reduce(torch.ones(2))


def test_a_rank_with_another_page_table_ends_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: from its second step on, rank 1 reads a page beside the one that rank 0 reads. Its part of the sums is
    wrong then, and all ranks have the same wrong rows: only the digest of the tables tells."""
    spec, steps, right = named_shape("tiny"), list[int](), executor.from_arrays

    def from_arrays(values: Any, device: torch.device) -> TokenBatch:
        steps.append(len(steps))
        batch = right(values, device)
        if len(steps) > 1:
            batch.page_tables[0][0, 0] += 1
        return batch

    state = random_weights(spec, torch.float32, 3)
    request = Request("one", (5, 6, 7), SamplingParameters(temperature=0, max_tokens=6, ignore_eos=True))
    for plant in (False, True):
        if plant:
            monkeypatch.setattr(executor, "from_arrays", from_arrays)
        peers = pytest.raises(RankFailed) if plant else contextlib.nullcontext()
        with peers, runner_of_ranks(spec, state, WeightFormat(), 2, Backend.EAGER, pages=9) as runner:
            end = generate(runner, [request])["one"]
            assert ("rank 1 computed another step than rank 0" in (end.error or "")) == plant
    assert len(steps) == 2


def test_the_rank_that_was_killed_is_named_not_one_that_ended_for_it() -> None:
    codes = "print('parallel.tensor: a rank was lost: closed'); exit(1)", "import os; os.kill(os.getpid(), 9)"
    with tempfile.TemporaryFile() as one, tempfile.TemporaryFile() as two:
        processes = [
            subprocess.Popen([sys.executable, "-c", code], stdout=file)
            for code, file in zip(codes, (one, two), strict=True)
        ]
        for process in processes:
            process.wait()
        peers = ProcessPeers(processes, [one, two])
        for _ in range(2):  # it is said again as it was
            with pytest.raises(RankFailed, match=r"rank 2 ended \(signal 9\)"):
                peers.check()
