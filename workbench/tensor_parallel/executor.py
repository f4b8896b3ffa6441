"""Compute steps and move pages on all ranks: rank 0 posts, and computes its own share.

A batch is computed by `blocks`, the modules as written on the operators of their backend or compiled by Inductor (see
graphs.py), or as `rows` of compiled functions (see rows.py).
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from compiled_kernels import Backend
from workbench.batch import TokenBatch
from workbench.executors.base import MAX_TOKEN_PARALLEL_TOKENS
from workbench.executors.packing import bucket_for, pack_batch
from workbench.executors.select import Backends
from workbench.executors.thread_waiting import THREADS
from workbench.interrupts import DeferInterrupts
from workbench.kv_cache.format import KVCacheSpec
from workbench.kv_cache.store import KVStore
from workbench.scheduler.plan import StepPlan
from workbench.tensor_parallel.graphs import RankGraphs
from workbench.tensor_parallel.ranks import RankFailed, Ranks
from workbench.tensor_parallel.rows import RankRows
from workbench.tensor_parallel.transformer import TensorParallelTransformer

STORE_NUMBERS = itertools.count()
FORWARD, OPEN_CACHE, ZERO_PAGES, COPY_PAGES = "forward", "open_cache", "zero_pages", "copy_pages"
MEMORY = "memory"
ZERO_ATTEMPTS = 2  # at zeroing pages on all ranks, before they are given up
BLOCKS, ROWS = "blocks", "rows"  # how a batch is computed


class TensorParallelStore(KVStore):
    """Rank 0's pages. What is done to a page is done on all ranks, whose stores have the same pages.

    `number` tells a model's stores apart: two runners may share one model.
    """

    def __init__(
        self, ranks: Ranks, specs: Iterable[KVCacheSpec], num_pages: tuple[int, ...], page_size: int,
        dtype: torch.dtype, device: str = "cpu",
    ):  # fmt: skip
        self.ranks, specs, self.number = ranks, tuple(specs), next(STORE_NUMBERS)
        layout = num_pages, page_size, str(dtype).removeprefix("torch."), repr(specs)
        unused, ranks.unused_stores[:] = list(ranks.unused_stores), []  # one list: stores that live append to it
        content = self.number, layout, unused
        ranks.lead(OPEN_CACHE, content, lambda: KVStore.__init__(self, specs, num_pages, page_size, dtype, device))

        weakref.finalize(self, ranks.unused_stores.append, self.number)

    def zero_pages(self, group: int, pages: Iterable[int]) -> None:
        """Zero `pages` of a cache group on all ranks; on rank 0 alone once the ranks are broken: none computes then.

        A rank that cannot zero its pages breaks them: what it computes from old contents no digest would tell.
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
        """Copy each page of `sources` to the page beside it in `targets`, on all ranks."""
        content = group, sources, targets
        self._lead(COPY_PAGES, content, lambda: KVStore.copy_pages(self, *content))

    def _lead(self, kind: str, content: tuple[Any, ...], compute: Callable[[], None]) -> None:
        with DeferInterrupts():  # an interrupt half-way would part the ranks
            self.ranks.lead(kind, (self.number, *content), compute)


class TensorParallelExecutor:
    """Run steps on all ranks. A step is not interrupted half-way: the ranks would part."""

    kernel_seconds: float | None = None

    def __init__(
        self, model: TensorParallelTransformer, store: TensorParallelStore, threads: int, backends: Backends,
        batch_invariant: bool = False,
    ):  # fmt: skip
        """Create the executor.

        Args:
            model: rank 0's shard.
            store: rank 0's pages.
            threads: rank 0's while it computes.
            backends: the model's: steps of few tokens are computed as rows where they have such.
            batch_invariant: compute every step as rows.
        """
        self.model, self.store, self.threads = model, store, threads
        self.max_rows = math.inf if batch_invariant else MAX_TOKEN_PARALLEL_TOKENS * backends.has_step
        self.own = RankExecutor(model, store)

    @property
    def compiles(self) -> int:
        return self.own.compiles

    @property
    def artifacts(self) -> Mapping[str, str]:
        return self.own.artifacts

    def forward(self, plan: StepPlan) -> Tensor:
        """Return logits as `Executor` does."""
        with DeferInterrupts(), _threads(self.threads):
            if plan.num_tokens <= self.max_rows:
                return self._by_rows(plan)
            if self.model.backend is Backend.INDUCTOR:
                plan = plan.as_decode_rows()
            count = len(plan.spans) + plan.padding_rows
            compiled = self.model.backend is Backend.INDUCTOR and plan.decode_only
            rows = bucket_for(count) if compiled else count if plan.padding_rows else None
            batch = pack_batch(plan, self.store.page_size, self.model.device, rows)
            logits = self._lead(batch, BLOCKS, plan.only_largest)
        self.model.count_experts(plan.num_tokens)
        return logits

    def _by_rows(self, plan: StepPlan) -> Tensor:
        """Compute a plan call by call: a call has the next tokens of each sequence, and a sequence's go in order."""
        counts = [span.num_logits for span in plan.spans]
        next_rows, whole = [0, *itertools.accumulate(counts)], torch.empty(0)
        for number, (indices, spans) in enumerate(self.own.rows.calls(plan)):
            batch = pack_batch(replace(plan, spans=spans), self.store.page_size, self.model.device)
            logits = self._lead(batch, ROWS, plan.only_largest)
            if number == 0:  # a call with all logits has them in order: they are not copied
                whole = logits if len(logits) == sum(counts) else logits.new_empty((sum(counts), logits.shape[1]))
            for index, rows in zip(indices, logits.split([span.num_logits for span in spans]), strict=True):
                if len(rows) and whole is not logits:  # the first call's own tensor is never written to
                    whole[next_rows[index] : next_rows[index] + len(rows)] = rows
                next_rows[index] += len(rows)
        return whole

    def _lead(self, batch: TokenBatch, mode: str, only_largest: bool) -> Tensor:
        content = self.store.number, to_arrays(batch), mode, only_largest
        return self.model.ranks.lead(FORWARD, content, lambda: self.own.compute(batch, mode, only_largest))

    def memory_of_ranks(self) -> list[tuple[int, int]]:
        """Return the bytes of each rank's weights and of its pages, as they lie in its process."""
        found = self.model.ranks.lead(MEMORY, self.store.number, lambda: gather_memory(self.model, self.store))
        return [(weights, pages) for weights, pages in found.tolist()]


