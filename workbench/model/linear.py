"""Modules that all parts of a block use: norms and products."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

import compiled_kernels
from compiled_kernels import Backend
from compiled_kernels.blocked import from_panels, in_panels, panels_problem, to_panels
from workbench.errors import WorkbenchError
from workbench.model.formats.mapped import release
from workbench.model.quantized import Activations, WeightDtype, dequantize
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
    """[token, width] -> [token, out]. The matrix is stored as `format`: dense, int8 or int4 (see quantized.py), row by
    row or, after `use_panels`, in panels (see compiled_kernels/blocked/layout.py). With `activations` of int8, which
    wants a matrix of int8, rows of x are quantized as they come."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        backend: Backend,
        format: WeightDtype = "dense",
        quant_group: int = 64,
        activations: Activations = "float",
    ):
        super().__init__()
        self.activations: Activations = activations
        self.in_features, self.quant_group, self.backend = in_features, quant_group, backend
        self.format: WeightDtype = format
        stored, scales = _storage(in_features, out_features, format, quant_group)
        self.weight = nn.Parameter(stored, requires_grad=False)
        self.scales = None if scales is None else nn.Parameter(scales, requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        if self.scales is None:
            return compiled_kernels.linear(x, self.weight, self.bias, self.backend)
        return self.product(x, self.weight, self.scales, self.bias, self.backend)

    @property
    def product(self) -> Callable[..., Tensor]:
        """The operator of a matrix that is not dense."""
        if self.format == "int4":
            return compiled_kernels.linear_int4
        return compiled_kernels.linear_w8a8 if self.activations == "int8" else compiled_kernels.linear_int8

    def use_panels(self, panels: bool) -> None:
        """Keep the matrix in panels from now on, where its size and format allow that, or row by row again."""
        if in_panels(self.weight):
            if not panels:
                self.weight = nn.Parameter(from_panels(self.weight), requires_grad=False)
        elif panels and self.format != "int4" and panels_problem(self.weight) is None:
            plain, self.weight = self.weight, nn.Parameter(to_panels(self.weight), requires_grad=False)
            release(plain)  # where it is a view of a file: the panels are a copy

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Return the matrix, its scales and its bias, as far as there are such."""
        return tuple(part for part in (self.weight, self.scales, self.bias) if part is not None)

    def lookup_rows(self, index: Tensor, dtype: torch.dtype) -> Tensor:
        """Look up rows of the matrix as numbers, for a tied embedding: [token] -> [token, in_features]."""
        return dequantize(from_panels(self.weight)[index], None if self.scales is None else self.scales[index], dtype)


def _storage(width: int, out: int, format: WeightDtype, group: int) -> tuple[Tensor, Tensor | None]:
    if format == "int8":
        return torch.empty(out, width, dtype=torch.int8), torch.empty(out)
    if format == "int4":
        scales = torch.empty(out, width // group, dtype=torch.float16)
        return torch.empty(out, width // 2, dtype=torch.uint8), scales
    return torch.empty(out, width), None
