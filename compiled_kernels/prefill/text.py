"""The two sides of a block's attention as MLIR, for any number of rows.

    before:  norm -> qkv -> heads normed and rotated                     q, k, v of each row
    after:   output, add -> norm -> gate and up, gate -> down, add       x of each row

Nothing is added up across rows, so every thread takes its own rows through all of a side and waits for none: the next
product finds in the nearest caches what the last one left there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from compiled_kernels.blocked.layout import PANEL
from compiled_kernels.blocked.many import Done, ManyRows, add_sums, even_runs, many, pair_sums, store_sums
from compiled_kernels.blocked.shape import TILE_ROWS
from compiled_kernels.builder.functions import Given, call, loop, text_of, when
from compiled_kernels.builder.threads import entry, share
from compiled_kernels.builder.vectors import copy, silu
from compiled_kernels.decode_step.elementwise import norm
from compiled_kernels.decode_step.layer_kernel import LayerKernel, make_quantizers, multiply
from compiled_kernels.decode_step.rotary import copy_value, rotated_head
from compiled_kernels.mlir_text import SIZE_BOUND, Named, largest_divisor
from compiled_kernels.prefill.shape import BlockShape


def before_text(shape: BlockShape) -> str:
    """Return @before(see `BlockShape.before`, (rows)), run by all threads at once."""
    return text_of(lambda: _before(shape))


def after_text(shape: BlockShape) -> str:
    """Return @after(see `BlockShape.after`, (rows)), run by all threads at once."""
    return text_of(lambda: _after(shape))


def _before(shape: BlockShape) -> None:
    layer = shape.layer_kernel
    norm(layer.step, shape.qkv.multiplied_dtype)
    many(shape.qkv, store_sums)
    make_quantizers("rows", [shape.qkv], SIZE_BOUND)
    with _runs("before", shape.before) as given:
        _norm(given, "attention_norm")
        _multiply(shape.qkv, "qkv", given, "normed", layer.qkv_out.name)
        _turn(layer, given)


def _after(shape: BlockShape) -> None:
    norm(shape.layer_kernel.step, shape.gate_up.multiplied_dtype)
    for product, finish in ((shape.output, add_sums), (shape.gate_up, _gated), (shape.down, add_sums)):
        many(product, finish)
    make_quantizers("rows", shape.products[1:], SIZE_BOUND)
    with _runs("after", shape.after) as given:
        if shape.widened:
            _widen(shape, given)
        _multiply(shape.output, "output", given, "widened" if shape.widened else "mixed", "x")
        _norm(given, "feedforward_norm")
        _multiply(shape.gate_up, "gate_up", given, "normed", "gated")
        _multiply(shape.down, "down", given, "gated", "x")


@contextmanager
def _runs(name: str, arguments: list[Named]) -> Iterator[Given]:
    """Make @name(arguments, (rows)): what is made in this context is done with this thread's rows, a run at a time,
    from `begin` to `end` of `rows` in all."""
    with entry(name, [*arguments, Named("sizes", "memref<1xi64>")]) as given:
        rows = given["sizes"][0].to("index")
        begin, end = share(given, rows, TILE_ROWS)
        with when(begin.below(end)):
            each = even_runs(begin, end)
            with loop(begin, end, each) as turn:
                yield given | {"begin": turn.index, "end": (turn.index + each).least(end), "rows": rows}


def _norm(given: Given, name: str) -> None:
    call("norm", [given[each] for each in ("x", name, "normed", "begin", "end")])


def _multiply(product: ManyRows, weights: str, given: Given, x: str, out: str) -> None:
    rows = given["begin"], given["end"]
    multiply(product, given, x, out, (*rows, given["rows"]), prefix="rows", rows=rows, weights=weights)


def _turn(layer: LayerKernel, given: Given) -> None:
    """Make q, k, v [row, head, dim] of the run: queries and keys normed and rotated where the layer does that, and
    values."""
    with loop(given["begin"], given["end"]) as row:
        with loop(0, layer.shape.num_heads) as turn:
            head = row.index, turn.index
            rotated_head(layer, "query", given, head, given["q"], head)
        with loop(0, layer.shape.num_kv_heads) as turn:
            head = row.index, turn.index
            rotated_head(layer, "key", given, head, given["k"], head)
            copy_value(layer, given, head, given["v"], head)


def _gated(product: ManyRows, done: Done) -> None:
    """`Finish`: out[row, columns] = silu(gate) * up, rounded to what enters the next product. A pair of panels is one
    of the gate and one of up."""
    found = pair_sums(product, done)
    gate, up = found[: len(found) // 2], found[len(found) // 2 :]
    assert len(gate) * product.lanes == PANEL
    for (column, value, _), (_, beside, _) in zip(gate, up, strict=True):
        done.given["out"].store((silu(value) * beside).to(product.out_dtype), done.row, column)


def _widen(shape: BlockShape, given: Given) -> None:
    """Make rows of `widened` = those of `mixed` as float32."""
    columns = shape.layer.num_heads * shape.layer.head_dim
    with loop(given["begin"], given["end"]) as turn:
        place = turn.index, 0
        copy(given["mixed"], place, given["widened"], place, columns, largest_divisor(columns, shape.target.lanes))
