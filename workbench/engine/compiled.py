"""Compile steps with torch.compile (the backend `inductor`).

The unit of compilation is a block, or a whole step. As blocks, all layers of a kind share one graph with weights as its
inputs: quick to compile. A whole step is one graph: fewer calls, long to compile. Either way a batch of decodes is
padded to a bucket of rows. In any other batch the two sides of the attention are compiled once, with a symbolic number
of rows, and attention walks the spans between them.

A block that was changed in place (its mask, say) is compiled again; steps that prefill look for such changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import cast

import torch
from torch import Tensor

from compiled_kernels import Lane
from compiled_kernels.graphs import compiled, graph_count
from workbench.batch import TokenBatch
from workbench.cache.store import KVStore, Layer
from workbench.engine.alike import Watch, structure
from workbench.engine.buckets import bucket_for
from workbench.engine.packing import pack
from workbench.engine.plan import StepPlan
from workbench.model.layers import Angles, Block
from workbench.model.transformer import Transformer


class CompiledExecutor:
    """Execute steps with Inductor; `compiles` counts graphs since it was made."""

    kernel_seconds: float | None = None
    artifacts: Mapping[str, str] = MappingProxyType({})

    def __init__(
        self,
        model: Transformer,
        store: KVStore,
        reads: Lane = Lane.INDUCTOR,
        unit: str = "block",
        decodes: Lane = Lane.INDUCTOR,
    ):
        """Compile for `model` and `store`.

        Args:
            model: the model.
            store: its KV cache.
            attention_backend: backend of attention in batches that are not of decodes alone.
            compile_unit: `block` or `step`.
            decode_backend: backend of attention for decodes over caches that no graph can hold.
        """
        self.model, self.store, self.reads, self.decodes = model, store, reads, decodes
        self.unit = unit if all(layer.traceable for layer in store.layers) else "block"
        self._before_this = graph_count()
        self._step = compiled(_step, dynamic=False)
        self._look()
        self._head = compiled(Transformer.logits_of, dynamic=False)
        for table in range(len(store.tables)):
            for pages in store.paged(table):
                torch._dynamo.mark_dynamic(pages, 0)  # the pool's size is no reason to compile again

    @property
    def compiles(self) -> int:
        return graph_count() - self._before_this

    def _look(self) -> None:
        self._sides = {block: _Sides.of(cast(Block, block)) for block in self.model.blocks}
        self._watch = Watch(self.model)

    def forward(self, plan: StepPlan) -> Tensor:
        if plan.phase != "decode" and self._watch.changed:
            self._look()
        plan = plan.by_rows()
        rows = bucket_for(len(plan.spans) + plan.padding) if plan.decode_only else None
        batch = pack(plan, self.store.page_size, self.model.device, rows)
        for table in batch.page_tables:
            torch._dynamo.mark_dynamic(table, 1)
        with torch.inference_mode():
            if rows is not None and self.unit == "step":
                return settled(self._step(self.model, batch, self.store)[batch.sample_rows])
            return settled(self._by_blocks(batch, plan.decode_only))

    def _by_blocks(self, batch: TokenBatch, decode_only: bool) -> Tensor:
        x = self.model.hidden(batch, self.store, self._whole if decode_only else self._mixed)
        samples = len(batch.sample_rows)
        wanted = torch.zeros(bucket_for(samples), dtype=torch.long, device=x.device)
        wanted[:samples] = batch.sample_rows
        return self._head(self.model, x[wanted])[:samples]

    def _whole(self, block: Block, x: Tensor, cos: Angles, sin: Angles, batch: TokenBatch, cache: Layer) -> Tensor:
        if not cache.traceable:
            return self._mixed(block, x, cos, sin, batch, cache)
        return self._sides[block].whole(block, x, cos, sin, batch, cache)

    def _mixed(self, block: Block, x: Tensor, cos: Angles, sin: Angles, batch: TokenBatch, cache: Layer) -> Tensor:
        sides, lane = self._sides[block], self.decodes if batch.decode_only else self.reads
        q, k, v = sides.before(block, x, cos, sin)
        cache.write(k, v, batch, lane)
        return sides.after(block, x, block.attention.read(q, batch, cache, lane))


@dataclass(frozen=True)
class _Sides:
    """A block compiled whole, and as the two sides of its attention; shared by all blocks of the same structure."""

    whole: Callable[..., Tensor]
    before: Callable[..., tuple[Tensor, Tensor, Tensor]]
    after: Callable[..., Tensor]

    @classmethod
    def of(cls, block: Block) -> _Sides:
        kind, alike = type(block), structure(block)
        return cls(
            compiled(kind.forward, dynamic=False, alike=alike),
            compiled(kind.before, dynamic=True, alike=alike),
            compiled(kind.after, dynamic=True, alike=alike),
        )


def settled(logits: Tensor) -> Tensor:
    """Return `logits` once they are computed, not merely queued, so that a step's time is the device's."""
    if logits.is_cuda:
        torch.cuda.synchronize(logits.device)
    return logits


def _step(model: Transformer, batch: TokenBatch, store: KVStore) -> Tensor:
    """Return logits of every row of a batch of decodes."""
    return model.logits_of(model.hidden(batch, store))
