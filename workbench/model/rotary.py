"""Angles of the rotary embedding, with the scalings that stretch a model's context."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from workbench.model.attention_spec import AnyAttentionSpec, MLASpec, RotaryConfig, RotaryScaling
from workbench.model.spec import ModelSpec

RotaryKey = tuple[RotaryConfig, int, int]  # a rotary, the columns of a head that it rotates, and those in its table


def rotary_of_layer(spec: ModelSpec, attention: AnyAttentionSpec) -> RotaryKey | None:
    """Return a layer's rotary and its columns: its own, or its model's; None where heads are not rotated.

    In partly rotated heads the table has the others too, with angles of 0."""
    if not attention.rotary_dim:
        return None
    columns = attention.rotary_dim if isinstance(attention, MLASpec) else attention.head_dim
    return attention.rotary or spec.rotary, attention.rotary_dim, columns


def rotaries_of_model(spec: ModelSpec) -> tuple[RotaryKey, ...]:
    """Return the model's different rotaries, in the order in which they first come: layers with equal ones share a
    table of angles."""
    rotaries = (rotary_of_layer(spec, kind.attention) for kind in spec.layers)
    return tuple(dict.fromkeys(rotary for rotary in rotaries if rotary is not None))


def rotary_frequencies(rotary: RotaryConfig, dim: int, limit: int = 0) -> Tensor:
    """Compute radians a position for each of the dim / 2 pairs, float64: base^(-2i/dim), scaled.

    They are computed even where a model is only shapes: the meta device would import torch's compiler for them.

    Args:
        rotary: the rotary.
        dim: columns of a head that it rotates.
        limit: the tokens that a sequence may reach, for scalings by length.
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
    """Divide slow frequencies by `factor`, keep quick ones, with a straight passage between (Llama 3.1)."""
    rotations = scaling.original_max_position_embeddings * plain / (2 * math.pi)
    kept = ((rotations - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0, 1)
    return kept * plain + (1 - kept) * plain / scaling.factor


def _yarn(plain: Tensor, rotary: RotaryConfig, dim: int) -> Tensor:
    """Keep the frequency of pairs that rotate often in the original context, divide it by `factor` for those that
    rotate seldom, with a straight passage over the pairs between (YaRN, Peng et al., 2023, equations 17 to 20)."""
    scaling = rotary.scaling
    low, high = (_pair(rotations, rotary, dim) for rotations in (scaling.beta_fast, scaling.beta_slow))
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    high = high + 0.001 if low == high else high  # as published: no division by zero
    slow = ((torch.arange(dim // 2, dtype=torch.float64, device=plain.device) - low) / (high - low)).clamp(0, 1)
    return (1 - slow) * plain + slow * plain / scaling.factor


def _pair(rotations: float, rotary: RotaryConfig, dim: int) -> float:
    """Return the pair, as a fraction, that makes so many rotations in the original context."""
    return (
        dim
        * math.log(rotary.scaling.original_max_position_embeddings / (rotations * 2 * math.pi))
        / (2 * math.log(rotary.rope_theta))
    )


class RotaryTable(torch.nn.Module):
    """Cosines and sines by position, for heads of `columns` columns of which the first `dim` are rotated.

    Pairs of columns that are not rotated have an angle of 0, so that kernels need not know of them. Weights are loaded
    in the order that makes (i, i + columns / 2) a pair (see `rotary_column_order`).
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
        """Compute cos, sin [token, columns / 2] in float64: late positions need it.

        Args:
            positions: [token].
            limits: the tokens that each token's sequence may reach, for scalings by length: [token].
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
    """Angles that depend on the length that a sequence may reach (LongRoPE, dynamic NTK)."""

    def __init__(self, rotary: RotaryConfig, dim: int, columns: int):
        super().__init__(rotary, dim, columns)
        self.rotary = rotary
        long = self._frequencies(rotary, rotary.scaling.original_max_position_embeddings + 1)
        self.long_frequencies = torch.nn.Buffer(long, persistent=False)

    def forward(self, positions: Tensor, limits: Tensor | None = None) -> tuple[Tensor, Tensor]:
        if limits is None:
            raise ValueError(f"rotary scaling {self.rotary.scaling.kind}: the batch says no length_limits")
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
    """Build the table of a rotary's angles."""
    return (LengthRotaryTable if key[0].scaling.by_length else RotaryTable)(*key)


def rotary_column_order(head_dim: int, rotated: int, interleaved: bool) -> list[int]:
    """Return, for each column of a head here, its column in a checkpoint.

    A checkpoint rotates pairs (i, i + rotated / 2), or (2i, 2i + 1) where they are interleaved, and leaves the columns
    from `rotated` on. Here every pair is (i, i + head_dim / 2). Scores do not depend on the order of columns.
    """
    half, rest = rotated // 2, list(range(rotated, head_dim))
    pairs = [(2 * i, 2 * i + 1) if interleaved else (i, i + half) for i in range(half)]
    middle = len(rest) // 2
    return [one for one, _ in pairs] + rest[:middle] + [other for _, other in pairs] + rest[middle:]
