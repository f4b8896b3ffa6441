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

import torch
from torch import Tensor

from compiled_kernels import Backend
from compiled_kernels.torch_compile import compile_once, graph_count
from workbench.batch import TokenBatch
from workbench.executors.early_layers import LayerTap
from workbench.executors.guards import ModelGuard, compile_key
from workbench.executors.packing import bucket_for, pack_batch, synchronized
from workbench.kv_cache.store import CacheLayer, KVStore
from workbench.model.layers import Angles, TransformerBlock
from workbench.model.transformer import RunBlock, Transformer
from workbench.scheduler.plan import StepPlan


class InductorExecutor:
    """Execute steps with Inductor; `compiles` counts graphs since it was made."""

    kernel_seconds: float | None = None
    artifacts: Mapping[str, str] = MappingProxyType({})

    def __init__(
        self,
        model: Transformer,
        store: KVStore,
        attention_backend: Backend = Backend.INDUCTOR,
        compile_unit: str = "block",
    ):
        """Compile for `model` and `store`.

        Args:
            model: the model.
            store: its KV cache.
            attention_backend: backend of attention in batches that are not of decodes alone, and of decodes over caches
                that no graph can hold.
            compile_unit: `block` or `step`.
        """
        self.model, self.store, self.attention_backend = model, store, attention_backend
        self.compile_unit = compile_unit if all(layer.traceable for layer in store.layers) else "block"
        self._before_this = graph_count()
        self._step = compile_once(_step, dynamic=False)
        self._compile_blocks()
        self.head = compile_once(Transformer.compute_logits, dynamic=False)
        for table in range(len(store.groups)):
            for pages in store.page_tensors(table):
                torch._dynamo.mark_dynamic(pages, 0)  # the pool's size is no reason to compile again

    @property
    def compiles(self) -> int:
        return graph_count() - self._before_this

    def _compile_blocks(self) -> None:
        self._sides = {block: _Sides.from_block(block) for block in self.model.blocks}
        self._watch = ModelGuard(self.model)

    def forward(self, plan: StepPlan) -> Tensor:
        if plan.phase != "decode" and self._watch.changed:
            self._compile_blocks()
        plan = plan.as_decode_rows()
        rows = bucket_for(len(plan.spans) + plan.padding_rows) if plan.decode_only else None
        batch = pack_batch(plan, self.store.page_size, self.model.device, rows)
        self.mark_dynamic(batch)
        with torch.inference_mode():
            if rows is not None and self.compile_unit == "step" and not plan.layers:
                logits = synchronized(self._step(self.model, batch, self.store)[batch.logits_indices])
            else:
                logits = synchronized(self._by_blocks(batch, plan.decode_only, plan.layers))
        self.model.count_experts(plan.num_tokens)
        return logits

    def mark_dynamic(self, batch: TokenBatch) -> None:
        """Let the pages that sequences hold be of any number without compiling again."""
        for table in batch.page_tables:
            torch._dynamo.mark_dynamic(table, 1)

    def _by_blocks(self, batch: TokenBatch, decode_only: bool, layers: tuple[int, ...] = ()) -> Tensor:
        run: RunBlock = self._whole if decode_only else self._mixed
        tap = LayerTap(layers, batch.logits_indices, run) if layers else None
        logits = self.head(self.model, self.sampled_rows(batch, tap or run))[: len(batch.logits_indices)]
        return logits if tap is None else tap.beside(logits)

    def sampled_rows(self, batch: TokenBatch, run: RunBlock) -> Tensor:
        """Return the last block's output for the sampled rows, padded to a bucket of rows: [row, hidden]."""
        x = self.model.hidden_states(batch, self.store, run)
        samples = len(batch.logits_indices)
        wanted = torch.zeros(bucket_for(samples), dtype=torch.long, device=x.device)
        wanted[:samples] = batch.logits_indices
        return x[wanted]

    def _whole(
        self, block: TransformerBlock, x: Tensor, cos: Angles, sin: Angles, batch: TokenBatch, cache: CacheLayer
    ) -> Tensor:
        if not cache.traceable:
            return self._mixed(block, x, cos, sin, batch, cache)
        return self._sides[block].whole(block, x, cos, sin, batch, cache)

    def _mixed(
        self, block: TransformerBlock, x: Tensor, cos: Angles, sin: Angles, batch: TokenBatch, cache: CacheLayer
    ) -> Tensor:
        sides, backend = self._sides[block], self.attention_backend
        projected = sides.before(block, x, cos, sin)
        return sides.after(block, x, block.attention.write_and_read(projected, batch, cache, backend))


@dataclass(frozen=True)
class _Sides:
    """A block compiled whole, and as the two sides of its attention; shared by all blocks of the same structure."""

    whole: Callable[..., Tensor]
    before: Callable[..., tuple[Tensor, ...]]
    after: Callable[..., Tensor]

    @classmethod
    def from_block(cls, block: TransformerBlock) -> _Sides:
        kind, alike = type(block), compile_key(block)
        return cls(
            compile_once(kind.forward, dynamic=False, cache_key=alike),
            compile_once(kind.before_attention, dynamic=True, cache_key=alike),
            compile_once(kind.after_attention, dynamic=True, cache_key=alike),
        )


def _step(model: Transformer, batch: TokenBatch, store: KVStore) -> Tensor:
    """Return logits of every row of a batch of decodes."""
    return model.compute_logits(model.hidden_states(batch, store))
