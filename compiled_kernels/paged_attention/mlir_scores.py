"""Decode attention: scores of a few query heads with the keys of one page."""

from __future__ import annotations

from typing import NamedTuple

from compiled_kernels.mlir_text import Lines
from compiled_kernels.paged_attention.mlir_shape import DecodeAttention


class QueryHead(NamedTuple):
    """A query head at work: its `number` in the group, its `slot` in scores and weights, its `owner`, the number
    among all heads, in `partial`; the latter two as MLIR names."""

    number: int
    slot: str
    owner: str


def score_keys(lines: Lines, shape: DecodeAttention, heads: list[QueryHead]) -> None:
    """Emit scores[slot, offset] = q · k, for offsets from %from to %to."""
    if shape.uses_bf16_pairs and shape.page_size % 16 == 0:
        _sixteen_keys_at_once(lines, shape, heads)
    else:
        _score_keys(lines, shape, heads)


def _score_keys(lines: Lines, shape: DecodeAttention, heads: list[QueryHead]) -> None:
    read, lanes = (32, 16) if shape.uses_bf16_pairs else (shape.columns, shape.columns)  # numbers a vector: read, and of sums
    columns = [lines.index(at) for at in range(0, shape.head_dim, read)]
    queries = _queries(lines, shape, heads, columns, read)
    zero = lines.constant("0.0", lanes)
    lines.emit("scf.for %o = %from to %to step %one {")
    fetch(lines, shape, "%k", "%o")
    key = [_vector(lines, shape, "%k", f"%page, %group, %o, {column}", shape.pages, read) for column in columns]
    for head, query in zip(heads, queries, strict=True):
        total = zero
        for a, b in zip(query, key, strict=True):
            total = lines.dot_pairs(total, a, b) if shape.uses_bf16_pairs else lines.fma(a, b, total, read)
        lines.emit(f"memref.store {lines.hsum(total, lanes)}, %scores[{head.slot}, %o] : {shape.types['scores']}")
    lines.emit("}")


def _sixteen_keys_at_once(lines: Lines, shape: DecodeAttention, heads: list[QueryHead]) -> None:
    """Score 16 keys together, so that their sums across lanes are taken together. A run of 16 may reach beyond the
    offsets in use; such scores are ignored."""
    columns = [lines.index(at) for at in range(0, shape.head_dim, 32)]
    queries = _queries(lines, shape, heads, columns, 32)
    zero = lines.constant("0.0", 16)
    run = lines.index(16)
    start = lines.let(f"arith.muli {lines.let(f'arith.divui %from, {run} : index')}, {run} : index")
    lines.emit(f"scf.for %o = {start} to %to step {run} {{")
    keys = [lines.let(f"arith.addi %o, {lines.index(i)} : index") for i in range(16)]
    for key in keys:
        fetch(lines, shape, "%k", key)
    for head, query in zip(heads, queries, strict=True):
        sums = []
        for key in keys:
            total = zero
            for column, part in zip(columns, query, strict=True):
                loaded = _vector(lines, shape, "%k", f"%page, %group, {key}, {column}", shape.pages, 32)
                total = lines.dot_pairs(total, part, loaded)
            sums.append(total)
        lines.store(lines.hsums(sums, 16), "%scores", f"{head.slot}, %o", shape.types["scores"], 16)
    lines.emit("}")


def fetch(lines: Lines, shape: DecodeAttention, memory: str, offset: str) -> None:
    """Ask for what the next page holds at `offset`, a cache line at a time: pages lie anywhere, and between two of them
    the processor would have nothing under way."""
    line = 64 // (4 if shape.dtype == "f32" else 2)
    for at in range(0, shape.head_dim, line):
        place = f"%next, %group, {offset}, {lines.index(at)}"
        lines.emit(f"memref.prefetch {memory}[{place}], read, locality<3>, data : {shape.pages}")


def _queries(lines: Lines, shape: DecodeAttention, heads: list[QueryHead], columns: list[str], read: int) -> list[list[str]]:
    """Emit each head's query, vector by vector."""
    kind = shape.types["queries"]
    return [
        [_vector(lines, shape, "%q", f"{lines.index(head.number)}, {column}", kind, read) for column in columns]
        for head in heads
    ]


def _vector(lines: Lines, shape: DecodeAttention, memory: str, at: str, kind: str, read: int) -> str:
    """Emit `read` numbers as they are multiplied: bfloat16 pairs, or float32."""
    loaded = lines.load(memory, at, kind, read, shape.dtype)
    return loaded if shape.uses_bf16_pairs else lines.extend(loaded, read, shape.dtype)
