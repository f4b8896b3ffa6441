"""Say what a row reads of quantized and residual pages (see paged_attention/mlir_decode.py).

    positions   0 .... sinks | sinks ............ quantized_until | quantized_until ... length
    pages        residual    |    quantized, split into chunks    |         residual
    seen by      chunk 0     |    every chunk its own part        |      the last chunk

A window cuts all three from the left; of what lies before it the sinks, which are among the first `num_sink_tokens`,
are still seen. Every token reads by the same arithmetic, however its text was cut into steps.
"""

from __future__ import annotations

from compiled_kernels.builder.values import Value, index
from compiled_kernels.paged_attention.mlir_decode import Context, PositionRun
from compiled_kernels.paged_attention.mlir_tile import DecodePages, ReadDensePages
from compiled_kernels.quantized_attention.mlir_shape import QuantizedAttention
from compiled_kernels.quantized_attention.mlir_sums import ReadQuantizedPages


class QuantizedContext(Context):
    """Say that a row reads residual (dense) pages and quantized ones."""

    shape: QuantizedAttention

    @property
    def kinds(self) -> tuple[DecodePages, ...]:
        return ReadDensePages(self.shape), ReadQuantizedPages(self.shape)

    def runs(self, seen: Value, length: Value) -> list[PositionRun]:
        residual, quantized = self.kinds
        rule = self.shape.layout.rule
        # where quantized positions end and begin: both 0 if nothing is quantized
        whole = (length - length.minimum(rule.residual_length)) // rule.quant_group * rule.quant_group
        some = whole.compared("ugt", rule.num_sink_tokens)
        until, front = (some.select(each, index(0)) for each in (whole, index(rule.num_sink_tokens)))
        return [
            PositionRun(residual, "first", seen, front),
            PositionRun(quantized, "each", front.maximum(seen), until),
            PositionRun(residual, "last", until.maximum(seen), length),
        ]
