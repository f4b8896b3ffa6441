"""The shape that a decode step is compiled for: a decoder's sizes and a number of rows, as data."""

from __future__ import annotations

from dataclasses import dataclass

from compiled_kernels.mlir_text import Target
from compiled_kernels.quantized_attention.packed import Kind


@dataclass(frozen=True)
class Weight:
    """How a product's matrix is stored: `f32`, `bf16`, `i8` (a scale a row) or `i4` (a scale a `group` of columns); row
    by row, or in `panels` (see blocked/layout.py). With `w8a8` it is i8 and what is multiplied with it is quantized too,
    row by row (see linear_w8a8)."""

    kind: str
    group: int = 0
    bias: bool = False
    panels: bool = False
    w8a8: bool = False

    @property
    def tensors(self) -> int:
        """Return the number of tensors: the matrix, its scales, its bias."""
        return 1 + (self.kind in ("i8", "i4")) + self.bias


@dataclass(frozen=True)
class Packing:
    """The layout of a layer's quantized keys and values, in the page table `page_table` (see `QuantizationRule`);
    `tokens_per_scale` tokens share a key scale, `columns_per_scale` columns a value scale."""

    keys: Kind
    values: Kind
    run: int
    columns: int
    lag: int
    first: int
    table: int


@dataclass(frozen=True)
class LayerShape:
    """One layer of a decode step. Layers of one shape share their code.

    Attributes:
        num_heads: query heads.
        num_kv_heads: key/value heads, each of width `head_dim`.
        intermediate_size: width of the feed-forward.
        page_table: index of its page table (with `quantized`, of the residual tokens).
        rotary_index: index of its table of angles; None where heads are not rotated.
        qk_norm: whether queries and keys are normed first.
    """

    heads: int
    groups: int
    dim: int
    hidden: int
    scale: float
    qkv: Weight
    output: Weight
    gate_up: Weight
    down: Weight
    window: int = 0
    sinks: int = 0
    softcap: float = 0.0
    sink_logits: bool = False
    qk_norm: bool = False
    turn: int | None = 0
    table: int = 0
    packing: Packing | None = None

    @property
    def tensors(self) -> int:
        """Return the number of weight tensors: two norms, four products, and those of attention beside them."""
        products = sum(weight.tensors for weight in (self.qkv, self.output, self.gate_up, self.down))
        return 2 + products + 2 * self.qk_norm + self.sink_logits


@dataclass(frozen=True)
class StepShape:
    """A step of `rows` tokens, each the last of its own context: from embedded tokens to logits.

    Attributes:
        dtype: f32 or bf16, the type of the cache and of what enters a product; the residual stream is float32.
        page_size: tokens of a page.
        max_pages: pages of a sequence at most.
        chunks: parts into which a context is split.
        same_sequence: whether some rows may be tokens of one sequence; all rows' keys and values are then written
            before any is read.
        head: the output head; without one the step ends with the residual stream, in its buffer x.
        layers: without any the step begins with the residual stream.
    """

    rows: int
    width: int
    vocab: int
    eps: float
    kind: str
    layers: tuple[LayerShape, ...]
    head: Weight | None
    size: int
    held: int
    chunks: int
    target: Target
    together: bool = False

    @property
    def tables(self) -> int:
        packed = (layer.packing.table for layer in self.layers if layer.packing is not None)
        return max([-1, *(layer.table for layer in self.layers), *packed]) + 1

    @property
    def turns(self) -> dict[int, int]:
        """Return the width of the heads that each table of angles is for."""
        return {layer.turn: layer.dim for layer in self.layers if layer.turn is not None}

    @property
    def kinds(self) -> tuple[LayerShape, ...]:
        """Return the layers' different shapes, in the order in which they first come."""
        return tuple(dict.fromkeys(self.layers))
