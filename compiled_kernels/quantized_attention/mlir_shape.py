"""Define the shape that attention over quantized pages is compiled for: one function for any number of rows, pages and
sequences."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from compiled_kernels.builder.target import SIZE_BOUND, Target, largest_divisor, memref
from compiled_kernels.paged_attention.mlir_shape import HEADS_TOGETHER, DecodeAttention, PagedHeads, SpanAttention
from compiled_kernels.quantized_attention.pages import QuantizationRule
from compiled_kernels.quantized_attention.quantize import QuantFormat, codes_per_word


@dataclass(frozen=True)
class QuantizedOperand:
    """The layout of quantized keys or values: codes [page, group, word, kept] of 32 bits, scales and minima [page,
    group, part, summed] (see quantize.py). With `exact`, the weights that multiply codes stay float32 even if the
    processor has integer dot products."""

    format: QuantFormat
    num_kv_heads: int
    summed: int
    kept: int
    numbers_per_scale: int
    target: Target
    exact: bool

    @property
    def codes_per_word(self) -> int:
        """Return the number of codes in a word."""
        return codes_per_word(self.format)

    @property
    def bits(self) -> int:
        """Return the number of bits of a code."""
        return 32 // self.codes_per_word

    @property
    def words(self) -> int:
        return self.summed // self.codes_per_word

    @property
    def lanes(self) -> int:
        """Return the number of words in a vector."""
        return largest_divisor(self.numbers_per_scale, self.target.lanes)

    @property
    def folds(self) -> int:
        """Return the number of weights in a vector."""
        return largest_divisor(self.summed, self.target.lanes)

    @property
    def uses_int8_dot(self) -> bool:
        """Return whether weights are fixed-point numbers of 16 bits, which integer dot products multiply with four
        codes at a time.
        """
        return (
            self.format != "fp8"
            and self.target.has_int8_dot
            and not self.exact
            and self.lanes == 16
            and self.folds % 4 == 0
        )

    @property
    def codes(self) -> str:
        return memref((SIZE_BOUND, self.num_kv_heads, self.words, self.kept), "i32")

    @property
    def scales(self) -> str:
        return memref((SIZE_BOUND, self.num_kv_heads, self.kept // self.numbers_per_scale, self.summed), "f16")

    @property
    def folded(self) -> str:
        """Return the memref type of the weights of a few heads, already multiplied by the codes' scales: float32, or
        the high and low bytes of fixed-point numbers."""
        if self.uses_int8_dot:
            return memref((HEADS_TOGETHER, 2, self.summed // 4), "i32")
        return memref((HEADS_TOGETHER, self.summed), "f32")


@dataclass(frozen=True)
class QuantizedLayout:
    """The layout of quantized keys and values: `rule.quant_group` tokens share a key scale, and `columns_per_scale`
    columns share a value scale."""

    key_format: QuantFormat
    value_format: QuantFormat
    columns_per_scale: int
    rule: QuantizationRule


@dataclass(frozen=True, kw_only=True)
class QuantizedHeads(PagedHeads):
    """The heads of attention over two kinds of pages: quantized pages, and residual pages of `dtype`."""

    layout: QuantizedLayout

    def _operand(self, format: QuantFormat, summed: int, kept: int, numbers_per_scale: int) -> QuantizedOperand:
        exact = self.dtype == "f32"
        return QuantizedOperand(format, self.num_kv_heads, summed, kept, numbers_per_scale, self.target, exact)

    @cached_property
    def key_operand(self) -> QuantizedOperand:
        tokens = self.layout.rule.quant_group
        return self._operand(self.layout.key_format, self.head_dim, self.page_size, tokens)

    @cached_property
    def value_operand(self) -> QuantizedOperand:
        columns = self.layout.columns_per_scale
        return self._operand(self.layout.value_format, self.page_size, self.head_dim, columns)


@dataclass(frozen=True, kw_only=True)
class QuantizedAttention(QuantizedHeads, DecodeAttention):
    """Attention of single queries, one for each row, over quantized pages."""


@dataclass(frozen=True, kw_only=True)
class QuantizedSpan(QuantizedHeads, SpanAttention):
    """Attention of one span over quantized pages."""
