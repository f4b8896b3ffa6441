"""Build attention of a span of many tokens over its paged context.

First, keys and values are repacked in blocks of consecutive positions. So one vector holds many keys (or many columns
of values), and is multiplied by one number of a query (or by one weight): products need no sums across lanes. Then
tiles of queries process the blocks that they may see, with a running softmax (FlashAttention, Dao et al. 2022). If the
processor multiplies pairs of bfloat16, a vector's element is a pair: two columns of a key, or the values of two keys.

    @{operator}:  @{kind}_pack for each block of each KV head | for each tile:  @{kind}_rows for each block
"""

from __future__ import annotations

from dataclasses import replace

from compiled_kernels.builder.functions import alloca, call_with, function, loop, when
from compiled_kernels.builder.target import Named, indices
from compiled_kernels.builder.threads import entry, wait
from compiled_kernels.builder.values import Value, constant
from compiled_kernels.paged_attention.mlir_pages import Context
from compiled_kernels.paged_attention.mlir_shape import BLOCK_POSITIONS, QUERIES_TOGETHER, SIZES, SpanAttention
from compiled_kernels.paged_attention.mlir_softmax import clear, finish, may_see
from compiled_kernels.paged_attention.mlir_span_tile import rows, rows_arguments
from compiled_kernels.paged_attention.mlir_tile import PageKind


def _named(shape: SpanAttention, *names: str) -> list[Named]:
    return [Named(name, shape.types[name]) for name in names]


def _pack_arguments(shape: SpanAttention, pages: PageKind) -> list[Named]:
    places = indices("group", "at", "start", "before", "context")
    return [*pages.memories, Named("table", shape.flat_type), *_named(shape, "keys", "values"), *places]


def pack(context: Context, pages: PageKind) -> None:
    """Build the function @{kind}_pack (see `_pack_arguments`): it repacks one block of a key/value head from these
    pages, the positions from `start` on, into keys [at, dim, key] and values [at, key, dim]. For a position that no
    query of the span reads, values are zero and keys arbitrary."""
    shape, together = context.shape, pages.positions_together
    with function(f"{pages.kind}_pack", _pack_arguments(shape, pages)) as given:
        height, lanes = BLOCK_POSITIONS // shape.values_per_element, shape.columns
        lengths = given["before"] + 1, given["context"]
        with loop(0, height) as row, loop(0, shape.head_dim, lanes) as column:
            given["values"].store(constant(0, shape.element_type, lanes), given["at"], row.index, column.index)
        with loop(0, BLOCK_POSITIONS, together) as key:
            position = given["start"] + key.index
            with when(context.read(pages, lengths, position, together)):
                page = given["table"][position // shape.page_size].to("index")
                place = {"page": page, "offset": position % shape.page_size}
                replace(pages, given=given | place).pack(key.index)


def attend_spans(context: Context, operator: str) -> None:
    """Build the function @{operator}(q [token, head, dim], pages and their tables (see `Context.memories`), (tokens,
    positions, held)[, chosen], repacked keys and values[, sink logits], out), which all threads run at once, and the
    functions that it calls."""
    for pages in context.kinds:
        pack(context, pages)
        rows(context, pages)
    _entry(context, operator)


def _entry(context: Context, operator: str) -> None:
    """Build @{operator}: threads pack blocks of groups in turn, then process tiles of groups."""
    shape = context.shape
    groups, tile, share = shape.num_kv_heads, shape.tile_tokens, shape.queries_per_kv
    last = *["chosen"] * shape.selected, "keys", "values", *["sinks"] * shape.sink_logits
    read = *_named(shape, "q"), *context.memories, Named("sizes", SIZES)
    with entry(operator, [*read, *_named(shape, *last), Named("out", shape.types["q"])]) as given:
        tokens, length, held = (given["sizes"][at].to("index") for at in range(3))
        before, blocks = length - tokens, length.divided_up(BLOCK_POSITIONS)
        given |= {"context": length, "held": held, "before": before}

        def placed(kind: int, group: Value, block: Value) -> dict[str, Value]:
            """Return the place of a group's block with positions from pages of a kind."""
            return {"group": group, "at": (group + groups * kind) * blocks + block, "start": block * BLOCK_POSITIONS}

        with loop(given["thread"], blocks * groups, given["threads"]) as item:
            for kind, pages in enumerate(context.kinds):
                here = given | placed(kind, item.index // blocks, item.index % blocks)
                with when(_seen(context, pages, here, (before, length - 1))):
                    table = {"table": given[f"{pages.kind}_table"]}
                    call_with(f"{pages.kind}_pack", _pack_arguments(shape, pages), here | table)
        wait()
        given |= {each.name: alloca(each.type) for each in _named(shape, "found", "weights")}
        with loop(given["thread"], tokens.divided_up(tile) * groups, given["threads"]) as item:
            group, token = item.index % groups, item.index // groups * tile
            count = (tokens - token).minimum(tile)
            given |= {"token": token, "queries": count * share}
            with loop(0, shape.tile_slots) as slot:
                clear(shape, given["found"], (slot.index,))
            ends = before + token, before + token + count - 1
            for kind, pages in enumerate(context.kinds):
                with loop(0, (ends[1] + 1).divided_up(BLOCK_POSITIONS)) as block:
                    here = given | placed(kind, group, block.index)
                    needed = _seen(context, pages, here, ends)
                    if shape.selected:
                        needed = needed & _chosen_by_any(shape, here, count)
                    with when(needed), loop(0, given["queries"], QUERIES_TOGETHER) as slot:
                        call_with(f"{pages.kind}_rows", rows_arguments(shape), here | {"slot": slot.index})
            with loop(0, given["queries"]) as slot:
                row, head = token + slot.index // share, group * share + slot.index % share
                sink = given["sinks"][head] if shape.sink_logits else None
                finish(shape, given["found"], [(slot.index,)], sink, given["out"], (row, head, 0))


def _seen(context: Context, pages: PageKind, given: dict[str, Value], queries: tuple[Value, Value]) -> Value:
    """Return whether some query at a position from the first to the second of `queries` reads one of a block's keys
    from these pages, and the mask may show it."""
    (earliest, latest), start = queries, given["start"]
    read = context.read(pages, (earliest + 1, latest + 1), start, BLOCK_POSITIONS)
    if not context.shape.mask:
        return read
    return read & may_see(context.shape, queries, (start, start + BLOCK_POSITIONS - 1), given["group"])


def _chosen_by_any(shape: SpanAttention, given: dict[str, Value], count: Value) -> Value:
    """Return whether any of the tile's `count` tokens has selected a page of a block."""
    start, end = given["start"], (given["start"] + BLOCK_POSITIONS).minimum(given["context"])
    pages = start // shape.page_size, end.divided_up(shape.page_size)
    with loop(0, count, carried=[constant(0, "i1")]) as token:
        line = ((given["token"] + token.index) * shape.num_kv_heads + given["group"]) * given["held"]
        with loop(*pages, carried=token.carried) as page:
            page.carry([page.carried[0] | given["chosen"][line + page.index].compared("ne", 0)])
        token.carry(page.results)
    return token.results[0]
