"""The oracle of Gemma 3n's residual streams (AltUp, Baykal et al., 2023): stream by stream, over a whole text."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from workbench.model.spec import AltUpSpec, ModelSpec

ByName = Callable[[Tensor, str], Tensor]  # applies the projection or norm of this name


class NaiveStreams:
    """All streams of a text, each [token, hidden]: a layer reads the active stream, and its output updates all of them.
    """

    def __init__(
        self, x: Tensor, ids: Tensor, w: Mapping[str, Tensor], spec: ModelSpec, altup: AltUpSpec, linear: ByName,
        norm: ByName, dtype: torch.dtype,
    ):  # fmt: skip
        """Build the streams of the embedded tokens x; constants are rounded to the model's `dtype`, as in training."""

        def rounded(value: float) -> Tensor:
            return torch.tensor(value, dtype=dtype).to(x.dtype)

        self.w, self.altup, self.linear, self.norm, self.width = w, altup, linear, norm, spec.hidden_size
        self.streams = [x, *(_sized(x @ matrix.T, x) for matrix in w["streams.expand"])]
        known_ids = [each if each < altup.input_vocab_size else 0 for each in ids.tolist()]
        embedded = w["streams.input_embedding.weight"][known_ids] * rounded(altup.input_columns**0.5)
        made = linear(x, "streams.input_proj") * rounded(spec.hidden_size**-0.5)
        parts = zip(made.split(altup.input_columns, -1), embedded.split(altup.input_columns, -1), strict=True)
        self.inputs = [(norm(column, "streams.input_norm") + looked) * rounded(0.5**0.5) for column, looked in parts]

    def enter(self, at: str) -> Tensor:
        """Begin a layer: predict every stream from all streams, and return the active one. `at` is the prefix of its
        weight names.
        """
        count = self.altup.streams
        mixing = self._weights(self.streams[self.altup.active], at) @ self.w[at + "prediction_coefficients.weight"].T
        self.streams = [
            stream + sum(mixing[:, to * count + source, None] * self.streams[source] for source in range(count))
            for to, stream in enumerate(self.streams)
        ]
        return self.streams[self.altup.active]

    def beside_attention(self, added: Tensor, h: Tensor, at: str) -> Tensor:
        """Return the active stream after attention, `added`, combined with a low-rank projection of the normed rows
        `h`.
        """
        low = self.linear(self.linear(h, at + "low_rank_in"), at + "low_rank_out")
        return (added + h + self.norm(low, at + "low_rank_norm")) / math.sqrt(2)

    def leave(self, made: Tensor, at: str, gelu: Callable[[Tensor], Tensor]) -> None:
        """End a layer: correct every stream by `made`, the layer's output for the active stream, and add the per-layer
        input.
        """
        share = self._weights(made, at) @ self.w[at + "correction_coefficients.weight"].T + 1
        innovation = made - self.streams[self.altup.active]
        self.streams = [stream + share[:, each, None] * innovation for each, stream in enumerate(self.streams)]
        first = self.streams[self.altup.active]
        first = first * self.w[at + "active_scale"] if self.altup.scales_active else first
        gate = gelu(self.linear(first, at + "own_input_gate")) * self.inputs.pop(0)
        entering = self.norm(self.linear(gate, at + "own_input_up"), at + "own_input_norm")
        self.streams = [self.streams[0], *(stream + entering for stream in self.streams[1:])]

    def hidden(self) -> Tensor:
        """Return one hidden state per token, after the last layer."""
        first, *others = self.streams
        back = [_sized(each @ matrix.T, first) for each, matrix in zip(others, self.w["streams.merge"], strict=True)]
        return torch.stack([first, *back]).mean(0)

    def _weights(self, active: Tensor, at: str) -> Tensor:
        normed = self.norm(active, at + "stream_norm") / self.width
        return torch.tanh(normed @ self.w[at + "stream_router.weight"].T)


def _sized(stream: Tensor, like: Tensor) -> Tensor:
    """Scale each token of a stream to the magnitude of the same token in `like`."""
    size = like.square().mean(-1, keepdim=True).sqrt()
    return stream * size / stream.square().mean(-1, keepdim=True).clamp(min=1e-5).sqrt()
