"""Norms and linear products that all parts of a block use."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

import compiled_kernels
from compiled_kernels import Backend
from compiled_kernels.blocked.layout import (
    from_panels,
    in_panels,
    over_rows,
    panels_problem,
    regrouped,
    rows_of_panels,
    scales_to_panels,
    to_panels,
    whole_panels,
)
from compiled_kernels.linear.int8_activations import int8_problem
from compiled_kernels.linear.matrix_format import DENSE_MATRIX, MatrixFormat
from compiled_kernels.linear.quantize import dequantize_matrix
from workbench.errors import WorkbenchError
from workbench.model.formats.mapped import release
from workbench.model.quantized import BESIDE, Activations, Rows
from workbench.model.spec import NormSpec


class RMSNorm(nn.Module):
    """Root-mean-square norm over `hidden_size`: x / sqrt(mean(x²) + eps) * (weight + offset)."""

    def __init__(self, hidden_size: int, eps: float, backend: Backend, offset: float = 0.0):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size))
        self.eps, self.backend, self.offset = eps, backend, offset

    def forward(self, x: Tensor) -> Tensor:
        return compiled_kernels.rms_norm(x, self.multiplier, self.eps, self.backend)

    def add_and_norm(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return two tensors: x + residual, and its norm."""
        return compiled_kernels.add_rms_norm(x, residual, self.multiplier, self.eps, self.backend)

    @property
    def multiplier(self) -> Tensor:
        """Return weight + offset, in float32 if there is an offset, since a lower precision would lose digits."""
        if not self.offset:
            return self.weight
        return self.weight.to(torch.promote_types(self.weight.dtype, torch.float32)) + self.offset


