"""Compile steps with torch.compile (the backend `inductor`).

The unit of compilation is a block or a whole step. With blocks, all layers of a kind share one graph with weights as
inputs, which compiles quickly. A whole step is one graph: fewer calls, but a long compilation. In both cases a batch of
decodes is padded to a bucket of rows. For other batches the parts of a block before and after attention are compiled
once, with a symbolic number of rows, and attention runs span by span between them.

A block that was changed in place (for example its mask) is compiled again; prefill steps check for such changes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from compiled_kernels import Backend
from compiled_kernels.torch_compile import compile_once, graph_count
from workbench.batch import TokenBatch
from workbench.executors.early_layers import LayerTap
from workbench.executors.guards import compile_key
from workbench.executors.packing import bucket_for
from workbench.executors.programs.kernels import StepKernels, one_function, two_sides
from workbench.executors.programs.operators import COMPILED, limits_of_backend
from workbench.executors.programs.program import StepProgram, Timed
from workbench.executors.requirements import Supports
from workbench.kv_cache.layer import CacheLayer
from workbench.kv_cache.store import KVStore
from workbench.model.layers import TransformerBlock
from workbench.model.mixer import Angles
from workbench.model.transformer import RunBlock, Transformer
from workbench.scheduler.plan import StepPlan

TWO_SUMS = "two sums over ranks in its graph could change places"
supports = Supports({
    **limits_of_backend(Backend.INDUCTOR), **COMPILED,
    "parallel attention and feed-forward on several ranks": TWO_SUMS,
    "norms over all heads on several ranks": TWO_SUMS,
    "custom part that torch.compile cannot trace": "it is compiled into the attention",
})  # fmt: skip


class InductorProgram(StepProgram):
    """A program that computes batches with Inductor; `made` is the number of graphs compiled so far."""

    resets = True

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
            attention_backend: backend of attention in batches with prefills, and in decodes over caches that cannot be
                part of a graph.
            compile_unit: `block` or `step`.
        """
        super().__init__(model, store)
        self.attention_backend, self._traceable = attention_backend, all(layer.traceable for layer in store.layers)
        self.compile_unit = compile_unit if self._traceable else "block"
        self._before_this = graph_count()
        self._sides: dict[TransformerBlock, _Sides] = {}  # filled at the first call: importing Dynamo takes seconds

    @property
    def made(self) -> int:  # type: ignore[override] (counted in one place for the whole process)
        return graph_count() - self._before_this

    def reset(self) -> None:
        self._sides = {}

    def _compile(self) -> None:
        self._step = compile_once(_step, dynamic=False)
        self._sides = {block: _Sides.from_block(block) for block in self.model.blocks}
        self.head = compile_once(Transformer.compute_logits, dynamic=False)
        for table in range(len(self.store.groups)):
            for pages in self.store.page_tensors(table):
                torch._dynamo.mark_dynamic(pages, 0)  # another pool size must not cause a recompilation

    def accept(self, plan: StepPlan) -> StepPlan:
        return plan.as_decode_rows()

    def rows_of(self, plan: StepPlan) -> int | None:
        return bucket_for(len(plan.spans) + plan.padding_rows) if plan.decode_only else None

    def __call__(self, batch: TokenBatch, layers: tuple[int, ...] = ()) -> Tensor:
        self.prepare(batch)
        with torch.inference_mode():
            if batch.decode_only and self.compile_unit == "step" and not layers:
                return self._step(self.model, batch, self.store)[batch.logits_indices]
            run: RunBlock = self._whole if batch.decode_only else self._mixed
            tap = LayerTap(layers, batch.logits_indices, run) if layers else None
            logits = self.head(self.model, self.sampled_rows(batch, tap or run))[: len(batch.logits_indices)]
            return logits if tap is None else tap.beside(logits)

    def prepare(self, batch: TokenBatch) -> None:
        """Create the compiled functions if needed, and mark the number of pages as dynamic, so that it causes no
        recompilation.
        """
        if not self._sides:
            self._compile()
        for table in batch.page_tables:
            torch._dynamo.mark_dynamic(table, 1)

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

    def kernels(self, length: int) -> StepKernels:
        attention = str(self.attention_backend)
        if length > 1:
            walks = "a graph for each side of a block's attention, which walks the spans between them"
            return two_sides(f"inductor: {walks}", "inductor", attention)
        if self.compile_unit == "step":
            return one_function("inductor: the step is one graph", "whole step", "inductor", "embed")
        if not self._traceable:
            sides = "a graph for each side of a block's attention; no graph can hold this cache"
            return two_sides(f"inductor: {sides}", "inductor", attention)
        return one_function("inductor: each block is one graph", "block {layer}", "inductor")

    def time_functions(self, timed: Timed, tokens: int) -> None:
        self._compile()
        self.head = timed(self.head, "head")
        self._step = timed(self._step, "whole step")
        for layer, (block, sides) in enumerate(tuple(self._sides.items())):
            self._sides[block] = replace(
                sides,
                whole=timed(sides.whole, f"block {layer}"),
                before=timed(sides.before, f"before attention {layer}"),
                after=timed(sides.after, f"after attention {layer}"),
            )


@dataclass(frozen=True)
class _Sides:
    """A block compiled as a whole, and as two parts before and after attention; shared by all blocks of the same
    structure.
    """

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
