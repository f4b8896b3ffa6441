"""Angles of the rotary embedding, with the scalings that stretch a model's context."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from workbench.model.spec import Attention, ModelSpec, Rotary, RotaryScaling

Turn = tuple[Rotary, int]  # how heads of that width are turned


def turn_of(spec: ModelSpec, attention: Attention) -> Turn | None:
    """How a layer's heads are turned: as it says itself, or as its model does; None where they are not."""
    return None if attention.position != "rotary" else (attention.rotary or spec.rotary, attention.dim)


def turns_of(spec: ModelSpec) -> tuple[Turn, ...]:
    """The model's different turns, in the order in which they first come: layers alike share a table of angles."""
    turns = (turn_of(spec, kind.attention) for kind in spec.layers)
    return tuple(dict.fromkeys(turn for turn in turns if turn is not None))


def frequencies(rotary: Rotary, dim: int) -> Tensor:
    """Radians a position for each of the dim / 2 pairs, float64: base^(-2i/dim), scaled."""
    plain = rotary.base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    scaling = rotary.scaling
    if scaling.kind == "linear":
        return plain / scaling.factor
    if scaling.kind == "llama3":
        return _llama3(plain, scaling)
    return plain


def _llama3(plain: Tensor, scaling: RotaryScaling) -> Tensor:
    """Slow frequencies divided by `factor`, quick ones kept, a straight passage between (Llama 3.1)."""
    turns = scaling.original_context * plain / (2 * math.pi)
    kept = ((turns - scaling.low_factor) / (scaling.high_factor - scaling.low_factor)).clamp(0, 1)
    return kept * plain + (1 - kept) * plain / scaling.factor


class RotaryTable(torch.nn.Module):
    """Cosines and sines by position, for heads of width `dim`."""

    def __init__(self, rotary: Rotary, dim: int):
        super().__init__()
        self.frequencies = torch.nn.Buffer(frequencies(rotary, dim), persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [token] -> cos, sin [token, dim / 2] in float64: late positions need it."""
        angles = positions[:, None].double() * self.frequencies
        return angles.cos(), angles.sin()
