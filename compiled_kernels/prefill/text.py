"""The two sides of a block's attention as MLIR text, for any number of rows.

    before:  norm -> qkv -> heads normed and rotated                     q, k, v of each row
    after:   output, add -> norm -> gate and up, gate -> down, add       x of each row

Nothing is added up across rows, so every thread takes its own rows through all of a side and waits for none: the next
product finds in the nearest caches what the last one left there.
"""

from __future__ import annotations

from compiled_kernels.blocked.layout import PANEL
from compiled_kernels.blocked.many import (
    EVEN_RUNS,
    MAX_RUN_ROWS,
    Done,
    ManyRows,
    add_sums,
    many_text,
    pair_sums,
    store_sums,
)
from compiled_kernels.blocked.shape import TILE_ROWS
from compiled_kernels.builder.vectors import silu
from compiled_kernels.decode_step.elementwise import norm_range_text
from compiled_kernels.decode_step.layer_kernel import quantizers, taken, weight_arguments_of
from compiled_kernels.decode_step.rotary import rotary_head
from compiled_kernels.mlir_text import (
    SIZE_BOUND,
    THREADS,
    Lines,
    Named,
    call,
    declare_arguments,
    largest_divisor,
)
from compiled_kernels.prefill.shape import BlockShape

BOUNDS = [Named("run", "index"), Named("run_end", "index")]


def rotary_text(shape: BlockShape) -> str:
    """Emit @turn(qkv [row, columns], [cos, sin [row, dim / 2],] [query norm, key norm [dim],] q, k, v [row, head,
    dim], from, to): queries and keys of the rows from..to, normed and rotated where the layer does that, and their
    values."""
    layer, types = shape.layer, {name: kind for name, kind in shape.heads}
    arguments = [
        shape.layer_kernel.qkv_out._replace(name="qkv"),
        *shape.layer_kernel.angles,
        *shape.layer_kernel.head_norms.values(),
    ]
    bounds = [Named("from", "index"), Named("to", "index")]
    query, key = Lines("q"), Lines("k")
    rotary_head(query, shape.layer_kernel, "query", "%q", "%row, %head", types["q"])
    rotary_head(key, shape.layer_kernel, "key", "%k", "%row, %head", types["k"])
    return f"""func.func private @turn({declare_arguments([*arguments, *shape.heads, *bounds])}) {{
%zero = arith.constant 0 : index
%one = arith.constant 1 : index
%dim = arith.constant {layer.head_dim} : index
%heads = arith.constant {layer.num_heads} : index
%groups = arith.constant {layer.num_kv_heads} : index
%with_keys = arith.constant {layer.num_heads + layer.num_kv_heads} : index
scf.for %row = %from to %to step %one {{
  scf.for %head = %zero to %heads step %one {{
    %base = arith.muli %head, %dim : index
{query.text()}
  }}
  scf.for %head = %zero to %groups step %one {{
    %of_keys = arith.addi %heads, %head : index
    %base = arith.muli %of_keys, %dim : index
{key.text()}
    %of_values = arith.addi %with_keys, %head : index
    %value_at = arith.muli %of_values, %dim : index
{_value(shape, types["v"])}
  }}
}}
return
}}"""


def _value(shape: BlockShape, kind: str) -> str:
    """Emit %v[%row, %head] = the head that begins at column %value_at of the row, rounded."""
    lines, lanes = Lines("w"), largest_divisor(shape.layer.head_dim, shape.target.lanes)
    for at in range(0, shape.layer.head_dim, lanes):
        place = lines.index(at)
        column = lines.let(f"arith.addi %value_at, {place} : index")
        value = lines.load("%qkv", f"%row, {column}", shape.layer_kernel.qkv_out.type, lanes, "f32")
        lines.store(lines.truncate(value, lanes, shape.dtype), "%v", f"%row, %head, {place}", kind, lanes, shape.dtype)
    return lines.text()


def before_text(shape: BlockShape) -> str:
    """Emit @before(see `BlockShape.before`, (rows)), run by all threads at once."""
    functions = [
        norm_range_text(shape.layer_kernel.step, shape.qkv.multiplied_dtype),
        many_text(shape.qkv, store_sums),
        rotary_text(shape),
    ]
    functions += quantizers("rows", [shape.qkv], SIZE_BOUND)
    x, normed, qkv = shape.x, shape.normed, shape.layer_kernel.qkv_out
    steps = (
        call("norm", [x, Named("attention_norm", shape.layer_kernel.norm_type), normed, *BOUNDS]),
        *_multiply(shape.qkv, "qkv", normed, qkv),
        call("turn", [qkv, *shape.layer_kernel.angles, *shape.layer_kernel.head_norms.values(), *shape.heads, *BOUNDS]),
    )
    return "\n".join((THREADS, *functions, _entry("before", shape.before, steps)))