class RankExecutor:
    """Compute batches on this rank: its shard of a model, over its pages."""

    def __init__(self, model: TensorParallelTransformer, store: KVStore):
        self.model, self.store = model, store

    def compute(self, batch: TokenBatch, mode: str, only_largest: bool) -> Tensor:
        """Compute a batch on this rank, and note what it was."""
        self.model.ranks.record(batch_tensors(batch))
        self.model.only_largest = only_largest
        if mode == ROWS:
            return self.rows.compute(batch)
        return self.graphs.compute(batch) if self.model.backend is Backend.INDUCTOR else self.model(batch, self.store)

    @cached_property
    def graphs(self) -> RankGraphs:
        return RankGraphs(self.model, self.store)

    @cached_property
    def rows(self) -> RankRows:
        return RankRows(self.model, self.store)

    @property
    def compiles(self) -> int:
        return sum(each.compiles for each in self._compiled)

    @property
    def artifacts(self) -> Mapping[str, str]:
        return {name: digest for each in self._compiled for name, digest in each.artifacts.items()}

    @property
    def _compiled(self) -> list[RankRows | RankGraphs]:
        """Return those that have been used."""
        return [each for name in ("rows", "graphs") if (each := vars(self).get(name)) is not None]


def gather_memory(model: TensorParallelTransformer, store: KVStore) -> Tensor:
    """Return on rank 0 the bytes of weights and pages of each rank, [rank, 2]; storages are counted, not views."""
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    return model.ranks.gather(torch.tensor([sum(storages.values()), store.bytes]))


def batch_tensors(batch: TokenBatch) -> Iterator[Tensor]:
    """Yield the tensors of a batch."""
    for field in fields(batch):
        value = getattr(batch, field.name)
        yield from (each for each in (value if isinstance(value, tuple) else (value,)) if isinstance(each, Tensor))


def to_arrays(batch: TokenBatch) -> dict[str, Any]:
    """Return a batch's fields with arrays for tensors: they are pickled in a tenth of the time."""

    def convert(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(convert, value))
        return value.cpu().numpy() if isinstance(value, Tensor) else value

    return {field.name: convert(getattr(batch, field.name)) for field in fields(batch)}


def from_arrays(values: Mapping[str, Any], device: torch.device) -> TokenBatch:
    """Return the batch of `to_arrays`, on `device`."""

    def convert(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(convert, value))
        return torch.from_numpy(value).to(device) if isinstance(value, np.ndarray) else value

    return TokenBatch(**{name: convert(value) for name, value in values.items()})


def tasks_of(
    model: Callable[[], TensorParallelTransformer], open_store: Callable[..., KVStore]
) -> dict[str, Callable[[Any], None]]:
    """Return what a rank other than 0 does for each task but loading, which makes its `model`."""
    stores: dict[int, KVStore] = {}
    executors: dict[int, RankExecutor] = {}

    def open_cache(content: tuple[int, tuple[Any, ...], list[int]]) -> None:
        number, layout, unused = content
        for each in unused:
            stores.pop(each, None)
            executors.pop(each, None)
        stores[number] = open_store(*layout)

    def forward(content: tuple[int, Mapping[str, Any], str, bool]) -> None:
        number, values, mode, only_largest = content
        if number not in executors:
            executors[number] = RankExecutor(model(), stores[number])
        with THREADS.step(model().device):
            executors[number].compute(from_arrays(values, model().device), mode, only_largest)

    return {
        OPEN_CACHE: open_cache,
        FORWARD: forward,
        ZERO_PAGES: lambda content: stores[content[0]].zero_pages(*content[1:]),
        MEMORY: lambda number: _discard(gather_memory(model(), stores[number])),
        COPY_PAGES: lambda content: stores[content[0]].copy_pages(*content[1:]),
    }


def _discard(found: Tensor) -> None:
    """Keep nothing: rank 0 has it."""


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
