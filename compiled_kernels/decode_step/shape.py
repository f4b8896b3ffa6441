"""The shape that a decode step is compiled for: a decoder's sizes and a number of rows, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from compiled_kernels.builder.target import Target, memref
from compiled_kernels.page_selection.selection import PageSelection
from compiled_kernels.paged_attention.mlir_shape import HeadShape
from compiled_kernels.quantized_attention.mlir_shape import QuantizedLayout

Half = Literal["attention", "feedforward"]


@dataclass(frozen=True)
class WeightLayout:
    """The stored layout of a product's matrix: `f32` or `bf16`, row by row or in `panels` (see blocked/layout.py); in
    panels a format of `WORDS`, or a kind of codes (see blocked/shape.py), whose scales are of `quant_group` columns (0:
    a row) and of type `scales`, with minima beside them where `minima` is a type. With `w8a8` codes are integers, and
    what is multiplied with them is quantized too (see linear/int8_activations.py). `rows`: how many rows of the matrix
    are stored so; 0 for all."""

    dtype: str
    quant_group: int = 0
    bias: bool = False
    panels: bool = False
    w8a8: bool = False
    scales: str = "f16"
    minima: str = ""
    rows: int = 0


@dataclass(frozen=True)
class MixtureShape:
    """A mixture of `num_experts` feed-forwards, of which a row takes `per_row`: those with the largest score.

    Scores are what the router gives (`logit`), its `softmax` or its `sigmoid`. An expert's weight is its score, or with
    `softmax_chosen` the softmax of the chosen ones; divided by their sum with `renormalize`; times `factor`.
    """

    num_experts: int
    per_row: int
    router: WeightLayout
    score: str
    softmax_chosen: bool
    renormalize: bool
    factor: float


@dataclass(frozen=True, kw_only=True)
class LayerShape(HeadShape):
    """One layer of a decode step. Layers of one shape share their code.

    Attributes:
        intermediate_size: width of the feed-forward.
        qkv: the runs of rows in which the matrix of queries, keys and values is stored, one as a rule.
        activation: of the gate, `silu` or `gelu_tanh`.
        post_norms: whether what attention and the feed-forward give is normed before it is added.
        page_table: index of its page table (with `quantized`, of the residual tokens).
        rotary_index: index of its table of angles; None where heads are not rotated.
        qk_norm: whether queries and keys are normed first: each head, or with `whole_qk_norm` all heads of a row.
        experts: the mixture that takes the place of one feed-forward; `gate_up` and `down` are each expert's then, in
            panels, and their widths are multiples of 64.
        quantized: the layout of quantized keys and values, whose page table is `quantized_page_table`.
        selection: the pages that a row reads, where `selected`.
    """

    intermediate_size: int
    qkv: tuple[WeightLayout, ...]
    output: WeightLayout
    gate_up: WeightLayout
    down: WeightLayout
    activation: str = "silu"
    post_norms: bool = False
    qk_norm: bool = False
    whole_qk_norm: bool = False
    experts: MixtureShape | None = None
    rotary_index: int | None = 0
    page_table: int = 0
    quantized: QuantizedLayout | None = None
    quantized_page_table: int | None = None
    selection: PageSelection | None = None


@dataclass(frozen=True)
class StepShape:
    """A step of `rows` tokens, each the last of its own context: from embedded tokens to logits.

    Attributes:
        dtype: f32 or bf16, the type of the cache and of what enters a product; the residual stream is float32.
        norm_dtype: type of the norms' weights, `dtype` unless given.
        page_size: tokens of a page.
        max_pages: pages of a sequence at most.
        chunks: parts into which a context is split.
        same_sequence: whether some rows may be tokens of one sequence; all rows' keys and values are then written
            before any is read.
        head: the output head; without one the step ends with the residual stream, in its buffer x.
        layers: without any the step begins with the residual stream.
        half: the only half of each layer that is computed, of a rank that holds a share of it. What it gives is not
            added to x but written to the buffer `added`, for the ranks to sum.
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
    half: Half | None = None
    norm_dtype: str = ""

    @property
    def norm_type(self) -> str:
        """Return the memref type of a norm's weight."""
        return memref((self.hidden_size,), self.norm_dtype or self.dtype)

    def has(self, half: Half) -> bool:
        """Return whether this half of each layer is computed."""
        return self.half in (None, half)

    @property
    def num_page_tables(self) -> int:
        tables = (index for layer in self.layers for index in (layer.page_table, layer.quantized_page_table))
        return max([-1, *(index for index in tables if index is not None)]) + 1

    @property
    def rotary_dims(self) -> dict[int, int]:
        """Return the width of the heads that each table of angles is for."""
        return {layer.rotary_index: layer.head_dim for layer in self.layers if layer.rotary_index is not None}

    @property
    def layer_kinds(self) -> tuple[LayerShape, ...]:
        """Return the layers' different shapes, in the order in which they first come."""
        return tuple(dict.fromkeys(self.layers))
