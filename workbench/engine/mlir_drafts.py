"""Tokens of a small model, several in one call of compiled code (backend mlir)."""

from __future__ import annotations

from collections.abc import Sequence as Many

import torch
from torch import Tensor

from compiled_kernels.decode_step import DecodeSteps
from workbench.cache.store import KVStore
from workbench.engine.buckets import bucket_for
from workbench.engine.contention import StepThreads
from workbench.engine.draft_model import Drawing
from workbench.engine.mlir_step import check_mlir_step, step_shape, step_tensors
from workbench.model.transformer import Transformer
from workbench.request import Sequence


class CompiledDraftSteps:
    """`most` steps at once, by bucket of rows, over a model's own weights and a store's own pages. A row's tokens end
    before the first whose probability is below `confidence_threshold`, and the steps where all rows' have ended."""

    def __init__(self, model: Transformer, store: KVStore, max_steps: int, confidence_threshold: float = 0.0):
        self.model, self.store, self.max_steps = model, store, max_steps
        self.confidence_threshold = confidence_threshold
        self._steps: dict[tuple[int, bool], DecodeSteps] = {}
        self._threads = StepThreads()

    @staticmethod
    def unsupported_reason(model: Transformer, store: KVStore) -> str | None:
        """Return why a model with a compiled decode step has no such call; None if it has one."""
        if model.embedding is None or model.spec.embedding_scale != 1:
            return "its embedding is quantized or scaled"
        if any(shape.format.quantized for shape in store.specs):
            return "its cache is quantized: tokens are quantized between steps"
        return None

    def __call__(
        self, sequences: Many[Sequence], steps: int, known: Many[Many[int]], draws: Many[Drawing | None]
    ) -> tuple[list[list[int]], Tensor]:
        """As `Several`; a token that is `known` ends no row."""
        bucket = self._of(bucket_for(len(sequences)), self.confidence_threshold > 0 or any(draws))
        count = len(sequences)
        forced = [[row[step] if step < len(row) else -1 for row in known] for step in range(steps)]
        bucket.forced_tokens.numpy()[:steps, :count] = forced
        bucket.ids.numpy()[:count] = [own.token_ids[own.num_computed_tokens] for own in sequences]
        lengths = bucket.lengths.numpy()
        lengths[:count] = [own.num_computed_tokens + 1 for own in sequences]
        lengths[count:] = 1
        for group, table in enumerate(bucket.tables):
            rows = table.numpy()
            rows[count:] = 0
            for row, own in enumerate(sequences):
                pages = own.pages[group]
                rows[row, : len(pages)] = pages
                rows[row, len(pages) :] = 0
        if bucket.weighs:  # always on as many threads: sums of shares, by which tokens are drawn, hang on the number
            self._weigh(bucket, steps, draws)
            bucket(steps)
        else:
            self._threads.run(f"drafts {bucket.shape.rows}", lambda threads: bucket(steps, threads), steps)
        chosen = bucket.next_tokens.numpy()[:steps, :count].T.tolist()
        if bucket.weighs:
            chosen = [row[:kept] for row, kept in zip(chosen, bucket.kept.tolist(), strict=False)]
        return chosen, bucket.all_logits

    def _weigh(self, bucket: DecodeSteps, steps: int, draws: Many[Drawing | None]) -> None:
        """Say how each row's tokens are drawn, and that all of them are wanted."""
        kept, scale, uniforms = (part.numpy() for part in (bucket.kept, bucket.scale, bucket.uniforms))
        kept[: len(draws)], kept[len(draws) :] = steps, 0
        uniforms[:steps], scale[:] = -1, 1
        for row, drawing in enumerate(draws):
            if drawing is not None:
                scale[row] = 1 / drawing.temperature
                uniforms[:steps, row] = drawing.uniforms

    def _of(self, rows: int, weigh: bool) -> DecodeSteps:
        if (rows, weigh) not in self._steps:
            model, context = self.model, self.model.spec.max_position_embeddings
            check_mlir_step(model, self.store)
            shape = step_shape(model, self.store.page_size, rows, self.store.specs)
            tensors = step_tensors(model, self.store)
            assert model.embedding is not None
            tensors["embedding"] = model.embedding.weight
            for turn in shape.rotary_dims:
                cos, sin = model.rotary[turn](torch.arange(context))
                tensors |= {f"all_cos_{turn}": cos.float().contiguous(), f"all_sin_{turn}": sin.float().contiguous()}
            self._steps[rows, weigh] = found = DecodeSteps(shape, tensors, self.max_steps, context, weigh)
            if weigh:
                found.threshold[0] = self.confidence_threshold
        return self._steps[rows, weigh]
