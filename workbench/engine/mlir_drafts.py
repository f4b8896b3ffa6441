"""Greedy tokens of a small model, several in one call of compiled code (lane mlir)."""

from __future__ import annotations

from collections.abc import Sequence as Many

import torch

from compiled_kernels.decode_step import DecodeSteps
from workbench.cache.store import KVStore
from workbench.engine.buckets import bucket_for
from workbench.engine.contention import StepThreads
from workbench.engine.mlir_step import check_step, step_shape, step_tensors
from workbench.model.transformer import Transformer
from workbench.request import Sequence


class GreedySteps:
    """`most` steps at once, by bucket of rows, over a model's own weights and a store's own pages."""

    def __init__(self, model: Transformer, store: KVStore, most: int):
        self.model, self.store, self.most = model, store, most
        self._steps: dict[int, DecodeSteps] = {}
        self._threads = StepThreads()

    @staticmethod
    def problem(model: Transformer, store: KVStore) -> str | None:
        """Why there can be no such call for a model that the compiled decode step can carry out; None where it can."""
        if model.embedding is None or model.spec.embedding_scale != 1:
            return "its embedding is quantized or scaled"
        if any(shape.format.packed for shape in store.shapes):
            return "its cache is packed: tokens are settled between steps"
        return None

    def __call__(self, sequences: Many[Sequence], steps: int, known: Many[Many[int]]) -> list[list[int]]:
        """What follows each sequence's next token to be computed, and what follows that, `steps` times: by row. The
        first of these are `known`."""
        bucket = self._of(bucket_for(len(sequences)))
        count = len(sequences)
        forced = [[row[step] if step < len(row) else -1 for row in known] for step in range(steps)]
        bucket.known.numpy()[:steps, :count] = forced
        bucket.ids.numpy()[:count] = [own.token_ids[own.computed] for own in sequences]
        lengths = bucket.lengths.numpy()
        lengths[:count] = [own.computed + 1 for own in sequences]
        lengths[count:] = 1
        for group, table in enumerate(bucket.tables):
            rows = table.numpy()
            rows[count:] = 0
            for row, own in enumerate(sequences):
                pages = own.pages[group]
                rows[row, : len(pages)] = pages
                rows[row, len(pages) :] = 0
        self._threads.run(f"drafts {bucket.shape.rows}", lambda threads: bucket(steps, threads), steps)
        return bucket.chosen.numpy()[:steps, :count].T.tolist()

    def _of(self, rows: int) -> DecodeSteps:
        if rows not in self._steps:
            model, context = self.model, self.model.spec.context
            check_step(model, self.store)
            shape = step_shape(model, self.store.page_size, rows, self.store.shapes)
            tensors = step_tensors(model, self.store)
            assert model.embedding is not None
            tensors["embedding"] = model.embedding.weight
            for turn in shape.turns:
                cos, sin = model.rotary[turn](torch.arange(context))
                tensors |= {f"all_cos_{turn}": cos.float().contiguous(), f"all_sin_{turn}": sin.float().contiguous()}
            self._steps[rows] = DecodeSteps(shape, tensors, self.most, context)
        return self._steps[rows]
