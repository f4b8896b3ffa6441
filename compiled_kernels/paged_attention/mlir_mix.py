"""Decode attention: values of one page, weighted, join the sums of a few query heads."""

from __future__ import annotations

from compiled_kernels.mlir_text import Lines, vector
from compiled_kernels.paged_attention.mlir_scores import QueryHead, fetch
from compiled_kernels.paged_attention.mlir_shape import DecodeAttention


def mix_values(lines: Lines, shape: DecodeAttention, heads: list[QueryHead], factors: list[str]) -> None:
    """Emit partial = partial * factor + weights · values, for offsets from %from to %to.

    As many sums as registers: wide heads are walked in runs of columns.
    """
    columns = [lines.index(at) for at in range(0, shape.head_dim, shape.columns)]
    most = max(1, shape.target.accumulators // len(heads))
    for first in range(0, len(columns), most):
        run = columns[first : first + most]
        sums, begin = _earlier(lines, shape, heads, factors, run), "%from"
        if shape.uses_bf16_pairs and len(run) % 2 == 0:
            sums, begin = _two_keys_at_once(lines, shape, heads, run, sums)
        sums = iter(_add_keys(lines, shape, heads, run, sums, begin))
        for head in heads:
            for column in run:
                lines.store(next(sums), "%partial", _place(head, column), shape.types["partial"], shape.columns)


def _place(head: QueryHead, column: str) -> str:
    return f"%row, {head.owner}, %chunk, {column}"


def _earlier(lines: Lines, shape: DecodeAttention, heads: list[QueryHead], factors: list[str], run: list[str]) -> list[str]:
    """Emit sums of earlier offsets times each head's factor, a vector for each head and column."""
    lanes, sums = shape.columns, []
    for head, factor in zip(heads, factors, strict=True):
        factors_ = lines.splat(factor, lanes)
        for column in run:
            before = lines.load("%partial", _place(head, column), shape.types["partial"], lanes, "f32")
            sums.append(lines.let(f"arith.mulf {before}, {factors_} : {vector(lanes)}"))
    return sums


def _add_keys(
    lines: Lines, shape: DecodeAttention, heads: list[QueryHead], run: list[str], sums: list[str], begin: str
) -> list[str]:
    """Emit the sums, moved on by the keys from `begin` to %to."""
    t, lanes, mark = shape.types, shape.columns, lines.serial
    names = [f"%a{mark}_{i}" for i in range(len(sums))]
    found = lines.begin_loop(f"%r{mark}", f"%o = {begin} to %to step %one", names, sums, lanes)
    fetch(lines, shape, "%v", "%o")
    loaded = (lines.load("%v", f"%page, %group, %o, {column}", t["pages"], lanes, shape.dtype) for column in run)
    values = [lines.extend(value, lanes, shape.dtype) for value in loaded]
    moved, carried = [], iter(names)
    for head in heads:
        weight = lines.splat(lines.let(f"memref.load %scores[{head.slot}, %o] : {t['scores']}"), lanes)
        moved += [lines.fma(weight, value, next(carried), lanes) for value in values]
    lines.end_loop(moved, lanes)
    return found


def _two_keys_at_once(
    lines: Lines, shape: DecodeAttention, heads: list[QueryHead], run: list[str], sums: list[str]
) -> tuple[list[str], str]:
    """Emit the sums, moved on by pairs of keys as dot products; and the offset of a last key that has no partner."""
    two = lines.index(2)
    count = lines.let("arith.subi %to, %from : index")
    odd = lines.let(f"arith.remui {count}, {two} : index")
    last = lines.let(f"arith.subi %to, {odd} : index")
    mark = lines.serial
    names = [f"%p{mark}_{i}" for i in range(len(sums))]
    found = lines.begin_loop(f"%b{mark}", f"%o = %from to {last} step {two}", names, sums, 16)
    for offset in ("%o", lines.let("arith.addi %o, %one : index")):
        fetch(lines, shape, "%v", offset)
    values = _woven(lines, shape, run)
    moved, carried = [], iter(names)
    for head in heads:
        weight = lines.splat_pair(lines.load("%weights", f"{head.slot}, %o", shape.types["weights"], 2, "bf16"))
        moved += [lines.dot_pairs(next(carried), value, weight) for value in values]
    lines.end_loop(moved, 16)
    return found, last


def _woven(lines: Lines, shape: DecodeAttention, run: list[str]) -> list[str]:
    """Emit the values of keys %o and %o + 1 as pairs, 16 columns a vector; two such come from one load of each key."""
    partner = lines.let("arith.addi %o, %one : index")
    values = []
    for column in run[::2]:
        first, second = (
            lines.load("%v", f"%page, %group, {offset}, {column}", shape.pages, 32, "bf16")
            for offset in ("%o", partner)
        )
        woven = lines.let(f"vector.interleave {first}, {second} : vector<32xbf16> -> vector<64xbf16>")
        for at in (0, 32):
            part = f"{{offsets = [{at}], sizes = [32], strides = [1]}} : vector<64xbf16> to vector<32xbf16>"
            values.append(lines.let(f"vector.extract_strided_slice {woven} {part}"))
    return values