class LayerNorm(nn.Module):
    """LayerNorm over `hidden_size`, in float32: (x - mean) / sqrt(variance + eps) * (weight + offset) + bias."""

    def __init__(self, hidden_size: int, norm: NormSpec, bias: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size)) if norm.weight else None
        self.bias = nn.Parameter(torch.empty(hidden_size)) if bias else None
        self.eps, self.offset = norm.eps, norm.offset

    def forward(self, x: Tensor) -> Tensor:
        exact = torch.promote_types(x.dtype, torch.float32)
        weight, bias = (None if part is None else part.to(exact) for part in (self.weight, self.bias))
        weight = weight + self.offset if weight is not None and self.offset else weight
        return nn.functional.layer_norm(x.to(exact), (x.shape[-1],), weight, bias, self.eps).to(x.dtype)

    def add_and_norm(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return two tensors: x + residual, and its norm."""
        total = x + residual
        return total, self(total)


class NoNorm(nn.Module):
    """An identity that stands in place of a norm."""

    def forward(self, x: Tensor) -> Tensor:
        return x

    def add_and_norm(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return x + residual twice: as the sum, and as its norm."""
        total = x + residual
        return total, total


class ResidualScale(nn.Module):
    """Multiply a part's result by a number before it is added to the residual stream (Granite)."""

    def __init__(self, factor: float):
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def build_norm(hidden_size: int, norm: NormSpec, backend: Backend, bias: bool | None = None) -> RMSNorm | LayerNorm:
    """Build the module for the norm `norm` of rows of `hidden_size`; `bias` overrides the norm's own setting."""
    bias = norm.bias if bias is None else bias
    if norm.kind == "rms" and norm.weight and not bias:
        return RMSNorm(hidden_size, norm.eps, backend, norm.offset)
    if norm.kind == "rms":
        raise WorkbenchError("a root-mean-square norm must have a weight and no bias; use kind: layer")
    return LayerNorm(hidden_size, norm, bias)


class Linear(nn.Module):
    """A linear layer [token, width] -> [token, out]. The matrix is stored in `format`, row by row or, after
    `use_panels`, in panels (see compiled_kernels/blocked/layout.py). With `activations` int8, x is quantized in each
    call if the matrix has integer codes.
    """

    weight: Tensor
    scales: Tensor | None
    minima: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        backend: Backend,
        format: MatrixFormat = DENSE_MATRIX,
        activations: Activations = "float",
    ):
        super().__init__()
        self.activations: Activations = activations
        self.in_features, self.out_features = in_features, out_features
        self.format, self.backend = format, backend
        if format.is_dense:
            parts = {"weight": torch.empty(out_features, in_features)}
        else:
            stored = format.storage(out_features, in_features)
            parts = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in stored.items()}
        for name in ("weight", *BESIDE):
            part = nn.Parameter(parts[name], requires_grad=False) if name in parts else None
            self.register_parameter(name, part)
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return self.multiply(x, self.bias)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return x @ matrix.T + bias."""
        weight, scales, minima = self._read
        if in_panels(weight):  # panels are whole pairs, and so are scales and minima
            bias, scales = (each if each is None or each.ndim > 1 else whole_panels(each) for each in (bias, scales))
        if scales is None:
            found = compiled_kernels.linear(x, weight, bias, self.backend)
        else:
            stored = weight, scales, minima, bias, self.format.codes, self.format.group
            found = compiled_kernels.linear_quantized(x, *stored, "int8" if self.quantizes_x else "float", self.backend)
        return found if found.shape[1] == self.out_features else found[:, : self.out_features]

    @property
    def _read(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return matrix, scales and minima in the layout that the backend reads; only mlir reads panels."""
        if self.backend is Backend.MLIR:
            return self.weight, self.scales, self.minima
        weight = self._rows("weight")
        assert weight is not None
        return weight, self._rows("scales"), self._rows("minima")

    def _rows(self, name: str, index: Tensor | None = None) -> Tensor | None:
        """Return the matrix, its scales or its minima row by row; default: all rows."""
        part = getattr(self, name)
        if part is None or not in_panels(part):
            return part if part is None or index is None else part[index]
        found = from_panels(part)[: self.out_features] if index is None else rows_of_panels(part, index)
        if name == "weight" or self.format.words is not None:
            return found
        return found[:, :: max(1, min(self.format.group, self.in_features) // self.panel_group)]

    @property
    def quantizes_x(self) -> bool:
        """Return whether x is quantized to INT8 for the product."""
        problem = int8_problem(self.format.codes, self.format.group, self.in_features)
        return self.activations == "int8" and problem is None

    def use_panels(self, panels: bool, in_place: bool = False) -> None:
        """Convert the matrix to panels if its size allows that, or with `panels` false back to rows. `in_place`
        overwrites the rows of a quantized matrix, which no other code may read then.
        """
        if panels == in_panels(self.weight) or (panels and self.panels_refusal is not None):
            return
        for name in ("weight", *BESIDE):
            part = getattr(self, name)
            if part is None or part.ndim == 1:
                continue
            if not panels:
                found = self._rows(name).contiguous()  # type: ignore[union-attr] (it is there)
            else:
                scales = name != "weight" and not self.format.words
                plain = regrouped(part, self.format.group, self.in_features) if scales else part
                lay = to_panels if name == "weight" else scales_to_panels
                own = in_place and not self.format.is_dense  # a dense matrix may be a view of its file
                found = over_rows(plain, lay) if own else lay(plain)
            setattr(self, name, nn.Parameter(found, requires_grad=False))
            release(part)  # if it is a view of a file, the panels are a copy

    @property
    def panels_refusal(self) -> str | None:
        """Return the reason why the matrix cannot be stored in panels; None if it can."""
        if self.format.codes in ("int8", "fp8") and self.panel_group % 4:
            group = self.format.group
            return f"panels hold groups of whole words of four columns, not of {group} of {self.in_features}"
        return panels_problem(self.weight)

    @property
    def panel_group(self) -> int:
        """Return the number of columns that share a scale in panels; groups that do not divide the width are split into
        smaller ones.
        """
        return math.gcd(self.format.group, self.in_features) if self.format.group else 0

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Return the matrix and, if present, its scales, minima and bias."""
        return tuple(part for part in (self.weight, self.scales, self.minima, self.bias) if part is not None)

    @property
    def matrix_bytes(self) -> int:
        """Return the number of bytes of the matrix, scales and minima included."""
        return sum(part.nbytes for part in (self.weight, self.scales, self.minima) if part is not None)

    def lookup_rows(self, index: Tensor | slice, dtype: torch.dtype) -> Tensor:
        """Return rows of the matrix by `index`, dequantized, for a tied embedding: [token] -> [token, in_features]."""
        index = torch.arange(self.out_features)[index] if isinstance(index, slice) else index
        weight, scales, minima = (self._rows(name, index) for name in ("weight", *BESIDE))
        assert weight is not None
        return weight.to(dtype) if scales is None else dequantize_matrix(self.format, weight, scales, minima).to(dtype)


class StackedLinear(nn.ModuleList):
    """A linear layer [token, width] -> [token, out] whose matrix has rows in several formats: one product for each
    range of rows.
    """

    bias: Tensor | None

    def __init__(self, whole: Linear, rows: Rows):
        super().__init__(
            Linear(whole.in_features, count, False, whole.backend, format, whole.activations) for count, format in rows
        )
        self.sizes = [count for count, _ in rows]
        self.register_parameter("bias", whole.bias)

    @property
    def parts(self) -> list[Linear]:
        return [part for part in self if isinstance(part, Linear)]

    def forward(self, x: Tensor) -> Tensor:
        biases = [None] * len(self.sizes) if self.bias is None else self.bias.split(self.sizes)
        return torch.cat([part.multiply(x, bias) for part, bias in zip(self.parts, biases, strict=True)], -1)

    def lookup_rows(self, index: Tensor | slice, dtype: torch.dtype) -> Tensor:
        """Return rows of the matrix by `index`, dequantized: [token] -> [token, in_features]."""
        return torch.cat([part.lookup_rows(slice(None), dtype) for part in self.parts])[index]


def stored_as(linear: Linear, rows: Rows) -> Linear | StackedLinear:
    """Return a module for the same product whose matrix is stored in other formats; `rows` has the format of each range
    of rows.
    """
    if len(rows) == 1:
        out, format = len(linear.weight), rows[0][1]  # a rank has fewer rows
        made = Linear(linear.in_features, out, False, linear.backend, format, linear.activations)
        made.bias = linear.bias
        return made
    return StackedLinear(linear, rows)
