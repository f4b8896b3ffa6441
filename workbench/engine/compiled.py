"""How a step is carried out on a lane: as it stands, or compiled in buckets.

Under `inductor` the unit of compilation is a block: all layers of a kind share one graph, weights are its
inputs. A batch of decodes is padded to a bucket of rows and runs as one graph a block; in any other batch
the two sides of the attention are compiled once, with a symbolic number of rows, and attention walks the
spans between them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from compiled_kernels import Lane
from workbench.batch import TokenBatch
from workbench.cache.store import DenseLayer, KVStore
from workbench.engine.packing import pack
from workbench.engine.plan import StepPlan
from workbench.model.layers import Block
from workbench.model.transformer import Transformer

DECODE_BUCKETS = (1, 2, 4, 8, 16, 32, 64)
MOST_GRAPHS = 512  # of one function, in one process


def bucket_for(rows: int) -> int:
    """The smallest bucket that holds `rows`; beyond the last, multiples of it."""
    last = DECODE_BUCKETS[-1]
    return next((size for size in DECODE_BUCKETS if size >= rows), -(-rows // last) * last)


class EagerExecutor:
    """Runs the modules as written."""

    compiles = 0

    def __init__(self, model: Transformer, store: KVStore):
        self.model, self.store = model, store

    def forward(self, plan: StepPlan) -> Tensor:
        """Logits of the plan's sampled rows, in the order of its spans: [sample, vocab]."""
        return _settled(self.model(pack(plan, self.store.page_size, self.model.device), self.store))


class CompiledExecutor:
    """Runs blocks that Inductor compiled; `compiles` counts the graphs since it was made."""

    def __init__(self, model: Transformer, store: KVStore):
        self.model, self.store = model, store
        self._before_this = _graphs.count
        self._block = _compiled(Block.forward, dynamic=False)
        self._before = _compiled(Block.before, dynamic=True)
        self._after = _compiled(Block.after, dynamic=True)
        self._head = _compiled(Transformer.logits_of, dynamic=False)
        for layer in store.layers:
            for pages in (layer.keys, layer.values):
                torch._dynamo.mark_dynamic(pages, 0)  # the pool's size is no reason to compile again

    @property
    def compiles(self) -> int:
        return _graphs.count - self._before_this

    def forward(self, plan: StepPlan) -> Tensor:
        decode_only = all(span.length == 1 for span in plan.spans)
        rows = bucket_for(len(plan.spans)) if decode_only else None
        batch = pack(plan, self.store.page_size, self.model.device, rows)
        for table in batch.page_tables:
            torch._dynamo.mark_dynamic(table, 1)
        with torch.inference_mode():
            x = self.model.hidden(batch, self.store, self._block if decode_only else self._mixed)
            samples = len(batch.sample_rows)
            wanted = torch.zeros(bucket_for(samples), dtype=torch.long, device=x.device)
            wanted[:samples] = batch.sample_rows
            return _settled(self._head(self.model, x[wanted])[:samples])

    def _mixed(
        self, block: Block, x: Tensor, cos: Tensor, sin: Tensor, batch: TokenBatch, cache: DenseLayer
    ) -> Tensor:
        q, k, v = self._before(block, x, cos, sin)
        cache.write(k, v, batch)
        return self._after(block, x, block.attention.read(q, batch, cache))


class _Graphs:
    """The backend: Inductor, and a count of the graphs it was given."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable:
        from torch._inductor.compile_fx import compile_fx  # imports the whole compiler: only when used

        self.count += 1
        return cast(Callable, compile_fx(graph, inputs))


_graphs = _Graphs()


@functools.cache
def _compiled(function: Callable, dynamic: bool) -> Callable:
    """`function` compiled, once for the whole process: runners of models alike share what is compiled."""
    config = torch._dynamo.config
    # Every bucket of rows and every kind of block is one more entry for the same code.
    config.recompile_limit = max(config.recompile_limit, MOST_GRAPHS)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, MOST_GRAPHS)
    return torch.compile(function, backend=_graphs, dynamic=dynamic, fullgraph=True)


def _settled(logits: Tensor) -> Tensor:
    """`logits`, computed and not merely queued: a step's time is the device's, not the queue's."""
    if logits.is_cuda:
        torch.cuda.synchronize(logits.device)
    return logits


def executor_for(model: Transformer, store: KVStore) -> EagerExecutor | CompiledExecutor:
    return CompiledExecutor(model, store) if model.lane is Lane.INDUCTOR else EagerExecutor(model, store)
