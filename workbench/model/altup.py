"""Compute models with several residual streams, one of them active in each layer (AltUp, Baykal et al., 2023; Gemma
3n).

A token's row has its streams, [stream * hidden], then one input for each layer. A block reads the first of these inputs
and moves it to the end, so all blocks are equal and need no layer number.
"""

from __future__ import annotations

import math

import torch
from einops import einsum, rearrange
from torch import Tensor, nn
from torch.nn.functional import gelu

from compiled_kernels import Backend
from workbench.model.layers import TransformerBlock
from workbench.model.linear import Linear, build_norm
from workbench.model.mixer import Angles
from workbench.model.quantized import WeightFormat
from workbench.model.spec import AltUpSpec, LayerSpec, ModelSpec, NormSpec

MIN_SQUARE = 1e-5  # lower bound of a stream's mean square when it is scaled


class AltUpBlock(TransformerBlock):
    """One layer of a model with several residual streams: it predicts all streams, computes the active one, and
    corrects the other streams by the active one's change.

    A low-rank residual is added to attention (LAuReL, Menghani et al., 2024). The layer's own input is added to all
    streams but the first.
    """

    def __init__(
        self, altup: AltUpSpec, kind: LayerSpec, hidden_size: int, backend: Backend, format: WeightFormat,
        norm: NormSpec,
    ):  # fmt: skip
        super().__init__(kind, hidden_size, backend, format, norm)
        self.altup, self.hidden_size, count = altup, hidden_size, altup.streams
        stored = backend, format.blocks, format.activations
        self.stream_norm = build_norm(hidden_size, norm, backend)
        self.stream_router = Linear(hidden_size, count, False, backend)
        self.prediction_coefficients = Linear(count, count * count, False, backend)
        self.correction_coefficients = Linear(count, count, False, backend)
        self.active_scale = nn.Parameter(torch.empty(hidden_size))
        self.low_rank_in = Linear(hidden_size, altup.low_rank, False, *stored)
        self.low_rank_out = Linear(altup.low_rank, hidden_size, False, *stored)
        self.low_rank_norm = build_norm(hidden_size, norm, backend)
        self.own_input_gate = Linear(hidden_size, altup.input_columns, False, *stored)
        self.own_input_up = Linear(altup.input_columns, hidden_size, False, *stored)
        self.own_input_norm = build_norm(hidden_size, norm, backend)

    def before_attention(self, x: Tensor, cos: Angles, sin: Angles) -> tuple[Tensor, ...]:
        active = self._predicted(self._streams(x))[:, self.altup.active]
        return super().before_attention(active, cos, sin)

    def after_attention(self, x: Tensor, mixed: Tensor) -> Tensor:
        """Add attention's result to the active stream of the rows x, run the rest of the layer, and return the rows."""
        spec, predicted = self.altup, self._predicted(self._streams(x))
        active = predicted[:, spec.active]
        normed = self.attention_norm(active)
        low_rank = normed + self.low_rank_norm(self.low_rank_out(self.low_rank_in(normed)))
        added = (active + self.attention_post_norm(self.attention.o_proj(mixed)) + low_rank) / math.sqrt(2)
        made = added + self.feedforward_post_norm(self.feedforward(self.feedforward_norm(added)))
        corrected = self._corrected(predicted, made)
        own, *later = x[:, spec.streams * self.hidden_size :].split(spec.input_columns, dim=-1)
        first = corrected[:, spec.active] * self.active_scale if spec.scales_active else corrected[:, spec.active]
        entering = self.own_input_up(gelu(self.own_input_gate(first), approximate="tanh") * own)
        entering = self.own_input_norm(entering)[:, None]
        streams = torch.cat([corrected[:, :1], corrected[:, 1:] + entering], dim=1)
        return torch.cat([rearrange(streams, "token stream hidden -> token (stream hidden)"), *later, own], dim=-1)

    def _streams(self, x: Tensor) -> Tensor:
        """Return the streams of rows: [token, stream, hidden]."""
        return x[:, : self.altup.streams * self.hidden_size].unflatten(-1, (self.altup.streams, self.hidden_size))

    def _weights(self, active: Tensor) -> Tensor:
        """Return the weight of each stream, from -1 to 1: [token, hidden] -> [token, stream]."""
        return torch.tanh(self.stream_router(self.stream_norm(active) / self.hidden_size).float()).to(active.dtype)

    def _predicted(self, streams: Tensor) -> Tensor:
        mixing = self.prediction_coefficients(self._weights(streams[:, self.altup.active]))
        mixing = rearrange(mixing, "token (to stream) -> token to stream", to=self.altup.streams)
        return streams + einsum(mixing, streams, "token to stream, token stream hidden -> token to hidden")

    def _corrected(self, predicted: Tensor, made: Tensor) -> Tensor:
        share = self.correction_coefficients(self._weights(made)) + 1
        return predicted + share[:, :, None] * (made - predicted[:, self.altup.active])[:, None]


