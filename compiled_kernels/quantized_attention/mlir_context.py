"""Describe the quantized and residual pages that a query reads (see paged_attention/mlir_pages.py).

    positions   0 .... sinks | sinks ............ quantized_until | quantized_until ... length
    pages        residual    |    quantized, split into chunks    |         residual
    seen by      chunk 0     |    every chunk its own part        |      the last chunk

A window limits all three from the left, except for the sinks, the first `num_sink_tokens`, which are always seen. The
pages that a query reads depend only on its position, not on the steps in which its text was computed.
"""

from __future__ import annotations

from compiled_kernels.builder.values import Value, index
from compiled_kernels.paged_attention.mlir_pages import Context, PositionRun, ReadDensePages
from compiled_kernels.paged_attention.mlir_tile import PageKind
from compiled_kernels.quantized_attention.mlir_sums import ReadQuantizedPages


class QuantizedContext(Context):
    """The positions that a query reads: some from residual (dense) pages, some from quantized pages."""

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
