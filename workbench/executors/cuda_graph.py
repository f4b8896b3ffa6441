"""Run decode steps on CUDA as graphs, captured once per bucket and replayed without a launch of each kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import cast

import torch
from torch import Tensor

from workbench.batch import TokenBatch
from workbench.executors.early_layers import LayerTap
from workbench.executors.guards import ModelGuard
from workbench.executors.packing import bucket_for, pack_batch, synchronized
from workbench.kv_cache.pages import NULL_PAGE
from workbench.kv_cache.store import KVStore
from workbench.model.transformer import Transformer
from workbench.scheduler.plan import StepPlan

StepFunction = Callable[[], Tensor]
CPU = torch.device("cpu")


def capture_cuda_graph(step: StepFunction) -> StepFunction:
    """Capture `step`; each call of the result computes it anew from the present contents of its inputs' memory."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):  # kernels are compiled and libraries choose their algorithms before the capture
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = step()

    def replay() -> Tensor:
        graph.replay()
        return logits

    return replay


class CudaGraphExecutor:
    """Execute decodes as CUDA graphs by rows and page table width, both rounded up; other steps run as written."""

    kernel_seconds: float | None = None
    artifacts: Mapping[str, str] = MappingProxyType({})

    def __init__(
        self, model: Transformer, store: KVStore, capture: Callable[[StepFunction], StepFunction] = capture_cuda_graph
    ):
        self.model, self.store, self._capture = model, store, capture
        self._graphs: dict[tuple[int, int], tuple[TokenBatch, StepFunction]] = {}
        self._made, self._watch = 0, ModelGuard(model)

    @property
    def compiles(self) -> int:
        return self._made

    def forward(self, plan: StepPlan) -> Tensor:
        if plan.phase != "decode" and self._watch.changed:
            self._graphs, self._watch = {}, ModelGuard(self.model)
        plan = plan.as_decode_rows(self.store.residual_length)
        if plan.layers:
            batch = pack_batch(plan, self.store.page_size, self.model.device)
            tap = LayerTap(plan.layers, batch.logits_indices)
            logits = tap.beside(self.model(batch, self.store, tap))
        elif not plan.decode_only:
            logits = self.model(pack_batch(plan, self.store.page_size, self.model.device), self.store)
        else:
            batch = pack_batch(plan, self.store.page_size, CPU, bucket_for(len(plan.spans) + plan.padding_rows))
            self.store.quantize_pending(batch)  # by lengths that Python knows, so that no graph has to
            logits = self._step(_widened(batch))()[: len(plan.spans)]
            sampled = [row for row, span in enumerate(plan.spans) if span.num_logits]
            logits = logits if len(sampled) == len(logits) else logits[sampled]
        logits = synchronized(logits)
        self.model.count_experts(plan.num_tokens)
        return logits

    def _step(self, batch: TokenBatch) -> StepFunction:
        """Return the captured step of this size, with its inputs filled from `batch`."""
        key = (batch.num_tokens, batch.page_tables[0].shape[1])
        if key not in self._graphs:
            held = _moved(batch, self.model.device)
            self._graphs[key] = held, self._capture(lambda: self.model(held, self.store))
            self._made += 1
        held, replay = self._graphs[key]
        for mine, given in zip(_tensors(held), _tensors(batch), strict=True):
            mine.copy_(given, non_blocking=True)
        return replay


def _widened(batch: TokenBatch) -> TokenBatch:
    """Pad page tables to one width, a power of two; let every row sample, padding included, and quantize nothing."""
    width = 1 << (max(table.shape[1] for table in batch.page_tables) - 1).bit_length()
    tables = tuple(
        torch.nn.functional.pad(table, (0, width - table.shape[1]), value=NULL_PAGE) for table in batch.page_tables
    )
    return replace(batch, page_tables=tables, logits_indices=torch.arange(batch.num_tokens), quantize_on_write=False)


def _tensors(batch: TokenBatch) -> tuple[Tensor, ...]:
    return (
        batch.token_ids, batch.positions, batch.span_starts, batch.context_lengths, *batch.page_tables,
        *batch.slot_mapping, batch.logits_indices, cast(Tensor, batch.length_limits),
    )  # fmt: skip


def _moved(batch: TokenBatch, device: torch.device) -> TokenBatch:
    """Copy the batch to `device` for a capture to keep."""
    ids, positions, starts, lengths, *rest = (tensor.to(device, copy=True) for tensor in _tensors(batch))
    count = len(batch.page_tables)
    tables, slots, (samples, limits) = tuple(rest[:count]), tuple(rest[count:-2]), rest[-2:]
    return TokenBatch(
        ids, positions, starts, lengths, tables, slots, samples,
        decode_only=True, length_limits=limits, quantize_on_write=False,
    )  # fmt: skip
