"""The position of one number in a recorded pass, and sums of products that several kinds of stages share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor, nn

from workbench.inspect.derivation import Derivation, DerivationTerm
from workbench.inspect.forward_pass import ForwardPass
from workbench.model.layers import HeadNorm, TransformerBlock
from workbench.model.linear import LayerNorm, Linear, RMSNorm

Part = TypeVar("Part", bound=nn.Module)


@dataclass(frozen=True)
class NumberPlace:
    """The place of a number, `value`, in a forward pass: `row` and `column` of a stage of `layer`, and `head` in stages
    of scores and weights.
    """

    found: ForwardPass = field(repr=False)
    layer: int | None
    row: int
    column: int
    head: int
    value: float

    @property
    def block(self) -> TransformerBlock:
        return list(self.found.model.blocks)[self.in_layer]

    def part(self, name: str, kind: type[Part]) -> Part:
        """Return the part `name` of this layer's block, which must be of type `kind`."""
        found = getattr(self.block, name)
        assert isinstance(found, kind)
        return found

    @property
    def in_layer(self) -> int:
        """Return the number of the layer; only for a stage of a layer."""
        assert self.layer is not None
        return self.layer

    def has(self, name: str) -> bool:
        """Return whether this layer has a stage called `name`."""
        return self.found.find(name, self.layer) is not None

    def stage(self, name: str) -> Tensor:
        """Return a stage of this layer. Raises WorkbenchError if the layer does not have it."""
        return self.found.values(name, self.layer)

    def row_of(self, name: str) -> Tensor:
        """Return this token's row of a stage of this layer: [column]."""
        return self.stage(name)[self.row]

    def residual(self) -> Tensor:
        """Return the residual stream before this layer: [token, hidden]."""
        return self.found.residual(self.in_layer)

    def attention_input(self) -> Tensor:
        """Return this token's row of attention's input: [hidden]."""
        return (self.stage("attention_norm") if self.has("attention_norm") else self.residual())[self.row]

    def feedforward_input(self) -> Tensor:
        """Return this token's row of the feed-forward's input: [hidden]."""
        if self.has("feedforward_norm"):
            return self.row_of("feedforward_norm")
        return self.attention_input() if self.block.parallel != "no" else self.row_of("after_attention")

    def explain(self, formula: str, factors: Sequence[str] = (), terms: Sequence[DerivationTerm] = (),
                note: str = "") -> Derivation:  # fmt: skip
        """Return the derivation of this number."""
        return Derivation(formula, self.value, tuple(factors), tuple(terms), note)

    def copied(self, formula: str, name: str, value: float) -> Derivation:
        """Return the derivation of this number as a copy of another number, `value`, which is called `name`."""
        return self.explain(formula, ("value",), (DerivationTerm(name, (value,)),))

    def product(self, matrix: Linear, x: Tensor, name: str) -> Derivation:
        """Return the derivation of this number as a product of a matrix and the row `x`; `name` is the name of a column
        of `x`.
        """
        terms = product_terms("column", x, matrix_row(matrix, self.column))
        if matrix.bias is not None:
            terms += (DerivationTerm("bias", (float(matrix.bias[self.column]), 1.0)),)
        note = "the row is rounded to INT8 first" if matrix.quantizes_x else ""
        return self.explain(f"dot product of the row before it with row {self.column} of the matrix",
                            (name, "weight"), terms, note)  # fmt: skip

    def normed(self, norm: nn.Module, row: Tensor, column: int) -> Derivation:
        """Return the derivation of this number as `column` of the normed `row`."""
        name = "bias" if getattr(norm, "bias", None) is not None else ""
        products = norm_products(norm, row, column)
        terms = [DerivationTerm(f"column {column}" if not at else name, each) for at, each in enumerate(products)]
        if is_centred(norm):
            formula = "distance from the row's mean over its standard deviation, times a weight"
        else:
            formula = "value over the root mean square of its row, times a weight"
        return self.explain(formula, norm_factors(norm), terms)


def matrix_row(matrix: Linear, column: int) -> Tensor:
    """Return the row of a matrix that computes column `column` of its product, dequantized if it is quantized."""
    return matrix.lookup_rows(slice(column, column + 1), torch.float64)[0]


def product_terms(name: str, *factors: Tensor) -> tuple[DerivationTerm, ...]:
    """Return one term per column: the product of the values that the rows in `factors`, of equal length, have in this
    column.
    """
    columns: Sequence[Sequence[float]] = [each.double().tolist() for each in factors]
    return tuple(DerivationTerm(f"{name} {n}", values) for n, values in enumerate(zip(*columns, strict=True)))


def is_centred(norm: nn.Module) -> bool:
    """Return whether a norm subtracts the row's mean."""
    return norm.kind == "layer" if isinstance(norm, HeadNorm) else isinstance(norm, LayerNorm)


def norm_factors(norm: nn.Module) -> tuple[str, str, str]:
    """Return the names of the three factors of each product that `norm_products` returns."""
    return ("value − mean", "1 / deviation", "weight") if is_centred(norm) else ("value", "1 / rms", "weight")


def norm_products(norm: nn.Module, row: Tensor, column: int, head: int = 0) -> list[tuple[float, float, float]]:
    """Return the products that sum to `column` of a normed row: one product, and a second one if the norm has a bias.

    Args:
        norm: an RMSNorm, a LayerNorm, or a HeadNorm (the row is one head).
        row: the input of the norm: [column].
        column: the column.
        head: the head, for a HeadNorm with weights per head.
    """
    exact = row.double()
    exact = exact - exact.mean() if is_centred(norm) else exact
    assert isinstance(norm, RMSNorm | LayerNorm | HeadNorm)
    size = float((exact.square().mean() + norm.eps).rsqrt())
    parts = [part if part is None or part.ndim == 1 else part[head] for part in _norm_parameters(norm)]
    offset = 0.0 if isinstance(norm, RMSNorm) else norm.offset
    weight, bias = (None if part is None else float(part[column]) for part in parts)
    first = float(exact[column]), size, 1.0 if weight is None else weight + offset
    return [first] if bias is None else [first, (bias, 1.0, 1.0)]


def _norm_parameters(norm: RMSNorm | LayerNorm | HeadNorm) -> tuple[Tensor | None, Tensor | None]:
    if isinstance(norm, RMSNorm):
        return norm.multiplier, None
    return norm.weight, norm.bias
