"""The shape that a decode step is compiled for: a decoder's sizes and a number of rows, as data."""

from __future__ import annotations

from dataclasses import dataclass

from compiled_kernels.mlir_text import Target
from compiled_kernels.quantized_attention.quantize import QuantFormat


@dataclass(frozen=True)
class WeightLayout:
    """The stored layout of a product's matrix: `f32`, `bf16`, `i8` (a scale a row) or `i4` (a scale a `group` of columns); row
    by row, or in `panels` (see blocked/layout.py). With `w8a8` it is i8 and what is multiplied with it is quantized too,
    row by row (see linear_w8a8)."""

    dtype: str
    quant_group: int = 0
    bias: bool = False
    panels: bool = False
    w8a8: bool = False

    @property
    def num_tensors(self) -> int:
        """Return the number of tensors: the matrix, its scales, its bias."""
        return 1 + (self.dtype in ("i8", "i4")) + self.bias


@dataclass(frozen=True)
class QuantizedLayout:
    """The layout of a layer's quantized keys and values, in the page table `page_table` (see `QuantizationRule`);
    `tokens_per_scale` tokens share a key scale, `columns_per_scale` columns a value scale."""

    key_format: QuantFormat
    value_format: QuantFormat
    tokens_per_scale: int
    columns_per_scale: int
    residual_length: int
    num_sink_tokens: int
    page_table: int


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

    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    scale: float
    qkv: WeightLayout
    output: WeightLayout
    gate_up: WeightLayout
    down: WeightLayout
    window: int = 0
    sinks: int = 0
    softcap: float = 0.0
    sink_logits: bool = False
    qk_norm: bool = False
    rotary_index: int | None = 0
    page_table: int = 0
    quantized: QuantizedLayout | None = None

    @property
    def num_tensors(self) -> int:
        """Return the number of weight tensors: two norms, four products, and those of attention beside them."""
        products = sum(weight.num_tensors for weight in (self.qkv, self.output, self.gate_up, self.down))
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
    hidden_size: int
    vocab_size: int
    eps: float
    dtype: str
    layers: tuple[LayerShape, ...]
    head: WeightLayout | None
    page_size: int
    max_pages: int
    chunks: int
    target: Target
    same_sequence: bool = False

    @property
    def num_page_tables(self) -> int:
        packed = (layer.quantized.page_table for layer in self.layers if layer.quantized is not None)
        return max([-1, *(layer.page_table for layer in self.layers), *packed]) + 1

    @property
    def rotary_dims(self) -> dict[int, int]:
        """Return the width of the heads that each table of angles is for."""
        return {layer.rotary_index: layer.head_dim for layer in self.layers if layer.rotary_index is not None}

    @property
    def layer_kinds(self) -> tuple[LayerShape, ...]:
        """Return the layers' different shapes, in the order in which they first come."""
        return tuple(dict.fromkeys(self.layers))
