"""Modules that all parts of a block use: norms and products."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

import compiled_kernels
from compiled_kernels import Backend
from compiled_kernels.blocked import from_panels, in_panels, panels_problem, to_panels
from compiled_kernels.linear.matrix_format import DENSE_MATRIX, INT8_MATRIX, MatrixFormat
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
        """Return x + residual and its norm."""
        return compiled_kernels.add_rms_norm(x, residual, self.multiplier, self.eps, self.backend)

    @property
    def multiplier(self) -> Tensor:
        """Return the factor of the normed rows. Beside an offset a low precision would lose the weight's digits."""
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
        """Return x + residual and its norm."""
        total = x + residual
        return total, self(total)


class NoNorm(nn.Module):
    """Stand where a norm may be, and change nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return x

    def add_and_norm(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return x + residual twice."""
        total = x + residual
        return total, total


class ResidualScale(nn.Module):
    """Multiply what a layer adds by a number (Granite)."""

    def __init__(self, factor: float):
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def build_norm(hidden_size: int, norm: NormSpec, backend: Backend, bias: bool | None = None) -> RMSNorm | LayerNorm:
    """Build the norm of rows of `hidden_size` that `norm` describes; `bias` replaces its own."""
    bias = norm.bias if bias is None else bias
    if norm.kind == "rms" and norm.weight and not bias:
        return RMSNorm(hidden_size, norm.eps, backend, norm.offset)
    if norm.kind == "rms":
        raise WorkbenchError("a root-mean-square norm has a weight and no bias; LayerNorm may be without and with one")
    return LayerNorm(hidden_size, norm, bias)


class Linear(nn.Module):
    """[token, width] -> [token, out]. The matrix is stored as `format` says, row by row or, after `use_panels`, in
    panels (see compiled_kernels/blocked/layout.py). With `activations` of int8, which wants a matrix of int8 by row,
    rows of x are quantized as they come."""

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
        self.in_features, self.format, self.backend = in_features, format, backend
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
        if self.scales is None:
            return compiled_kernels.linear(x, self.weight, bias, self.backend)
        if self.format == INT8_MATRIX:
            return self.int8_product(x, self.weight, self.scales, bias, self.backend)
        if self.format.words is not None:
            parts = self.weight, self.scales, self.minima
            return compiled_kernels.linear_quantized(x, *parts, bias, str(self.format), self.backend)
        by_row = self.format.scales_rows
        scales, group = (self.scales[:, None], self.in_features) if by_row else (self.scales, self.format.group)
        return compiled_kernels.linear_grouped(x, self.weight, scales, self.minima, bias, group, self.backend)

    @property
    def int8_product(self) -> Callable[..., Tensor]:
        """The operator of a matrix that is int8 by row."""
        return compiled_kernels.linear_w8a8 if self.activations == "int8" else compiled_kernels.linear_int8

    def use_panels(self, panels: bool) -> None:
        """Keep the matrix in panels from now on, where its size and format allow that, or row by row again."""
        if in_panels(self.weight):
            if not panels:
                self.weight = nn.Parameter(from_panels(self.weight), requires_grad=False)
        elif panels and self.panels_refusal is None:
            plain, self.weight = self.weight, nn.Parameter(to_panels(self.weight), requires_grad=False)
            release(plain)  # where it is a view of a file: the panels are a copy

    @property
    def panels_refusal(self) -> str | None:
        """Return why the matrix cannot lie in panels; None if it can."""
        if self.format not in (DENSE_MATRIX, INT8_MATRIX):
            return f"weights of {self.format} are not laid out in panels"
        return panels_problem(self.weight)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Return the matrix, its scales, its minima and its bias, as far as there are such."""
        return tuple(part for part in (self.weight, self.scales, self.minima, self.bias) if part is not None)

    @property
    def matrix_bytes(self) -> int:
        """Return the bytes of the matrix, scales and minima included."""
        return sum(part.nbytes for part in (self.weight, self.scales, self.minima) if part is not None)

    def lookup_rows(self, index: Tensor | slice, dtype: torch.dtype) -> Tensor:
        """Look up rows of the matrix as numbers, for a tied embedding: [token] -> [token, in_features]."""
        weight = from_panels(self.weight)[index]
        if self.scales is None:
            return weight.to(dtype)
        minima = None if self.minima is None else self.minima[index]
        return dequantize_matrix(self.format, weight, self.scales[index], minima).to(dtype)


class StackedLinear(nn.ModuleList):
    """[token, width] -> [token, out] by a matrix whose rows are stored in several formats: a product for each run of
    rows in one of them."""

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
        """Look up rows of the matrix as numbers: [token] -> [token, in_features]."""
        return torch.cat([part.lookup_rows(slice(None), dtype) for part in self.parts])[index]


def stored_as(linear: Linear, rows: Rows) -> Linear | StackedLinear:
    """Return the module of the same product whose matrix is stored so."""
    if len(rows) == 1:
        out, format = len(linear.weight), rows[0][1]  # a rank has fewer rows
        made = Linear(linear.in_features, out, False, linear.backend, format, linear.activations)
        made.bias = linear.bias
        return made
    return StackedLinear(linear, rows)
