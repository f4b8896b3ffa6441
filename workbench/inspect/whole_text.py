"""Compute a text apart from the runner and keep all queries and keys, so that attention weights of any row can be
computed at any time.

`inspect` reads a request in progress while its pages exist. This module serves the other cases: finished texts, sliding
windows with freed pages, thousands of rows. Keys are used as computed; only `inspect` shows the effects of quantization
and eviction.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from einops import rearrange
from torch import Tensor

from compiled_kernels.attention import AttentionParameters, SpanContext, attend, attention_weights
from compiled_kernels.masks import Mask
from compiled_kernels.page_selection.api import selected_alone
from workbench.batch import TokenBatch
from workbench.errors import WorkbenchError
from workbench.inspect.attention import refuse_recurrent_layers
from workbench.kv_cache.layer import CacheLayer
from workbench.kv_cache.store import KVStore
from workbench.model.transformer import RunBlock, Transformer, run_block
from workbench.tensor_parallel.transformer import TensorParallelTransformer

TOKENS_PER_CHUNK = 512  # tokens computed at once
ROWS_PER_BLOCK = 256  # rows of weights in memory at once


class TextAttention:
    """The attention of `model` over `token_ids`; `extend` appends tokens. Only one thread may extend it at a time.

    `hidden_states` [token, hidden] are the outputs of the last block for the last computed chunk. `run` calls a block.
    """

    on_layer = None  # as a stand-in for a cache: no wait before a layer

    def __init__(self, model: Transformer, token_ids: Iterable[int] = (), run: RunBlock = run_block):
        refuse_recurrent_layers(model)
        _refuse_ranks(model)
        self.model, self.run = model, run
        self.hidden_states = torch.empty(0)
        self.token_ids: tuple[int, ...] = ()
        own = [_Layer() for _ in model.blocks]
        sources = (kind.attention.kv_shared_with for kind in model.spec.layers)
        self.layers = tuple(
            layer if source is None else _SharedLayer(own[source]) for layer, source in zip(own, sources, strict=True)
        )
        self.extend(token_ids)

    @torch.inference_mode()
    def extend(self, token_ids: Iterable[int]) -> None:
        """Append tokens to the text and compute them.

        Raises:
            WorkbenchError: for a text beyond the model's context, or ids outside its vocabulary.
        """
        fresh = tuple(token_ids)
        if not fresh:
            return
        ids = self.model.validate_token_ids((*self.token_ids, *fresh))
        known, class_of = len(self.token_ids), self.model.spec.length_class
        first = known if class_of(known) == class_of(len(ids)) else 0  # rotary angles depend on the length class
        for begin in range(first, len(ids), TOKENS_PER_CHUNK):
            self._compute(ids[begin : begin + TOKENS_PER_CHUNK], begin, len(ids))
        self.token_ids += fresh

    @torch.inference_mode()
    def weights(self, layer: int, positions: range, heads: Sequence[int] | None = None) -> Tensor:
        """Return the attention weights of consecutive rows, [head, row, context up to the last row] in float32.

        Masked positions are zero; a row's sum is below one if there are sink logits.
        """
        if not 0 <= positions.start <= positions.stop <= len(self.token_ids):
            raise WorkbenchError(
                f"rows {positions.start} to {positions.stop}: the text has {len(self.token_ids)} tokens"
            )
        found = self.layers[layer].weights(positions)
        return (found if heads is None else found[list(heads)]).float()

    def mask(self, layer: int) -> Mask:
        """Return the attention mask of a layer."""
        parameters = self.layers[layer].parameters
        assert parameters is not None  # set when the text was computed
        return parameters.mask

    def _compute(self, ids: Tensor, begin: int, limit: int) -> None:
        rows = torch.arange(begin, begin + len(ids), device=ids.device)
        spans = torch.tensor([0, len(ids)], dtype=torch.int32, device=ids.device)
        lengths = torch.tensor([begin + len(ids)], dtype=torch.int32, device=ids.device)
        limits = torch.full_like(rows, limit)
        batch = TokenBatch(ids, rows, spans, lengths, (), (), rows[:0], decode_only=False, length_limits=limits)
        for layer in self.layers:
            layer.begin = begin
        self.hidden_states = self.model.hidden_states(batch, cast(KVStore, self), self.run)


class _Layer(CacheLayer):
    """A stand-in for a layer's cache: the queries, keys and values of one text, in order."""

    def __init__(self) -> None:
        self.begin = 0
        self.q, self.k, self.v = torch.empty(0), torch.empty(0), torch.empty(0)
        self.parameters: AttentionParameters | None = None

    def write(self, k: Tensor, v: Tensor, batch: TokenBatch, backend: Any = None) -> None:
        """Store k and v, overwriting rows left by a failed call."""
        self.k, self.v = _joined(self.k, k, self.begin), _joined(self.v, v, self.begin)

    def attend(self, q: Tensor, batch: TokenBatch, parameters: AttentionParameters, backend: Any) -> Tensor:
        self.q, self.parameters = _joined(self.q, q, self.begin), parameters
        mixed = []
        for start in range(0, len(q), ROWS_PER_BLOCK):
            part, end = q[start : start + ROWS_PER_BLOCK], self.begin + min(start + ROWS_PER_BLOCK, len(q))
            mixed.append(attend(part, self._context(part, end, parameters), parameters))
        return torch.cat(mixed)

    def weights(self, rows: range) -> Tensor:
        if self.parameters is None:
            raise WorkbenchError(
                "a custom attention module does not read its cache by `attend`: it has no weights to show"
            )
        q = self.q[rows.start : rows.stop]
        weights = attention_weights(q, self._context(q, rows.stop, self.parameters), self.parameters)
        return rearrange(weights, "group share row context -> (group share) row context")

    def _context(self, q: Tensor, end: int, parameters: AttentionParameters) -> SpanContext:
        """Return the keys and values that the last queries before position `end` read."""
        context = SpanContext.whole(self.k[:end], self.v[:end], len(q))
        if parameters.selection is None:
            return context
        chosen = selected_alone(q, self.k[:end], parameters.selection)
        read = chosen[:, :, context.positions // parameters.selection.page_size]
        return context._replace(chosen=rearrange(read, "token group read -> group 1 token read"))


class _SharedLayer(_Layer):
    """A stand-in for the cache of a layer that reads an earlier one's keys and values."""

    def __init__(self, source: _Layer):
        super().__init__()
        self.source = source

    def write(self, k: Tensor, v: Tensor, batch: TokenBatch, backend: Any = None) -> None:
        """Take the keys and values written by the earlier layer."""
        self.k, self.v = self.source.k, self.source.v


def _refuse_ranks(model: Transformer) -> None:
    """Raise WorkbenchError for a tensor-parallel model: each rank has only a part of the heads."""
    if isinstance(model, TensorParallelTransformer):
        size = model.ranks.size
        raise WorkbenchError(
            f"the model is spread over {size} ranks, and this one has only 1/{size} of its heads and columns: "
            "load it with tensor=1 to look inside"
        )


def _joined(before: Tensor, fresh: Tensor, begin: int) -> Tensor:
    return torch.cat([before[:begin], fresh]) if begin else fresh
