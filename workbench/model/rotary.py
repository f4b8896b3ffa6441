"""Compute the angles of the rotary embedding, with scalings for longer contexts."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from workbench.model.attention_spec import AnyAttentionSpec, MLASpec, RotaryConfig, RotaryScaling
from workbench.model.spec import ModelSpec

RotaryKey = tuple[RotaryConfig, int, int]  # (rotary, rotated columns of a head, columns in its table)


def rotary_of_layer(spec: ModelSpec, attention: AnyAttentionSpec) -> RotaryKey | None:
    """Return the rotary embedding of a layer (its own, or its model's) with the numbers of columns; None if it has
    none.

    For partly rotated heads the table also has the other columns, with angles of 0."""
    if not attention.rotary_dim:
        return None
    columns = attention.rotary_dim if isinstance(attention, MLASpec) else attention.head_dim
    return attention.rotary or spec.rotary, attention.rotary_dim, columns


def rotaries_of_model(spec: ModelSpec) -> tuple[RotaryKey, ...]:
    """Return the distinct rotary embeddings of a model in order of first use: layers with equal embeddings share a
    table of angles.
    """
    rotaries = (rotary_of_layer(spec, kind.attention) for kind in spec.layers)
    return tuple(dict.fromkeys(rotary for rotary in rotaries if rotary is not None))


def rotary_frequencies(rotary: RotaryConfig, dim: int, limit: int = 0) -> Tensor:
    """Compute the angle per position, in radians, of each of the dim / 2 pairs: base^(-2i/dim), scaled, in float64.

    They are computed on the CPU even if the model is on the meta device, which would import torch's compiler.

    Args:
        rotary: the rotary.
        dim: rotated columns of a head.
        limit: maximum tokens of the sequence, for scalings by length.
    """
    scaling, base = rotary.scaling, rotary.rope_theta
    longer = bool(scaling.length_class(limit))
    if scaling.kind == "dynamic" and longer:
        stretch = scaling.factor * limit / scaling.original_max_position_embeddings - (scaling.factor - 1)
        base *= stretch ** (dim / (dim - 2))
    plain = base ** (-torch.arange(0, dim, 2, dtype=torch.float64, device="cpu") / dim)
    if scaling.kind == "longrope":
        factors = scaling.long_factors if longer else scaling.short_factors
        return plain / torch.tensor(factors, dtype=torch.float64, device="cpu")
    if scaling.kind == "linear":
        return plain / scaling.factor
    if scaling.kind == "llama3":
        return _llama3(plain, scaling)
    if scaling.kind == "yarn":
        return _yarn(plain, rotary, dim)
    return plain


def _llama3(plain: Tensor, scaling: RotaryScaling) -> Tensor:
    """Divide low frequencies by `factor`, keep high ones, with a linear transition between (Llama 3.1)."""
    rotations = scaling.original_max_position_embeddings * plain / (2 * math.pi)
    kept = ((rotations - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0, 1)
    return kept * plain + (1 - kept) * plain / scaling.factor


def _yarn(plain: Tensor, rotary: RotaryConfig, dim: int) -> Tensor:
    """Keep the frequency of pairs with many rotations in the original context, divide it by `factor` for pairs with
    few, with a linear transition between (YaRN, Peng et al., 2023, equations 17 to 20).
    """
    scaling = rotary.scaling
    low, high = (_pair(rotations, rotary, dim) for rotations in (scaling.beta_fast, scaling.beta_slow))
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high = high + 0.001 if low == high else high  # as published: no division by zero
    slow = ((torch.arange(dim // 2, dtype=torch.float64, device=plain.device) - low) / (high - low)).clamp(0, 1)
    return (1 - slow) * plain + slow * plain / scaling.factor


def _pair(rotations: float, rotary: RotaryConfig, dim: int) -> float:
    """Return the (fractional) index of the pair that makes this many rotations in the original context."""
    return (
        dim
        * math.log(rotary.scaling.original_max_position_embeddings / (rotations * 2 * math.pi))
        / (2 * math.log(rotary.rope_theta))
    )


class RotaryTable(torch.nn.Module):
    """Cosines and sines by position, for heads of `columns` columns with the first `dim` rotated.

    Unrotated pairs of columns have an angle of 0, so kernels need no special case. Weights are loaded in an order that
    makes (i, i + columns / 2) a pair (see `rotary_column_order`).
    """

    def __init__(self, rotary: RotaryConfig, dim: int, columns: int):
        super().__init__()
        self.num_rotated, self.num_unrotated = dim // 2, (columns - dim) // 2
        self.attention_factor = rotary.scaling.attention_factor
        self.frequencies = torch.nn.Buffer(self._frequencies(rotary, 0), persistent=False)

    def _frequencies(self, rotary: RotaryConfig, limit: int) -> Tensor:
        rotated = rotary_frequencies(rotary, 2 * self.num_rotated, limit)
        return torch.cat([rotated, rotated.new_zeros(self.num_unrotated)])

    def forward(self, positions: Tensor, limits: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Compute cos, sin [token, columns / 2] in float64, which late positions need.

        Args:
            positions: [token].
            limits: maximum tokens of each token's sequence, for scalings by length: [token].
        """
        return self._angles(positions, self.frequencies, self.attention_factor)

    def _angles(
        self, positions: Tensor, frequencies: Tensor, attention_factor: float | Tensor
    ) -> tuple[Tensor, Tensor]:
        angles = positions[:, None].double() * frequencies
        cos, sin = angles.cos(), angles.sin()
        if isinstance(attention_factor, Tensor) or attention_factor != 1:
            cos[:, : self.num_rotated] *= attention_factor
            sin[:, : self.num_rotated] *= attention_factor
        return cos, sin


class LengthRotaryTable(RotaryTable):
    """A table of angles that depend on the length that a sequence may reach (LongRoPE, dynamic NTK)."""

    def __init__(self, rotary: RotaryConfig, dim: int, columns: int):
        super().__init__(rotary, dim, columns)
        self.rotary = rotary
        long = self._frequencies(rotary, rotary.scaling.original_max_position_embeddings + 1)
        self.long_frequencies = torch.nn.Buffer(long, persistent=False)

    def forward(self, positions: Tensor, limits: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if limits is None:
            raise ValueError(f"rotary scaling {self.rotary.scaling.kind}: the batch has no length_limits")
        scaling = self.rotary.scaling
        longer = limits[:, None] > scaling.original_max_position_embeddings
        if scaling.kind == "dynamic":
            return self._angles(positions, self._stretched(limits[:, None]), self.attention_factor)
        factor = scaling.long_attention_factor or scaling.attention_factor
        factors = torch.where(longer, self.frequencies.new_tensor(factor), self.attention_factor)
        return self._angles(positions, torch.where(longer, self.long_frequencies, self.frequencies), factors)

    def _stretched(self, limits: Tensor) -> Tensor:
        """Return the frequencies of dynamic scaling for limits [token, 1]: those of `rotary_frequencies`."""
        scaling, dim = self.rotary.scaling, 2 * self.num_rotated
        stretch = scaling.factor * limits.double() / scaling.original_max_position_embeddings - (scaling.factor - 1)
        exponents = torch.arange(0, dim, 2, dtype=torch.float64, device=limits.device) / (dim - 2)
        return self.frequencies * torch.nn.functional.pad(stretch.clamp(min=1) ** -exponents, (0, self.num_unrotated))


def build_rotary_table(key: RotaryKey) -> RotaryTable:
    """Build the table of angles for a rotary embedding."""
    return (LengthRotaryTable if key[0].scaling.by_length else RotaryTable)(*key)


def rotary_column_order(head_dim: int, rotated: int, interleaved: bool) -> list[int]:
    """Return, for each column of a head in our order, its column in a checkpoint.

    A checkpoint rotates pairs (i, i + rotated / 2), or (2i, 2i + 1) if interleaved, and leaves the columns from
    `rotated` on unrotated. Here every pair is (i, i + head_dim / 2). Scores do not depend on the order of columns.
    """
    half, rest = rotated // 2, list(range(rotated, head_dim))
    pairs = [(2 * i, 2 * i + 1) if interleaved else (i, i + half) for i in range(half)]
    middle = len(rest) // 2
    return [one for one, _ in pairs] + rest[:middle] + [other for _, other in pairs] + rest[middle:]
