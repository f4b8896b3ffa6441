"""Write the parts of a block before and after attention as MLIR, for any number of rows.

    before:  norm -> qkv -> heads normed and rotated                     q, k, v of each row
    after:   output, add -> norm -> gate and up, gate -> down, add       x of each row

No sum crosses rows, so every thread computes its own rows from begin to end without waiting: each product finds its
input in the nearest caches.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from compiled_kernels.blocked.layout import PANEL
from compiled_kernels.blocked.many import even_runs, many
from compiled_kernels.blocked.many_rows import Done, Finish, ManyRows, add_sums, pair_sums, store_sums
from compiled_kernels.blocked.shape import TILE_ROWS
from compiled_kernels.builder.functions import Given, call, loop, text_of, when
from compiled_kernels.builder.target import SIZE_BOUND, Named, largest_divisor
from compiled_kernels.builder.threads import entry, share
from compiled_kernels.builder.vectors import copy
from compiled_kernels.decode_step.elementwise import activated, add_normed, norm
from compiled_kernels.decode_step.layer_kernel import LayerKernel, enter, make_quantizers, multiply
from compiled_kernels.decode_step.rotary import copy_value, rotated_head
from compiled_kernels.prefill.shape import BlockShape


def before_text(shape: BlockShape) -> str:
    """Return the MLIR text of @before(see `BlockShape.before`, (rows)), which all threads run at once."""
    return text_of(lambda: _before(shape))


def after_text(shape: BlockShape) -> str:
    """Return the MLIR text of @after(see `BlockShape.after`, (rows)), which all threads run at once."""
    return text_of(lambda: _after(shape))


def _before(shape: BlockShape) -> None:
    layer = shape.layer_kernel
    norm(layer.step, shape.qkv[0].multiplied_dtype)
    for product in shape.qkv:
        many(product, store_sums)
    make_quantizers("rows", shape.qkv, SIZE_BOUND)
    with _runs("before", shape.before) as given:
        _norm(given, "attention_norm")
        _multiply(layer, given, "normed", layer.qkv_out.name, *shape.qkv)
        _turn(layer, given)


def _after(shape: BlockShape) -> None:
    norm(shape.layer_kernel.step, shape.gate_up.multiplied_dtype)
    layer = shape.layer_kernel
    added = add_sums if layer.adds else store_sums
    many(shape.output, added)
    many(shape.gate_up, _gated(layer.shape.activation))
    many(shape.down, added)
    make_quantizers("rows", shape.products[-3:], SIZE_BOUND)
    with _runs("after", shape.after) as given:
        if shape.widened:
            _widen(shape, given)
        _multiply(layer, given, "widened" if shape.widened else "mixed", layer.added.name, shape.output)
        _post_norm(layer, given, "attention")
        _norm(given, "feedforward_norm")
        _multiply(layer, given, "normed", "gated", shape.gate_up)
        _multiply(layer, given, "gated", layer.added.name, shape.down)
        _post_norm(layer, given, "feedforward")


@contextmanager
def _runs(name: str, arguments: list[Named]) -> Iterator[Given]:
    """Build @name(arguments, (rows)): operations emitted in this context process this thread's rows, one run at a time,
    from `begin` to `end` of `rows` in total."""
    with entry(name, [*arguments, Named("sizes", "memref<1xi64>")]) as given:
        rows = given["sizes"][0].to("index")
        begin, end = share(given, rows, TILE_ROWS)
        with when(begin.below(end)):
            each = even_runs(begin, end)
            with loop(begin, end, each) as turn:
                yield given | {"begin": turn.index, "end": (turn.index + each).minimum(end), "rows": rows}


def _norm(given: Given, name: str) -> None:
    call("norm", [given[each] for each in ("x", name, "normed", "begin", "end")])


def _multiply(layer: LayerKernel, given: Given, x: str, out: str, *products: ManyRows) -> None:
    rows = given["begin"], given["end"]
    enter(products, given, x, "rows", rows)
    for product in products:
        multiply(product, layer.name_of(product), given, x, out, (*rows, given["rows"]))


def _turn(layer: LayerKernel, given: Given) -> None:
    """Emit q, k, v [row, head, dim] of the run: queries and keys normalized and rotated as the layer requires, and
    values."""
    with loop(given["begin"], given["end"]) as row:
        with loop(0, layer.shape.num_heads) as turn:
            head = row.index, turn.index
            rotated_head(layer, "query", given, head, given["q"], head)
        with loop(0, layer.shape.num_kv_heads) as turn:
            head = row.index, turn.index
            rotated_head(layer, "key", given, head, given["k"], head)
            copy_value(layer, given, head, given["v"], head)


def _post_norm(layer: LayerKernel, given: Given, part: str) -> None:
    """Add the norm of a part's result to x, for the run's rows, if the layer has such norms."""
    for weight, _ in layer.post_norm(part):
        add_normed(layer, given, weight, (given["begin"], given["end"]), (0, layer.step.hidden_size))


def _gated(activation: str) -> Finish:
    """Return the `Finish` out[row, columns] = f(gate) * up, rounded to the next product's operand type. Panels come in
    pairs of one gate and one up panel."""

    def finish(product: ManyRows, done: Done) -> None:
        found = pair_sums(product, done)
        gate, up = found[: len(found) // 2], found[len(found) // 2 :]
        assert len(gate) * product.lanes == PANEL
        for (column, value, _), (_, beside, _) in zip(gate, up, strict=True):
            gated = activated(activation, value) * beside
            done.given["out"].store(gated.to(product.out_dtype), done.row, column)

    return finish


def _widen(shape: BlockShape, given: Given) -> None:
    """Emit `widened` = `mixed` converted to float32, for the run's rows."""
    columns = shape.layer.num_heads * shape.layer.head_dim
    with loop(given["begin"], given["end"]) as turn:
        place = turn.index, 0
        copy(given["mixed"], place, given["widened"], place, columns, largest_divisor(columns, shape.target.lanes))
