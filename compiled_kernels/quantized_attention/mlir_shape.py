"""The shape that attention over quantized pages is compiled for: one function for any number of rows, pages and
sequences."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from compiled_kernels.mlir_text import PAGES, Target, divisor, memref
from compiled_kernels.paged_attention.mlir_shape import HEADS, Attention
from compiled_kernels.quantized_attention.packed import Kind, per_word

ANY = 1 << 20  # rows: a bound for types only


@dataclass(frozen=True)
class Side:
    """Quantized keys or values: codes [page, group, word, kept] of 32 bits, scales and minima [page, group,
    part, summed] (see quantize.py). `exact`: weights stay float32, whatever the processor can."""

    kind: Kind
    groups: int
    summed: int
    kept: int
    run: int
    target: Target
    exact: bool

    @property
    def each(self) -> int:
        """Return the codes of a word."""
        return per_word(self.kind)

    @property
    def words(self) -> int:
        return self.summed // self.each

    @property
    def lanes(self) -> int:
        """Return the words of a vector."""
        return divisor(self.run, self.target.lanes)

    @property
    def folds(self) -> int:
        """Return the weights of a vector."""
        return divisor(self.summed, self.target.lanes)

    @property
    def fixed(self) -> bool:
        """Return whether weights are fixed-point numbers of 16 bits, multiplied with four codes at a time."""
        return self.kind != "fp8" and self.target.byte_dots and not self.exact and self.lanes == 16 and self.folds % 4 == 0

    @property
    def codes(self) -> str:
        return memref((PAGES, self.groups, self.words, self.kept), "i32")

    @property
    def scales(self) -> str:
        return memref((PAGES, self.groups, self.kept // self.run, self.summed), "f16")

    @property
    def folded(self) -> str:
        """Return the type of the weights of a few heads, scaled: float32, or the high and the low bytes of fixed-point
        numbers."""
        if self.fixed:
            return memref((HEADS, 2, self.summed // 4), "i32")
        return memref((HEADS, self.summed), "f32")


@dataclass(frozen=True, kw_only=True)
class QuantizedAttention(Attention):
    """Queries over quantized keys and values in quantized pages, and over the others in pages of `dtype`;
    `tokens_per_scale` tokens share a key scale, `columns_per_scale` columns a value scale; `residual_length` and
    `num_sink_tokens` as in `QuantizationRule`."""

    rows: int = ANY
    held: int = ANY
    key_kind: Kind
    value_kind: Kind
    key_run: int
    value_run: int
    lag: int
    first: int

    @cached_property
    def key_side(self) -> Side:
        return Side(self.key_kind, self.groups, self.dim, self.size, self.key_run, self.target, self.kind == "f32")

    @cached_property
    def value_side(self) -> Side:
        return Side(self.value_kind, self.groups, self.size, self.dim, self.value_run, self.target, self.kind == "f32")

    @property
    def packed(self) -> tuple[str, ...]:
        """Return the types of codes, scales and minima: of keys, then of values."""
        return tuple(kind for side in (self.key_side, self.value_side) for kind in (side.codes, side.scales, side.scales))

    @property
    def flat(self) -> str:
        """Return the type of a page table row after row, and of all else that is one number a row."""
        return memref((min(PAGES, self.rows * self.held),), "i32")

    @property
    def floats(self) -> str:
        """Return the type of the queries of one group as float32."""
        return memref((self.share, self.dim), "f32")
