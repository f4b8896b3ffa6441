"""Run decode steps on CUDA as graphs, captured once per bucket and replayed without separate kernel launches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from workbench.batch import TokenBatch
from workbench.executors.packing import batch_tensors, bucket_for, map_fields, pack_batch
from workbench.executors.programs.kernels import AS_WRITTEN, StepKernels, as_written
from workbench.executors.programs.program import StepProgram
from workbench.kv_cache.pages import NULL_PAGE
from workbench.kv_cache.store import KVStore
from workbench.model.transformer import Transformer
from workbench.scheduler.plan import StepPlan

StepFunction = Callable[[], Tensor]
CPU = torch.device("cpu")


def capture_cuda_graph(step: StepFunction) -> StepFunction:
    """Capture `step` as a graph; each call of the result replays it on the current contents of the inputs' memory."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):  # before the capture, kernels are compiled and libraries choose algorithms
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = step()

    def replay() -> Tensor:
        graph.replay()
        return logits

    return replay


class CudaGraphProgram(StepProgram):
    """A program that replays decodes as CUDA graphs, one for each number of rows and page table width, both rounded
    up.
    """

    kind = "decode"
    resets = every_row = True
    untimed = "captured as one CUDA graph: its kernels are not called one by one"

    def __init__(
        self, model: Transformer, store: KVStore, capture: Callable[[StepFunction], StepFunction] = capture_cuda_graph
    ):
        super().__init__(model, store)
        self._capture = capture
        self.reset()

    def reset(self) -> None:
        self._graphs: dict[tuple[int, int], tuple[tuple[Tensor, ...], StepFunction]] = {}

    def accept(self, plan: StepPlan) -> StepPlan | None:
        rows = plan.as_decode_rows(self.store.residual_length)
        return rows if rows.decode_only and not plan.layers else None

    def pack(self, plan: StepPlan) -> TokenBatch:
        rows = bucket_for(len(plan.spans) + plan.padding_rows)
        return pack_batch(plan, self.store.page_size, CPU, rows)

    def __call__(self, batch: TokenBatch, layers: tuple[int, ...] = ()) -> Tensor:
        self.store.quantize_pending(batch)  # by lengths known in Python, so the graph needs no synchronization
        return self._step(_widened(batch))()

    def kernels(self, length: int) -> StepKernels:
        return as_written(str(self.model.backend), f"{AS_WRITTEN}; all are captured as one CUDA graph")

    def _step(self, batch: TokenBatch) -> StepFunction:
        """Return the captured step of this size, with its inputs filled from `batch`."""
        key = (batch.num_tokens, batch.page_tables[0].shape[1])
        if key not in self._graphs:
            copied = map_fields(vars(batch), Tensor, lambda tensor: tensor.to(self.model.device, copy=True))
            held = TokenBatch(**copied)
            replay = self._capture(lambda: self.model(held, self.store))
            self._graphs[key] = tuple(batch_tensors(held)), replay
            self.made += 1
        inputs, replay = self._graphs[key]
        for mine, given in zip(inputs, batch_tensors(batch), strict=True):
            mine.copy_(given, non_blocking=True)
        return replay


def _widened(batch: TokenBatch) -> TokenBatch:
    """Pad page tables to one width, a power of two; let every row sample, padding included, and quantize nothing."""
    width = 1 << (max(table.shape[1] for table in batch.page_tables) - 1).bit_length()
    tables = tuple(
        torch.nn.functional.pad(table, (0, width - table.shape[1]), value=NULL_PAGE) for table in batch.page_tables
    )
    return replace(batch, page_tables=tables, logits_indices=torch.arange(batch.num_tokens), quantize_on_write=False)
