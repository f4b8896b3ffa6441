"""Compute steps and move pages on all ranks: rank 0 posts tasks to the other ranks and computes its own part of them.

A batch is computed by the program `blocks`, the modules as written on the operators of their backend or compiled by
Inductor (see graphs.py), or as `rows` of compiled functions (see rows.py).
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from compiled_kernels import Backend
from workbench.batch import TokenBatch
from workbench.executors.build import MAX_TOKEN_PARALLEL_TOKENS
from workbench.executors.packing import batch_tensors, map_fields
from workbench.executors.programs.eager import EagerProgram
from workbench.executors.programs.program import Call, StepProgram
from workbench.executors.select import Backends
from workbench.executors.step_runner import StepRunner
from workbench.executors.thread_waiting import THREADS
from workbench.interrupts import DeferInterrupts
from workbench.kv_cache.format import KVCacheSpec
from workbench.kv_cache.store import KVStore
from workbench.scheduler.plan import StepPlan
from workbench.tensor_parallel.ranks import RankFailed, Ranks
from workbench.tensor_parallel.rows import RankRows
from workbench.tensor_parallel.transformer import TensorParallelTransformer

STORE_NUMBERS = itertools.count()
FORWARD, OPEN_CACHE, ZERO_PAGES, COPY_PAGES = "forward", "open_cache", "zero_pages", "copy_pages"
MEMORY = "memory"
ZERO_ATTEMPTS = 2  # attempts to zero pages on all ranks, before the ranks are ended
BLOCKS, ROWS = "blocks", "rows"  # kinds of programs


class TensorParallelStore(KVStore):
    """Rank 0's page store. Every page operation is executed on all ranks, which have stores with the same pages.

    `number` identifies the store among a model's stores: two runners may share one model.
    """

    def __init__(
        self, ranks: Ranks, specs: Iterable[KVCacheSpec], num_pages: tuple[int, ...], page_size: int,
        dtype: torch.dtype, device: str = "cpu",
    ):  # fmt: skip
        self.ranks, specs, self.number = ranks, tuple(specs), next(STORE_NUMBERS)
        layout = num_pages, page_size, str(dtype).removeprefix("torch."), repr(specs)
        unused, ranks.unused_stores[:] = list(ranks.unused_stores), []  # same list: finalizers append to it
        content = self.number, layout, unused
        ranks.lead(OPEN_CACHE, content, lambda: KVStore.__init__(self, specs, num_pages, page_size, dtype, device))

        weakref.finalize(self, ranks.unused_stores.append, self.number)

    def zero_pages(self, group: int, pages: Iterable[int]) -> None:
        """Zero `pages` of a cache group on all ranks. If the ranks are broken, zero them only on rank 0, since no rank
        computes any more.

        A rank that fails to zero its pages breaks the ranks: the digests do not cover page contents.
        """
        pages = list(pages)
        for attempt in range(ZERO_ATTEMPTS):
            try:
                self._lead(ZERO_PAGES, (group, pages), lambda: KVStore.zero_pages(self, group, pages))
                return
            except RankFailed as error:
                if self.ranks.broken is None and attempt == ZERO_ATTEMPTS - 1:
                    self.ranks.break_off(f"{error}; its pages keep old contents: load the model again")
                if self.ranks.broken is not None:
                    break
        super().zero_pages(group, pages)

    def copy_pages(self, group: int, sources: list[int], targets: list[int]) -> None:
        """Copy each page of `sources` to the page at the same index in `targets`, on all ranks."""
        content = group, sources, targets
        self._lead(COPY_PAGES, content, lambda: KVStore.copy_pages(self, *content))

    def _lead(self, kind: str, content: tuple[Any, ...], compute: Callable[[], None]) -> None:
        with DeferInterrupts():  # an interrupt during a task would desynchronize the ranks
            self.ranks.lead(kind, (self.number, *content), compute)


class LeadProgram(StepProgram):
    """A program that computes batches on all ranks with their programs of `kind`: rank 0 posts a task to the other
    ranks and computes its own shard.
    """

    gathers_logits = True
    untimed = "its ranks compute together: their functions are not timed one by one"

    def __init__(self, kind: str, programs: RankPrograms, store: TensorParallelStore, max_tokens: float = math.inf):
        """Build the leading program of a kind.

        Args:
            kind: BLOCKS or ROWS.
            programs: rank 0's programs.
            store: rank 0's page store.
            max_tokens: maximum tokens of an accepted plan.
        """
        super().__init__(programs.model, store)
        self.kind, self.own, self.number, self.max_tokens = kind, programs, store.number, max_tokens

    @property
    def made(self) -> int:  # type: ignore[override] (of the program that it leads)
        return self.own[self.kind].made if self.kind in self.own else 0

    @property
    def artifacts(self) -> Mapping[str, str]:  # type: ignore[override] (of the program that it leads)
        return self.own[self.kind].artifacts if self.kind in self.own else {}

    @property
    def chosen(self) -> Mapping[int, Tensor] | None:  # type: ignore[override] (of the program that it leads)
        return self.own[self.kind].chosen

    def accept(self, plan: StepPlan) -> StepPlan | None:
        return self.own[self.kind].accept(plan) if plan.num_tokens <= self.max_tokens else None

    def calls(self, plan: StepPlan) -> Iterator[Call] | None:
        return self.own[self.kind].calls(plan)

    def pack(self, plan: StepPlan) -> tuple[TokenBatch, bool]:
        """Return (batch, whether only the largest logit of each row is needed) for a plan."""
        return self.own[self.kind].pack(plan), plan.only_largest

    def __call__(self, batch: tuple[TokenBatch, bool], layers: tuple[int, ...] = ()) -> Tensor:
        packed, only_largest = batch
        # Pickling arrays takes a tenth of the time of pickling tensors.
        arrays = map_fields(vars(packed), Tensor, lambda tensor: tensor.cpu().numpy())
        how = self.kind, only_largest
        return self.own.model.ranks.lead(FORWARD, (self.number, arrays, *how), lambda: self.own.compute(packed, *how))


class RankPrograms(dict[str, StepProgram]):
    """The programs of this rank by kind, built on first use, for its model shard and its pages.

    Programs are never reset: a change of modules on one rank does not reach the other ranks.
    """

    def __init__(self, model: TensorParallelTransformer, store: KVStore):
        super().__init__()
        self.model, self.store = model, store

    def __missing__(self, kind: str) -> StepProgram:
        build: type[StepProgram] = RankRows if kind == ROWS else EagerProgram
        if kind != ROWS and self.model.backend is Backend.INDUCTOR:
            from workbench.tensor_parallel.graphs import RankGraphs  # it registers an operator, in 25 ms

            build = RankGraphs
        self[kind] = program = build(self.model, self.store)
        return program

    def compute(self, batch: TokenBatch, kind: str, only_largest: bool) -> Tensor:
        """Compute a batch on this rank by its program of `kind`, and record the batch in the digest that rank 0
        compares.
        """
        self.model.ranks.record(batch_tensors(batch))
        self.model.only_largest = only_largest
        return self[kind](batch)


def build_rank_runner(
    model: TensorParallelTransformer, store: TensorParallelStore, threads: int, backends: Backends,
    batch_invariant: bool = False,
) -> StepRunner:  # fmt: skip
    """Return rank 0's step runner, whose programs lead all ranks. Interrupts are deferred to the end of a step, since
    an interrupt within a step would desynchronize the ranks.

    Args:
        model: rank 0's shard.
        store: rank 0's pages.
        threads: number of threads of rank 0 during a step.
        backends: the model's backends: steps of few tokens are computed as rows if the backends support it.
        batch_invariant: compute every step as rows.
    """
    own, max_rows = RankPrograms(model, store), math.inf if batch_invariant else MAX_TOKEN_PARALLEL_TOKENS
    rows = [LeadProgram(ROWS, own, store, max_rows)] if batch_invariant or backends.has_step else []
    return StepRunner(*rows, LeadProgram(BLOCKS, own, store), within=lambda: _whole_step(threads))


def memory_of_ranks(model: TensorParallelTransformer, store: TensorParallelStore) -> list[tuple[int, int]]:
    """Return (bytes of weights, bytes of pages) for each rank."""
    found = model.ranks.lead(MEMORY, store.number, lambda: gather_memory(model, store))
    return [(weights, pages) for weights, pages in found.tolist()]


def gather_memory(model: TensorParallelTransformer, store: KVStore) -> Tensor:
    """Return on rank 0 the sizes in bytes of the weights and pages of each rank, [rank, 2]; shared storage
    counts once.
    """
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    return model.ranks.gather(torch.tensor([sum(storages.values()), store.bytes]))


def from_arrays(values: Mapping[str, Any], device: torch.device) -> TokenBatch:
    """Return the batch, on `device`, that rank 0 sent as a mapping of its fields with numpy arrays for tensors."""
    return TokenBatch(**map_fields(values, np.ndarray, lambda array: torch.from_numpy(array).to(device)))


def tasks_of(
    model: Callable[[], TensorParallelTransformer], open_store: Callable[..., KVStore]
) -> dict[str, Callable[[Any], None]]:
    """Return, by task name, the functions by which a rank other than 0 executes tasks. Loading, which creates `model`,
    is not among them.
    """
    stores: dict[int, KVStore] = {}
    programs: dict[int, RankPrograms] = {}

    def open_cache(content: tuple[int, tuple[Any, ...], list[int]]) -> None:
        number, layout, unused = content
        for each in unused:
            stores.pop(each, None)
            programs.pop(each, None)
        stores[number] = open_store(*layout)

    def forward(content: tuple[int, Mapping[str, Any], str, bool]) -> None:
        number, values, mode, only_largest = content
        if number not in programs:
            programs[number] = RankPrograms(model(), stores[number])
        with THREADS.step(model().device):
            programs[number].compute(from_arrays(values, model().device), mode, only_largest)

    return {
        OPEN_CACHE: open_cache,
        FORWARD: forward,
        ZERO_PAGES: lambda content: stores[content[0]].zero_pages(*content[1:]),
        MEMORY: lambda number: _discard(gather_memory(model(), stores[number])),
        COPY_PAGES: lambda content: stores[content[0]].copy_pages(*content[1:]),
    }


def _discard(found: Tensor) -> None:
    """Discard the result: rank 0 has it."""


@contextmanager
def _whole_step(threads: int) -> Iterator[None]:
    """Run a step on `threads` threads, with interrupts deferred."""
    before = torch.get_num_threads()
    with DeferInterrupts():
        torch.set_num_threads(threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)
