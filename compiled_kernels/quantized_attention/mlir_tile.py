"""Attention over one quantized page, for a few query heads at a time: scores, weights, sums."""

from __future__ import annotations

from compiled_kernels.mlir_text import Lines
from compiled_kernels.paged_attention.mlir_rules import Rules
from compiled_kernels.paged_attention.mlir_shape import HEADS_TOGETHER
from compiled_kernels.paged_attention.mlir_tile import QueryHead, query_heads, weigh
from compiled_kernels.quantized_attention.mlir_shape import QuantizedAttention
from compiled_kernels.quantized_attention.mlir_sums import weighted_sums
from compiled_kernels.quantized_attention.quantize import QUANTIZED_NAMES


def quantized_arguments(shape: QuantizedAttention) -> str:
    return ", ".join(f"%{name}: {kind}" for name, kind in zip(QUANTIZED_NAMES, shape.quantized_types, strict=True))


def quantized_tile(shape: QuantizedAttention, name: str) -> str:
    """Emit @{name}_quantized_tile(q [share, dim] f32, quantized keys and values, page, next page, group, from, to, base,
    position, partial, row, chunk, scores, weights): as @{name}_tile of residual pages. Every offset of the page is scored; those
    outside [from, to) weigh nothing, whatever lies there."""
    t, lines, rules = shape.types, Lines(), Rules(shape, f"{name}_quantized_tile")
    for first in range(0, shape.queries_per_kv, HEADS_TOGETHER):
        _heads(lines, shape, range(first, min(first + HEADS_TOGETHER, shape.queries_per_kv)), rules)
    folded = [f"%folded_{side} = memref.alloca() {{alignment = 64 : i64}} : {kind}" for side, kind in _folded(shape)]
    return f"""{rules.text}
func.func private @{name}_quantized_tile(%q: {shape.float_queries_type}, {quantized_arguments(shape)}, %page: index,
    %next: index, %group: index, %from: index, %to: index, %base: index, %position: index, %partial: {t["partial"]},
    %row: index, %chunk: index, %scores: {t["scores"]}, %weights: {t["weights"]}) {{
{chr(10).join(folded)}
{lines.text()}
return
}}"""


def _folded(shape: QuantizedAttention) -> list[tuple[str, str]]:
    return [("k", shape.key_operand.folded), ("v", shape.value_operand.folded)]


def _heads(lines: Lines, shape: QuantizedAttention, numbers: range, rules: Rules) -> None:
    heads = query_heads(lines, shape, numbers)
    _score(lines, shape, heads)
    factors = {head: weigh(lines, shape, head, rules) for head in heads}
    _mix(lines, shape, heads, factors)


def _score(lines: Lines, shape: QuantizedAttention, heads: list[QueryHead]) -> None:
    """Emit scores[slot, offset] = q · k, for all offsets of the page."""
    side, scores = shape.key_operand, shape.types["scores"]

    def query(head: QueryHead, column: str) -> str:
        return lines.load("%q", f"{lines.index(head.number)}, {column}", shape.float_queries_type, side.folds, "f32")

    def keep(head: QueryHead, offset: str, found: str) -> None:
        lines.store(found, "%scores", f"{head.slot}, {offset}", scores, side.lanes)

    weighted_sums(lines, side, "k", heads, query, False, keep)


def _mix(lines: Lines, shape: QuantizedAttention, heads: list[QueryHead], factors: dict[QueryHead, str]) -> None:
    """Emit partial = partial * factor + weights · values."""
    side, scores, partial = shape.value_operand, shape.types["scores"], shape.types["partial"]

    def weight(head: QueryHead, offset: str) -> str:
        return lines.load("%scores", f"{head.slot}, {offset}", scores, side.folds, "f32")

    def join(head: QueryHead, column: str, found: str) -> None:
        place = f"%row, {head.owner}, %chunk, {column}"
        before = lines.load("%partial", place, partial, side.lanes, "f32")
        factor = lines.splat(factors[head], side.lanes)
        lines.store(lines.fma(before, factor, found, side.lanes), "%partial", place, partial, side.lanes)

    weighted_sums(lines, side, "v", heads, weight, True, join)
