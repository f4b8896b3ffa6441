"""Angles of the rotary embedding, with the scalings that stretch a model's context."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from workbench.model.spec import AnyAttentionSpec, ModelSpec, RotaryConfig, RotaryScaling

RotaryKey = tuple[RotaryConfig, int]  # a rotary and the number of columns of a head that it rotates


def rotary_of_layer(spec: ModelSpec, attention: AnyAttentionSpec) -> RotaryKey | None:
    """Return a layer's rotary and its number of rotated columns: its own, or its model's; None where heads are not
    rotated."""
    return (attention.rotary or spec.rotary, attention.rotary_dim) if attention.rotary_dim else None


def rotaries_of_model(spec: ModelSpec) -> tuple[RotaryKey, ...]:
    """Return the model's different rotaries, in the order in which they first come: layers with equal ones share a
    table of angles."""
    turns = (rotary_of_layer(spec, kind.attention) for kind in spec.layers)
    return tuple(dict.fromkeys(turn for turn in turns if turn is not None))


def rotary_frequencies(rotary: RotaryConfig, dim: int) -> Tensor:
    """Compute radians a position for each of the dim / 2 pairs, float64: base^(-2i/dim), scaled.

    They are computed even where a model is only shapes: the meta device would import torch's compiler for them.
    """
    plain = rotary.rope_theta ** (-torch.arange(0, dim, 2, dtype=torch.float64, device="cpu") / dim)
    scaling = rotary.scaling
    if scaling.kind == "linear":
        return plain / scaling.factor
    if scaling.kind == "llama3":
        return _llama3(plain, scaling)
    if scaling.kind == "yarn":
        return _yarn(plain, rotary, dim)
    return plain


def _llama3(plain: Tensor, scaling: RotaryScaling) -> Tensor:
    """Divide slow frequencies by `factor`, keep quick ones, with a straight passage between (Llama 3.1)."""
    turns = scaling.original_max_position_embeddings * plain / (2 * math.pi)
    kept = ((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0, 1)
    return kept * plain + (1 - kept) * plain / scaling.factor


def _yarn(plain: Tensor, rotary: RotaryConfig, dim: int) -> Tensor:
    """Keep the frequency of pairs that rotate often in the original context, divide it by `factor` for those that
    rotate seldom, with a straight passage over the pairs between (YaRN, Peng et al., 2023, equations 17 to 20)."""
    scaling = rotary.scaling
    low, high = (_pair(turns, rotary, dim) for turns in (scaling.beta_fast, scaling.beta_slow))
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high = high + 0.001 if low == high else high  # as published: no division by zero
    slow = ((torch.arange(dim // 2, dtype=torch.float64, device=plain.device) - low) / (high - low)).clamp(0, 1)
    return (1 - slow) * plain + slow * plain / scaling.factor


def _pair(turns: float, rotary: RotaryConfig, dim: int) -> float:
    """Return the pair, as a fraction, that makes so many turns in the original context."""
    return (
        dim
        * math.log(rotary.scaling.original_max_position_embeddings / (turns * 2 * math.pi))
        / (2 * math.log(rotary.rope_theta))
    )


class RotaryTable(torch.nn.Module):
    """Cosines and sines by position, for heads of which `dim` columns are rotated."""

    def __init__(self, rotary: RotaryConfig, dim: int):
        super().__init__()
        self.attention_factor = rotary.scaling.attention_factor
        self.frequencies = torch.nn.Buffer(rotary_frequencies(rotary, dim), persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Compute cos, sin [token, dim / 2] of positions [token] in float64: late positions need it."""
        angles = positions[:, None].double() * self.frequencies
        return angles.cos() * self.attention_factor, angles.sin() * self.attention_factor