def after_text(shape: BlockShape) -> str:
    """Emit @after(see `BlockShape.after`, (rows)), run by all threads at once."""
    products = many_text(shape.output, add_sums), many_text(shape.gate_up, _gated), many_text(shape.down, add_sums)
    functions = [
        norm_range_text(shape.layer_kernel.step, shape.gate_up.multiplied_dtype),
        *products,
    ]
    functions += quantizers("rows", shape.products[1:], SIZE_BOUND)
    x, normed, mixed = shape.x, shape.normed, shape.mixed
    widen = []
    if shape.widened:
        functions.append(_widen(shape))
        widen.append(call("widen", [mixed, *shape.widened, *BOUNDS]))
        (mixed,) = shape.widened
    steps = (
        *widen,
        *_multiply(shape.output, "output", mixed, x),
        call("norm", [x, Named("feedforward_norm", shape.layer_kernel.norm_type), normed, *BOUNDS]),
        *_multiply(shape.gate_up, "gate_up", normed, shape.gated),
        *_multiply(shape.down, "down", shape.gated, x),
    )
    return "\n".join((THREADS, *functions, _entry("after", shape.after, steps)))


def _multiply(product: ManyRows, name: str, x: Named, out: Named) -> list[str]:
    """The run's rows of x, quantized where the product takes them so, times the weight."""
    given = taken(product, x, SIZE_BOUND)
    quantized = [] if given is x else [call(f"rows_{given.name}", [x, given, *BOUNDS])]
    return [
        *quantized,
        call(product.name, [given, *weight_arguments_of(name, product), out, *BOUNDS, Named("rows", "index")]),
    ]


def _entry(name: str, arguments: list[Named], steps: tuple[str, ...]) -> str:
    """Emit @name(arguments, (rows)): this thread's rows, a run at a time, through all steps."""
    body = "\n".join(f"func.{step}" for step in steps)
    return f"""func.func @{name}({declare_arguments([*arguments, Named("sizes", "memref<1xi64>")])}) {{
%thread, %threads = call @thread() : () -> (index, index)
%zero = arith.constant 0 : index
%rows64 = memref.load %sizes[%zero] : memref<1xi64>
%rows = arith.index_cast %rows64 : i64 to index
%tile = arith.constant {TILE_ROWS} : index
%longest = arith.constant {MAX_RUN_ROWS} : index
%begin, %end = call @share(%rows, %tile, %thread, %threads) : (index, index, index, index) -> (index, index)
%some = arith.cmpi ugt, %end, %begin : index
scf.if %some {{
  {EVEN_RUNS}
  scf.for %run = %begin to %end step %each {{
    %after = arith.addi %run, %each : index
    %run_end = arith.minui %after, %end : index
{body}
  }}
}}
return
}}"""


def _gated(product: ManyRows, done: Done) -> None:
    """`Finish`: out[row, columns] = silu(gate) * up, rounded to what enters the next product. A pair of panels is one
    of the gate and one of up."""
    found = pair_sums(product, done)
    gate, up = found[: len(found) // 2], found[len(found) // 2 :]
    assert len(gate) * product.lanes == PANEL
    for (column, value, _), (_, beside, _) in zip(gate, up, strict=True):
        done.given["out"].store((silu(value) * beside).to(product.out_dtype), done.row, column)


def _widen(shape: BlockShape) -> str:
    """Emit @widen(mixed, widened, from, to): rows as float32."""
    mixed, (widened,) = shape.mixed, shape.widened
    columns = shape.layer.num_heads * shape.layer.head_dim
    lanes, lines = largest_divisor(columns, shape.target.lanes), Lines()
    value = lines.extend(lines.load("%mixed", "%row, %at", mixed.type, lanes, shape.dtype), lanes, shape.dtype)
    lines.store(value, "%widened", "%row, %at", widened.type, lanes)
    return f"""func.func private @widen({declare_arguments([mixed, widened])}, %from: index, %to: index) {{
%zero = arith.constant 0 : index
%one = arith.constant 1 : index
%columns = arith.constant {columns} : index
%step = arith.constant {lanes} : index
scf.for %row = %from to %to step %one {{
  scf.for %at = %zero to %columns step %step {{
    {lines.text()}
  }}
}}
return
}}"""