class Streams(nn.Module):
    """The first and last operation on residual streams: make a token's row from its embedding, and its hidden state
    from the final row.
    """

    def __init__(self, spec: ModelSpec, altup: AltUpSpec, backend: Backend, format: WeightFormat):
        super().__init__()
        self.altup, self.hidden_size = altup, spec.hidden_size
        columns, vocab = len(spec.layers) * altup.input_columns, altup.input_vocab_size
        others = altup.streams - 1
        self.input_embedding = nn.Embedding(vocab, columns, _weight=torch.empty(vocab, columns))
        stored = backend, format.blocks, format.activations
        self.input_proj = Linear(spec.hidden_size, columns, False, *stored)
        self.input_norm = build_norm(altup.input_columns, spec.norm, backend)
        self.expand = nn.Parameter(torch.empty(others, spec.hidden_size, spec.hidden_size))
        self.merge = nn.Parameter(torch.empty(others, spec.hidden_size, spec.hidden_size))

    def rows(self, embedded: Tensor, ids: Tensor) -> Tensor:
        """Return the rows of embedded tokens [token, hidden] and their ids [token]."""
        columns = self.altup.input_columns
        found = self.input_embedding(torch.where(ids < self.altup.input_vocab_size, ids, 0))
        found = found * found.new_full((), columns**0.5)  # rounded to the model's type, as it was trained
        made = self.input_proj(embedded) * embedded.new_full((), self.hidden_size**-0.5)
        made = rearrange(made, "token (layer column) -> (token layer) column", column=columns)
        made = rearrange(self.input_norm(made), "(token layer) column -> token (layer column)", token=len(embedded))
        others = einsum(self.expand, embedded, "stream out hidden, token hidden -> token stream out")
        streams = torch.cat([embedded[:, None], _scaled(others, embedded)], dim=1)
        inputs = (made + found) * embedded.new_full((), 0.5**0.5)
        return torch.cat([rearrange(streams, "token stream hidden -> token (stream hidden)"), inputs], dim=-1)

    def hidden(self, rows: Tensor) -> Tensor:
        """Return the mean of each row's streams [token, hidden]; all streams but the first are projected before."""
        streams = rows[:, : self.altup.streams * self.hidden_size].unflatten(-1, (-1, self.hidden_size))
        others = einsum(self.merge, streams[:, 1:], "stream out hidden, token stream hidden -> token stream out")
        return torch.cat([streams[:, :1], _scaled(others, streams[:, 0])], dim=1).mean(1)


def _scaled(streams: Tensor, like: Tensor) -> Tensor:
    """Scale streams [token, stream, hidden] to the root mean square of `like` [token, hidden]."""
    size = like.square().mean(-1, keepdim=True).sqrt()[:, None]
    return streams * size / streams.square().mean(-1, keepdim=True).clamp(min=MIN_SQUARE).sqrt()
