"""Attention of a span of many tokens over its paged context.

First keys and values are laid out anew, in blocks of consecutive positions. So one vector holds many keys (or many
columns of values), and one number of a query (or one weight) is spread over it: products need no sums across lanes.
Then tiles of queries walk the blocks they may see with a running softmax (FlashAttention, Dao et al. 2022). Where the
processor multiplies pairs of bfloat16, a vector's element is a pair: two columns of a key, two keys' values.

    @paged_attention:  @pack for each block of each KV head | for each tile:  @rows for each block, then finished
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from compiled_kernels.builder.functions import alloca, call_with, function, loop, when
from compiled_kernels.builder.target import Named, indices, largest_divisor
from compiled_kernels.builder.threads import entry, wait
from compiled_kernels.builder.values import Value, constant
from compiled_kernels.paged_attention.mlir_shape import BLOCK_POSITIONS, QUERIES_TOGETHER, SpanAttention
from compiled_kernels.paged_attention.mlir_softmax import clear, finish, first_seen, may_see
from compiled_kernels.paged_attention.mlir_span_tile import rows, rows_arguments


def _named(shape: SpanAttention, *names: str) -> list[Named]:
    pools = dict.fromkeys("kv", shape.pages)
    return [Named(name, (pools | shape.types)[name]) for name in names]


def pack_arguments(shape: SpanAttention) -> list[Named]:
    return [*_named(shape, "k", "v", "table", "keys", "values"), *indices("group", "block", "blocks", "context")]


def pack(shape: SpanAttention) -> None:
    """Make @pack (see `pack_arguments`): the keys [at, dim, key] and values [at, key, dim] of one block of one group go
    to at = group * blocks + block; zeros beyond the context and for the null page, which replaces freed pages."""
    each, lanes = shape.values_per_element, shape.columns
    with function("pack", pack_arguments(shape)) as given:
        at, start = given["group"] * given["blocks"] + given["block"], given["block"] * BLOCK_POSITIONS
        sides = ("keys", shape.head_dim // each, BLOCK_POSITIONS), ("values", BLOCK_POSITIONS // each, shape.head_dim)
        for name, height, width in sides:
            wide = largest_divisor(width, shape.lanes)
            with loop(0, height) as row, loop(0, width, wide) as column:
                given[name].store(constant(0, shape.element_type, wide), at, row.index, column.index)
        with loop(0, (given["context"] - start).minimum(BLOCK_POSITIONS)) as key:
            position = start + key.index
            page = given["table"][position // shape.page_size].to("index")
            place = page, given["group"], position % shape.page_size
            with when(page.compared("ne", 0)):
                read = largest_divisor(shape.head_dim, 32 if shape.uses_bf16_pairs else shape.lanes)
                for column in range(0, shape.head_dim, read):
                    loaded = given["k"].load(read, *place, column)
                    elements = loaded.bits("i32") if shape.uses_bf16_pairs else loaded.to("f32")
                    for i in range(read // each):
                        given["keys"][at, column // each + i, key.index] = elements.at(i)
                row, values = key.index // each, given["values"]
                for column in range(0, shape.head_dim, lanes):
                    loaded = given["v"].load(lanes, *place, column)
                    if shape.uses_bf16_pairs:  # into one half of each element: the keys of a pair come one by one
                        shift = (key.index % each * 16).to("i32").broadcast(lanes)
                        bits = loaded.bits("i16").to("i32", signed=False) << shift
                        loaded = values.load(lanes, at, row, column) | bits
                    values.store(loaded.to(shape.element_type), at, row, column)


def attend_spans(shape: SpanAttention) -> None:
    """Make @paged_attention(q [token, head, dim], k, v, table, (tokens, context, held)[, chosen], keys and values in
    the new layout[, sink logits], out), run by all threads at once, with what it calls."""
    for make in (pack, rows, _entry):
        make(shape)


def _entry(shape: SpanAttention) -> None:
    """Make @paged_attention: packs blocks of groups in turn with the other threads, then tiles of groups."""
    groups, tile, share = shape.num_kv_heads, shape.tile_tokens, shape.queries_per_kv
    sinks, chosen = ["sinks"] * shape.sink_logits, ["chosen"] * shape.selected
    named = _named(shape, "q", "k", "v", "table", "sizes", *chosen, "keys", "values", *sinks)
    with entry("paged_attention", [*named, Named("out", shape.types["q"])]) as given:
        tokens, context, held = (given["sizes"][at].to("index") for at in range(3))
        before, blocks = context - tokens, context.divided_up(BLOCK_POSITIONS)
        given |= {"context": context, "held": held, "before": before, "blocks": blocks}
        with loop(given["thread"], blocks * groups, given["threads"]) as item:
            group, block = item.index // blocks, item.index % blocks
            first, needed = block * BLOCK_POSITIONS, constant(1, "i1")
            if shape.mask:
                needed = may_see(shape, (before, context - 1), (first, first + BLOCK_POSITIONS - 1), group)
            with when(needed):
                call_with("pack", pack_arguments(shape), given | {"group": group, "block": block})
        wait()
        given |= {each.name: alloca(each.type) for each in _named(shape, "found", "weights")}
        with loop(given["thread"], tokens.divided_up(tile) * groups, given["threads"]) as item:
            group, token = item.index % groups, item.index // groups * tile
            count = (tokens - token).minimum(tile)
            here = given | {"group": group, "token": token, "queries": count * share}
            with loop(0, shape.tile_slots) as slot:
                clear(shape, given["found"], (slot.index,))
            with loop(0, (before + token + count).divided_up(BLOCK_POSITIONS)) as block:
                start = block.index * BLOCK_POSITIONS
                with when(_needed(shape, here, start, count)), loop(0, here["queries"], QUERIES_TOGETHER) as slot:
                    places = {"at": group * blocks + block.index, "start": start, "slot": slot.index}
                    call_with("rows", rows_arguments(shape), here | places)
            with loop(0, here["queries"]) as slot:
                row, head = token + slot.index // share, group * share + slot.index % share
                sink = given["sinks"][head] if shape.sink_logits else None
                finish(shape, given["found"], [(slot.index,)], sink, given["out"], (row, head, 0))


def _needed(shape: SpanAttention, given: dict[str, Value], start: Value, count: Value) -> Value:
    """Return whether a block reaches into the window of a tile's first token, or holds sinks; whether the mask may show
    one of its keys to one of the tile's queries; and whether one of the tile's tokens has chosen a page of it."""
    earliest, end, needed = given["before"] + given["token"], start + BLOCK_POSITIONS, [constant(1, "i1")]
    if shape.sliding_window:
        near = first_seen(shape, earliest + 1).below(end)
        needed.append(near | start.below(shape.num_sink_tokens))
    if shape.mask:
        needed.append(may_see(shape, (earliest, earliest + count - 1), (start, end - 1), given["group"]))
    if shape.selected:
        pages = start // shape.page_size, end.minimum(given["context"]).divided_up(shape.page_size)
        needed.append(_chosen_by_any(shape, given, pages, count))
    return functools.reduce(Value.__and__, needed)


def _chosen_by_any(shape: SpanAttention, given: dict[str, Value], pages: Sequence[Value], count: Value) -> Value:
    """Return whether one of the tile's tokens has chosen one of these pages."""
    with loop(0, count, carried=[constant(0, "i1")]) as token:
        line = ((given["token"] + token.index) * shape.num_kv_heads + given["group"]) * given["held"]
        with loop(*pages, carried=token.carried) as page:
            page.carry([page.carried[0] | given["chosen"][line + page.index].compared("ne", 0)])
        token.carry(page.results)
    return token.results[0]
