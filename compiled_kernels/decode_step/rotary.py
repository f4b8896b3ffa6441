"""The computation between a layer's products: normalize queries and keys, rotate them by their position's angles, and
write keys and values."""

from __future__ import annotations

from typing import Literal

from compiled_kernels.builder.functions import Given, loop
from compiled_kernels.builder.target import largest_divisor
from compiled_kernels.builder.values import Value
from compiled_kernels.builder.vectors import copy, norm_factor
from compiled_kernels.decode_step.layer_kernel import LayerKernel

Place = tuple[Value | int, ...]


def rotate_queries(layer: LayerKernel, given: Given) -> None:
    """Emit the query heads of one row and one key/value head, normalized and rotated, to `queries` [query head,
    dim].
    """
    with loop(0, layer.shape.queries_per_kv) as head:
        number = given["group"] * layer.shape.queries_per_kv + head.index
        rotated_head(layer, "query", given, (given["row"], number), given["queries"], (head.index,))


def keep(layer: LayerKernel, given: Given) -> None:
    """Write a row's key and value of one key/value head to the page and offset of the row's last position."""
    head, size = (given["row"], given["group"]), layer.step.page_size
    position = given["lengths"][given["row"]].to("index") - 1
    page = given["table"][given["row"], position // size].to("index")
    place = page, given["group"], position % size
    rotated_head(layer, "key", given, head, given["keys"], place)
    copy_value(layer, given, head, given["values"], place)


def rotated_head(
    layer: LayerKernel, of: Literal["query", "key"], given: Given, head: tuple[Value, Value], out: Value,
    place: Place,
) -> None:  # fmt: skip
    """Emit out[place] = one query or key `head` (its row and number). It is normalized, and its two halves are rotated
    against each other (RoPE, Su et al. 2021), if the layer does so."""
    shape, qkv, (row, number) = layer.shape, given[layer.qkv_out.name], head
    dim, half, lanes = shape.head_dim, shape.head_dim // 2, _lanes(layer)
    heads, before = (shape.num_heads, 0) if of == "query" else (shape.num_kv_heads, shape.num_heads * dim)
    within, norm = number * dim, layer.head_norms.get(of)
    normed = (before, heads * dim) if shape.whole_qk_norm else (within + before, dim)
    factor = norm and norm_factor(qkv, row, *normed, layer.step.eps, lanes)
    for start in range(0, half, lanes):
        parts = []
        for column in (start, start + half):
            part = qkv.load(lanes, row, within + before + column)
            if norm and factor:
                gain = given[norm.name].load(lanes, within + column if shape.whole_qk_norm else column)
                part = part * factor * gain.to("f32")
            parts.append(part)
        if layer.angles:
            cos, sin = (given[each.name].load(lanes, row, start) for each in layer.angles)
            a, b = parts
            parts = [a * cos - b * sin, b * cos + a * sin]
        for column, part in zip((start, start + half), parts, strict=True):
            out.store(part, *place, column)


def copy_value(layer: LayerKernel, given: Given, head: tuple[Value, Value], out: Value, place: Place) -> None:
    """Emit out[place] = the value of one key/value head; `head` is its row and number."""
    shape, (row, number) = layer.shape, head
    column = number * shape.head_dim + (shape.num_heads + shape.num_kv_heads) * shape.head_dim
    copy(given[layer.qkv_out.name], (row, column), out, (*place, 0), shape.head_dim, _lanes(layer))


def _lanes(layer: LayerKernel) -> int:
    return largest_divisor(layer.shape.head_dim // 2, layer.step.target.lanes)
