"""Say what a query reads of quantized and residual pages (see paged_attention/mlir_pages.py).

    positions   0 .... sinks | sinks ............ quantized_until | quantized_until ... length
    pages        residual    |    quantized, split into chunks    |         residual
    seen by      chunk 0     |    every chunk its own part        |      the last chunk

A window cuts all three from the left; of what lies before it the sinks, which are among the first `num_sink_tokens`,
are still seen. What a query reads depends on its position alone, however its text was cut into steps.
"""

from __future__ import annotations

from compiled_kernels.builder.values import Value, index
from compiled_kernels.paged_attention.mlir_pages import Context, PositionRun, ReadDensePages
from compiled_kernels.paged_attention.mlir_tile import PageKind
from compiled_kernels.quantized_attention.mlir_sums import ReadQuantizedPages


class QuantizedContext(Context):
    """Say that a query reads residual (dense) pages and quantized ones."""

    @property
    def kinds(self) -> tuple[PageKind, ...]:
        return ReadDensePages(self.shape), ReadQuantizedPages(self.shape)

    def _runs_between(self, seen: Value, length: Value) -> list[PositionRun]:
        (residual, quantized), rule = self.kinds, self.shape.layout.rule
        until = (length - length.minimum(rule.residual_length)) // rule.quant_group * rule.quant_group
        sinks = index(rule.num_sink_tokens)
        return [
            PositionRun(residual, "first", seen, until.minimum(sinks)),
            PositionRun(quantized, "each", sinks.maximum(seen), until),
            PositionRun(residual, "last", until.maximum(seen), length),
        ]
