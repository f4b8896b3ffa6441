"""The shape that a decode step is compiled for: the sizes of a decoder and a number of rows, as data."""

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
    """The layout in which a weight matrix is stored.

    `dtype` is `f32` or `bf16`, stored row by row or in `panels` (see blocked/layout.py); in panels it may also be a
    format of `WORDS` or a kind of codes (see blocked/shape.py). Scales have type `scales`, one for `quant_group`
    columns (0: for a row); with a type `minima` there are minima as well. With `w8a8`, integer codes are multiplied
    with quantized activations (see linear/int8_activations.py). `rows`: the number of rows of the matrix stored this
    way; 0 for all.
    """

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
    """The mixture of `num_experts` feed-forwards, of which a row uses the `per_row` with the largest scores.

    Scores are the router's output (`logit`), its `softmax` or its `sigmoid`. An expert's weight is its score, or with
    `softmax_chosen` the softmax over the chosen experts; `renormalize` divides weights by their sum; `factor`
    multiplies them.
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
    """One layer of a decode step. Layers of equal shape share their code.

    Attributes:
        intermediate_size: width of the feed-forward.
        qkv: the runs of rows in which the matrix of queries, keys and values is stored, usually one.
        activation: activation of the gate, `silu` or `gelu_tanh`.
        post_norms: whether the results of attention and feed-forward are normalized before they are added.
        page_table: index of its page table (with `quantized`, of the table of residual tokens).
        rotary_index: index of its table of angles; None if heads are not rotated.
        qk_norm: whether queries and keys are normalized first: each head, or with `whole_qk_norm` all heads of a row.
        experts: the mixture that replaces the feed-forward; `gate_up` and `down` are then layouts of each expert, in
            panels, with widths that are multiples of 64.
        quantized: the layout of quantized keys and values; their page table is `quantized_page_table`.
        selection: the pages that a row reads if `selected`.
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
    """A decode step of `rows` tokens, each the last of its own context: it goes from embedded tokens to logits.

    Attributes:
        dtype: f32 or bf16, the type of the cache and of the products' operands; the residual stream is float32.
        norm_dtype: type of the norms' weights, `dtype` unless given.
        page_size: tokens of a page.
        max_pages: maximum pages of a sequence.
        chunks: parts into which a context is split.
        same_sequence: whether some rows may be tokens of one sequence; all rows' keys and values are then written
            before any is read.
        head: the output head; without one the step ends with the residual stream, in its buffer x.
        layers: the layers; without layers the step only applies the head to the residual stream.
        half: the half of each layer to compute, on a rank with a share of each layer. Its result is written to the
            buffer `added`, not added to x, so that the ranks can sum it.
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
        """Return whether the step computes this half of each layer: attention or feed-forward."""
        return self.half in (None, half)

    @property
    def num_page_tables(self) -> int:
        tables = (index for layer in self.layers for index in (layer.page_table, layer.quantized_page_table))
        return max([-1, *(index for index in tables if index is not None)]) + 1

    @property
    def rotary_dims(self) -> dict[int, int]:
        """Return, for each table of angles, the width of the heads that it rotates."""
        return {layer.rotary_index: layer.head_dim for layer in self.layers if layer.rotary_index is not None}

    @property
    def layer_kinds(self) -> tuple[LayerShape, ...]:
        """Return the layers' different shapes, in the order of their first occurrence."""
        return tuple(dict.fromkeys(self.layers))
