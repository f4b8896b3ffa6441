"""Compute steps and move pages on all ranks: rank 0 posts, and computes its own share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from types import MappingProxyType
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from workbench.batch import TokenBatch
from workbench.executors.packing import pack_batch
from workbench.interrupts import DeferInterrupts
from workbench.kv_cache.format import KVCacheSpec
from workbench.kv_cache.store import KVStore
from workbench.scheduler.plan import StepPlan
from workbench.tensor_parallel.ranks import RankFailed, Ranks
from workbench.tensor_parallel.transformer import TensorParallelTransformer

FORWARD, OPEN_CACHE, ZERO_PAGES, COPY_PAGES = "forward", "open_cache", "zero_pages", "copy_pages"


class TensorParallelStore(KVStore):
    """Rank 0's pages. What is done to a page is done on all ranks, whose stores have the same pages."""

    def __init__(
        self, ranks: Ranks, specs: Iterable[KVCacheSpec], num_pages: tuple[int, ...], page_size: int, dtype: torch.dtype
    ):
        self.ranks, specs = ranks, tuple(specs)
        layout = num_pages, page_size, str(dtype).removeprefix("torch."), repr(specs)
        ranks.lead(OPEN_CACHE, layout, lambda: KVStore.__init__(self, specs, num_pages, page_size, dtype))

    def zero_pages(self, group: int, pages: Iterable[int]) -> None:
        """Zero `pages` of a cache group on all ranks; on rank 0 alone once another has died: none is computed then."""
        pages = list(pages)
        try:
            self.ranks.lead(ZERO_PAGES, (group, pages), lambda: KVStore.zero_pages(self, group, pages))
        except RankFailed:
            super().zero_pages(group, pages)

    def copy_pages(self, group: int, sources: list[int], targets: list[int]) -> None:
        """Copy each page of `sources` to the page beside it in `targets`, on all ranks."""
        content = group, sources, targets
        self.ranks.lead(COPY_PAGES, content, lambda: KVStore.copy_pages(self, *content))


class TensorParallelExecutor:
    """Run the modules as written, on all ranks. A step is not interrupted half-way: the ranks would part."""

    compiles = 0
    kernel_seconds: float | None = None
    artifacts: Mapping[str, str] = MappingProxyType({})

    def __init__(self, model: TensorParallelTransformer, store: KVStore, threads: int):
        """Create the executor; `threads` are rank 0's while it computes."""
        self.model, self.store, self.threads = model, store, threads

    def forward(self, plan: StepPlan) -> Tensor:
        """Return logits as `Executor` does."""
        rows = len(plan.spans) + plan.padding_rows if plan.padding_rows else None
        batch = pack_batch(plan, self.store.page_size, self.model.device, rows)
        with DeferInterrupts(), _threads(self.threads):
            logits = self.model.ranks.lead(FORWARD, to_arrays(batch), lambda: self._compute(batch))
        self.model.count_experts(plan.num_tokens)
        return logits

    def _compute(self, batch: TokenBatch) -> Tensor:
        return compute(self.model, self.store, batch)


def compute(model: TensorParallelTransformer, store: KVStore, batch: TokenBatch) -> Tensor:
    """Compute a batch on this rank, and note what it was."""
    model.ranks.record(batch_tensors(batch))
    return model(batch, store)


def batch_tensors(batch: TokenBatch) -> Iterator[Tensor]:
    """Yield the tensors of a batch."""
    for field in fields(batch):
        value = getattr(batch, field.name)
        yield from (each for each in (value if isinstance(value, tuple) else (value,)) if isinstance(each, Tensor))


def to_arrays(batch: TokenBatch) -> dict[str, Any]:
    """Return a batch's fields with arrays for tensors: they are pickled in a tenth of the time."""

    def convert(value: Any) -> Any:
        return tuple(map(convert, value)) if isinstance(value, tuple) else getattr(value, "numpy", lambda: value)()

    return {field.name: convert(getattr(batch, field.name)) for field in fields(batch)}


def from_arrays(values: Mapping[str, Any]) -> TokenBatch:
    """Return the batch of `to_arrays`."""

    def convert(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(convert, value))
        return torch.from_numpy(value) if isinstance(value, np.ndarray) else value

    return TokenBatch(**{name: convert(value) for name, value in values.items()})


def tasks_of(
    model: Callable[[], TensorParallelTransformer], open_store: Callable[..., KVStore]
) -> dict[str, Callable[[Any], None]]:
    """Return what a rank other than 0 does for each task but loading, which makes its `model`."""
    opened: list[KVStore] = []

    def store() -> KVStore:
        return cast(KVStore, opened[0])

    return {
        OPEN_CACHE: lambda layout: opened.__setitem__(slice(None), [open_store(*layout)]),
        FORWARD: lambda values: _discard(compute(model(), store(), from_arrays(values))),
        ZERO_PAGES: lambda content: store().zero_pages(*content),
        COPY_PAGES: lambda content: store().copy_pages(*content),
    }


def _discard(logits: Tensor) -> None:
    """Keep nothing: rank 0 has the logits."""


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
