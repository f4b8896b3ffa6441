"""What a decode step is compiled for: a decoder's shapes and a number of rows, as data."""

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
        """How many tensors that takes: the matrix, its scales, its bias."""
        return 1 + (self.kind in ("i8", "i4")) + self.bias


@dataclass(frozen=True)
class Packing:
    """How a layer's settled keys and values are packed, in the page table `table` (see quantized_attention/rule.py);
    `run` tokens share a key scale, `columns` columns a value scale."""

    keys: Kind
    values: Kind
    run: int
    columns: int
    lag: int
    first: int
    table: int


@dataclass(frozen=True)
class LayerShape:
    """One layer: `heads` query heads on `groups` key/value heads of width `dim`, a feed-forward of width `hidden`.

    `table` is the index of its page table (with `packing`, of the tokens that are not packed), `turn` that of its angles, None where heads are not turned; with `qk_norm`
    query and key heads are normed first. Layers of one shape share their code.
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
        """Tensors of its weights: two norms, four products, and what attention has beside them."""
        products = sum(weight.tensors for weight in (self.qkv, self.output, self.gate_up, self.down))
        return 2 + products + 2 * self.qk_norm + self.sink_logits


@dataclass(frozen=True)
class StepShape:
    """A step of `rows` tokens, each the last of its own context: from embedded tokens to logits.

    `kind` (f32 or bf16) is the type of the cache and of what enters a product; the residual stream is float32.
    `held` pages a sequence at most, of `size` tokens; `chunks` is into how many parts a context is split. Rows are
    tokens of different sequences or, with `together`, of some of the same: all rows' keys and values are then written
    before any is read. Without a `head` the step ends with the residual stream, in its buffer x; without `layers` it
    begins there.
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
        """Width of the heads that each table of angles is for."""
        return {layer.turn: layer.dim for layer in self.layers if layer.turn is not None}

    @property
    def kinds(self) -> tuple[LayerShape, ...]:
        """The layers' different shapes, in the order in which they first come."""
        return tuple(dict.fromkeys(self.layers))
