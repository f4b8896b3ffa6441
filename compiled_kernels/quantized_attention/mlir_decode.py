"""Attention over quantized and residual pages: the walk of paged_attention/mlir_decode.py over two kinds of pages.

    entry:  @item for each item | @merge for each row      (at the bar threads wait for one another)
    @item:  residual pages for the first positions, quantized pages, residual pages for the others

A row is one token at the end of its own context, whether it decodes or is one of a longer span: every token reads by
the same arithmetic, however its text was cut into steps. An item is one row, one KV head and one chunk of its pages.

    positions   0 .... sinks | sinks ............ quantized_until | quantized_until ... length
    pages        residual    |    quantized, split into chunks    |         residual
    seen by      chunk 0     |    every chunk its own part        |      the last chunk

A window cuts all three from the left; of what lies before it the sinks, which are among the first `num_sink_tokens`,
are still seen.
"""

from __future__ import annotations

from compiled_kernels.builder.functions import call, call_with, function, loop, return_, when
from compiled_kernels.builder.target import Named, indices
from compiled_kernels.builder.values import Value, index
from compiled_kernels.paged_attention.mlir_decode import attention_entry, begin_item, merge, run, walks
from compiled_kernels.paged_attention.mlir_softmax import first_seen
from compiled_kernels.paged_attention.mlir_tile import ReadDensePages
from compiled_kernels.quantized_attention.mlir_shape import QuantizedAttention
from compiled_kernels.quantized_attention.mlir_sums import ReadQuantizedPages


def span_function() -> None:
    """Make @span(first, last, size): the pages from begin to end that positions from first to last lie in."""
    with function("span", indices("first", "last", "size"), results=("index", "index")) as given:
        first, last, size = given.values()
        begin = first // size
        return_(begin, first.below(last).select(last.divided_up(size), begin))


def _memories(shape: QuantizedAttention) -> list[Named]:
    return [*ReadQuantizedPages(shape).memories, *ReadDensePages(shape).memories]


def _tables(shape: QuantizedAttention) -> list[Named]:
    return [Named(f"{kind}_table", shape.flat_type) for kind in ("quantized", "residual")]


def _item_arguments(shape: QuantizedAttention) -> list[Named]:
    t, places = shape.types, indices("quantized_line", "residual_line", "length")
    queries = Named("q", t["queries"]), Named("floats", shape.float_queries_type)
    work = [Named("partial", t["partial"]), *indices("row", "group", "chunk")]
    return [*queries, *_memories(shape), *_tables(shape), *places, *work]


def item(shape: QuantizedAttention, name: str) -> None:
    """Make @{name}_item(queries [share, dim], the same as float32, packed, k, v, quantized table, residual table,
    their places, length, partial, row, group, chunk): the chunk's part of the row's context, for all query heads of
    the group."""
    rule, size = shape.layout.rule, shape.page_size
    with function(f"{name}_item", _item_arguments(shape)) as given:
        length, chunk = given["length"], given["chunk"]
        values = begin_item(shape, given, length)

        def pages_of(first: Value, last: Value) -> tuple[Value, Value]:
            begin, end = call("span", [first, last, size], ["index", "index"])
            return begin, end

        def walk(kind: str, pages: tuple[Value, Value], first: Value, last: Value) -> None:
            own = {"table": given[f"{kind}_table"], "line": given[f"{kind}_line"]}
            own |= {"q": given["floats"]} if kind == "quantized" else {}
            walked = ReadQuantizedPages(shape) if kind == "quantized" else ReadDensePages(shape)
            run(walked, name, values | own, pages, first, last)

        # where quantized positions end and begin: both 0 if nothing is quantized
        whole = (length - length.minimum(rule.residual_length)) // rule.quant_group * rule.quant_group
        some = whole.compared("ugt", rule.num_sink_tokens)
        until, front = (some.select(each, index(0)) for each in (whole, index(rule.num_sink_tokens)))
        seen = first_seen(shape, length)
        with when(chunk.equals(0)):
            if shape.sliding_window and shape.num_sink_tokens:
                sinks = index(0), seen.minimum(shape.num_sink_tokens)
                walk("residual", pages_of(*sinks), *sinks)
            walk("residual", pages_of(seen, front), seen, front)
        start = front.maximum(seen)
        begin, stop = pages_of(start, until)
        each = (stop - begin).divided_up(shape.chunks)
        mine = begin + each * chunk
        walk("quantized", (mine.minimum(stop), (mine + each).minimum(stop)), start, until)
        with when(chunk.equals(shape.chunks - 1)):
            rest = until.maximum(seen)
            walk("residual", pages_of(rest, length), rest, length)


def widen(shape: QuantizedAttention, name: str) -> None:
    """Make @{name}_widen(queries [share, dim], the same as float32)."""
    arguments = Named("queries", shape.types["queries"]), Named("floats", shape.float_queries_type)
    with function(f"{name}_widen", arguments) as given, loop(0, shape.queries_per_kv) as head:
        for at in range(0, shape.head_dim, shape.columns):
            given["floats"].store(given["queries"].load(shape.columns, head.index, at).to("f32"), head.index, at)


def quantized_attention(shape: QuantizedAttention, name: str) -> None:
    """Make @{name}_item, @{name}_merge and @{name}_widen, with what they call but for @span."""
    walks(shape, name, [(kind(shape), shape.flat_type) for kind in (ReadDensePages, ReadQuantizedPages)])
    for make in (item, merge, widen):
        make(shape, name)


def attend_quantized(shape: QuantizedAttention) -> None:
    """Make @quantized_attention(q [row, head, dim], quantized keys and values, residual keys and values, quantized
    table, residual table, owner of each row, length of each row, (rows, pages of a line of the first table, of the
    second), partial[, sink logits], mixed), run by all threads at once, with what it calls; `owners` say
    which lines of the tables a row reads."""
    places = [Named(name, shape.flat_type) for name in ("owners", "lengths")]
    arguments = [*_memories(shape), *_tables(shape), *places, Named("sizes", "memref<3xi32>")]

    def attend(given: dict[str, Value]) -> None:
        owner, length = (given[name][given["row"]].to("index") for name in ("owners", "lengths"))
        lines = (owner * given["sizes"][at].to("index") for at in (1, 2))
        given |= dict(zip(("quantized_line", "residual_line"), lines, strict=True))
        call("attend_widen", [given["q"], given["floats"]])
        call_with("attend_item", _item_arguments(shape), given | {"length": length})

    buffers = [Named("floats", shape.float_queries_type)]
    span_function()
    quantized_attention(shape, "attend")
    attention_entry(shape, "quantized_attention", arguments, buffers, attend)
