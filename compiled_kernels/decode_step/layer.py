"""One kind of layer as MLIR text: a function that every thread runs, and those it calls.

    norm -> qkv | rotate, write, attend | merge -> output, add | norm -> gate and up -> gate | down, add |

At a bar all threads wait for one another; where rows are of one sequence, after the write too.
"""

from __future__ import annotations

from compiled_kernels.decode_step.elementwise import gate_text
from compiled_kernels.decode_step.layer_kernel import (
    AnyProduct,
    LayerKernel,
    int8_buffers,
    product_text_of,
    quantize,
    quantizers,
    taken,
    weight_arguments_of,
)
from compiled_kernels.decode_step.mixture import Mixture, mixture_functions, mixture_text
from compiled_kernels.decode_step.rotary import key_norm, query_norm, rotary_text, write_text
from compiled_kernels.mlir_text import Named, call, declare_arguments, memref, thread_share
from compiled_kernels.page_selection.mlir import select_text, summarize_text
from compiled_kernels.paged_attention.mlir_decode import attention_text
from compiled_kernels.quantized_attention.mlir_decode import attention_text as quantized_text
from compiled_kernels.quantized_attention.mlir_shape import QuantizedAttention


def layer_text(layer: LayerKernel) -> str:
    """@{name}(see `passed`; thread, threads): the layer's part of x, row by row, and the rows' keys and values."""
    called = [*map(product_text_of, layer.products), *quantizers(layer.name, layer.products, layer.step.rows)]
    body = [_buffers(layer)]
    if layer.step.has("attention"):
        called += [_attention_text(layer), rotary_text(layer), write_text(layer)]
        body += [_project(layer), _attend(layer), _output(layer)]
    if layer.step.has("feedforward"):
        called += [gate_text(layer), *(mixture_functions(layer) if layer.shape.experts else [])]
        body += [_feedforward(layer)]
    head = f"@{layer.name}({declare_arguments(layer_arguments(layer))}, %thread: index, %threads: index) attributes {{no_inline}}"
    return "\n".join([*called, f"func.func private {head} {{", *body, "return\n}"])


def _attention_text(layer: LayerKernel) -> str:
    attention = layer.attention
    quantized = isinstance(attention, QuantizedAttention)
    text = quantized_text(attention, layer.name) if quantized else attention_text(attention, layer.name)
    if (selection := layer.shape.selection) is None:
        return text
    choice = select_text(attention, selection, layer.name), summarize_text(attention, selection, layer.name)
    return "\n".join((text, *choice))


def layer_arguments(layer: LayerKernel) -> list[Named]:
    """Return a layer's arguments: its own weights and pages, the experts that its rows take, its page table and
    angles, and buffers shared by all layers."""
    places = [*layer.page_tables, *layer.angles] * layer.step.has("attention")
    return [*layer.own_arguments, *layer.chosen, *places, *layer.shared_buffers]


def _normed(layer: LayerKernel) -> Named:
    return Named("normed", memref((layer.step.rows, layer.step.hidden_size), layer.step.dtype))


def _mixed(layer: LayerKernel) -> Named:
    return Named("mixed", layer.attention.types["mixed"])


def _buffers(layer: LayerKernel) -> str:
    """Emit the buffers that each thread has for itself."""
    attention = [_mixed(layer), Named("queries", layer.attention.types["queries"]), *_read_pages(layer)]
    own = [_normed(layer), *attention * layer.step.has("attention"), *int8_buffers(layer.products, layer.step.rows)]
    own += Mixture(layer).buffers if layer.shape.experts and layer.step.has("feedforward") else []
    buffers = [f"%{name} = memref.alloca() {{alignment = 64 : i64}} : {kind}" for name, kind in own]
    return "\n".join(("%zero = arith.constant 0 : index", "%one = arith.constant 1 : index", *buffers))


def _norm(layer: LayerKernel, name: str) -> str:
    """Emit normed = the norm of x, of every row: each thread computes it for itself rather than wait for it."""
    return call("norm", [layer.x, Named(name, memref((layer.step.hidden_size,), layer.step.dtype)), _normed(layer)])


def _multiply(layer: LayerKernel, product: AnyProduct, x: Named, out: Named, columns: str) -> str:
    """Emit out = (or, for products that add, +=) x times the product's weight, for %{columns}_begin to
    %{columns}_end."""
    weights = weight_arguments_of(product.name.removeprefix(f"{layer.name}_"), product)
    bounds = [Named(f"{columns}_begin", "index"), Named(f"{columns}_end", "index")]
    return call(product.name, [taken(product, x, layer.step.rows), *weights, out, *bounds])


def _quantize(layer: LayerKernel, product: AnyProduct, x: Named) -> list[str]:
    return quantize(layer.name, product, x, layer.step.rows)


def _project(layer: LayerKernel) -> str:
    """Emit queries, keys and values of every row; this thread's columns."""
    return "\n".join(
        (
            _norm(layer, "attention_norm"),
            *_quantize(layer, layer.qkv, _normed(layer)),
            thread_share("qkv", layer.qkv.out_features, layer.qkv.block),
            _multiply(layer, layer.qkv, _normed(layer), layer.qkv_out, "qkv"),
            "call @GOMP_barrier() : () -> ()",
        )
    )


def _attend(layer: LayerKernel) -> str:
    """Emit the loop over items (row, key/value head, chunk), taken in turn with the other threads. The thread that has
    a row's last chunk, in which the newest position lies, first writes that position's key and value, and summarizes
    their page where that is whole and pages are chosen; where rows may be of one sequence, all are written before any
    item."""
    t, groups, chunks = layer.attention.types, layer.shape.num_kv_heads, layer.step.chunks
    row_group = [Named("row", "index"), Named("group", "index")]
    queries, table, lengths = Named("queries", t["queries"]), Named("table", t["table"]), Named("lengths", t["lengths"])
    pages = [Named("keys", t["pages"]), Named("values", t["pages"])]
    rotated = [layer.qkv_out, *layer.angles, *query_norm(layer), queries, *row_group]
    kept = [layer.qkv_out, *layer.angles, *key_norm(layer), *pages, table, lengths, *row_group]
    item = [queries, *pages, table, lengths, layer.partial, *row_group, Named("chunk", "index")]
    attention = layer.attention
    if isinstance(attention, QuantizedAttention):
        flat, indices = attention.flat_type, [Named(name, "index") for name in ("line", "line", "length")]
        tables = [Named("flat_quantized_table", flat), Named("flat_table", flat)]
        item = [
            queries,
            Named("floats", attention.float_queries_type),
            *layer.quantized_pages,
            *pages,
            *tables,
            *indices,
            *item[5:],
        ]
    item += _read_pages(layer)
    keep, summarize, select = call(f"{layer.name}_keep", kept), "", ""
    if layer.summaries:
        places = [table, lengths, *row_group]
        summarize = f"func.{call(f'{layer.name}_summarize', [pages[0], *layer.summaries, *places])}"
        select = f"  func.{call(f'{layer.name}_select', [queries, *layer.summaries, *places, *_read_pages(layer)])}"
    return f"""%groups = arith.constant {groups} : index
%chunks = arith.constant {chunks} : index
%items = arith.constant {layer.step.rows * groups * chunks} : index
{_all_kept(layer, keep, summarize) if layer.step.same_sequence else ""}
{_flattened(layer)}
scf.for %item = %thread to %items step %threads {{
  %chunk = arith.remui %item, %chunks : index
  %pair = arith.divui %item, %chunks : index
  %group = arith.remui %pair, %groups : index
  %row = arith.divui %pair, %groups : index
  func.{call(f"{layer.name}_rotate", rotated)}
{"" if layer.step.same_sequence else _newest_kept(layer, keep, summarize)}
{select}
{_widened(layer)}
  func.{call(f"{layer.name}_item", item)}
}}
call @GOMP_barrier() : () -> ()"""


def _read_pages(layer: LayerKernel) -> list[Named]:
    """Return the buffer that says which pages an item reads, where they are chosen."""
    return [Named("read_pages", layer.attention.types["chosen"])] if layer.summaries else []


def _newest_kept(layer: LayerKernel, keep: str, summarize: str) -> str:
    return f"""  %last_chunk = arith.constant {layer.step.chunks - 1} : index
  %newest = arith.cmpi eq, %chunk, %last_chunk : index
  scf.if %newest {{
    func.{keep}
    {summarize}
  }}"""


def _all_kept(layer: LayerKernel, keep: str, summarize: str) -> str:
    count = f"%pairs = arith.constant {layer.step.rows * layer.shape.num_kv_heads} : index"
    loops = [_for_each_pair(f"func.{keep}"), *([_for_each_pair(summarize)] if summarize else [])]
    return "\n".join((count, *loops))


def _for_each_pair(body: str) -> str:
    """Emit `body` for each row and group; then the bar."""
    return f"""scf.for %pair = %thread to %pairs step %threads {{
  %group = arith.remui %pair, %groups : index
  %row = arith.divui %pair, %groups : index
  {body}
}}
call @GOMP_barrier() : () -> ()"""


def _flattened(layer: LayerKernel) -> str:
    """Emit both page tables of a quantized layer, row after row, and room for its queries as float32."""
    attention = layer.attention
    if not isinstance(attention, QuantizedAttention):
        return ""
    kind = attention.types["table"]
    lines = [f"%floats = memref.alloca() {{alignment = 64 : i64}} : {attention.float_queries_type}"]
    for name in ("table", "quantized_table"):
        lines.append(f"%flat_{name} = memref.collapse_shape %{name} [[0, 1]] : {kind} into {attention.flat_type}")
    return "\n".join((*lines, f"%held = arith.constant {layer.step.max_pages} : index"))


def _widened(layer: LayerKernel) -> str:
    """Emit the values of a row that attention over quantized pages needs beside its number."""
    attention = layer.attention
    if not isinstance(attention, QuantizedAttention):
        return ""
    lengths, queries = attention.types["lengths"], Named("queries", attention.types["queries"])
    widen = call(f"{layer.name}_widen", [queries, Named("floats", attention.float_queries_type)])
    return f"""  %length32 = memref.load %lengths[%row] : {lengths}
  %length = arith.index_cast %length32 : i32 to index
  %line = arith.muli %row, %held : index
  func.{widen}"""


def _output(layer: LayerKernel) -> str:
    """Emit x += the result of attention times the output weight; every thread merges all rows, and adds its columns."""
    rows = [Named("zero", "index"), Named("rows", "index")]
    return "\n".join(
        (
            f"%rows = arith.constant {layer.step.rows} : index",
            call(f"{layer.name}_merge", [layer.partial, *layer.sink_logits, _mixed(layer), *rows]),
            *_quantize(layer, layer.output, _mixed(layer)),
            thread_share("output", layer.output.out_features, layer.output.block),
            _multiply(layer, layer.output, _mixed(layer), layer.added, "output"),
            "call @GOMP_barrier() : () -> ()",
        )
    )


def _feedforward(layer: LayerKernel) -> str:
    """Emit x += (silu(gate) * up) times the down weight, or a mixture of such. A thread multiplies the same columns of
    gate and of up, so that it can gate them without waiting."""
    if layer.shape.experts:
        router = _multiply(layer, layer.router, Mixture(layer).x, layer.router_logits, "router")
        return "\n".join((_norm(layer, "feedforward_norm"), mixture_text(layer, router)))
    unit = max(layer.gate_up.block, layer.attention.lanes)
    gated = [layer.gate_up_out, layer.gated, Named("gate_begin", "index"), Named("gate_end", "index")]
    return "\n".join(
        (
            _norm(layer, "feedforward_norm"),
            *_quantize(layer, layer.gate_up, _normed(layer)),
            thread_share("gate", layer.shape.intermediate_size, unit),
            f"%hidden = arith.constant {layer.shape.intermediate_size} : index",
            "%up_begin = arith.addi %gate_begin, %hidden : index",
            "%up_end = arith.addi %gate_end, %hidden : index",
            _multiply(layer, layer.gate_up, _normed(layer), layer.gate_up_out, "gate"),
            _multiply(layer, layer.gate_up, _normed(layer), layer.gate_up_out, "up"),
            call(f"{layer.name}_gate", gated),
            "call @GOMP_barrier() : () -> ()",
            *_quantize(layer, layer.down, layer.gated),
            thread_share("down", layer.down.out_features, layer.down.block),
            _multiply(layer, layer.down, layer.gated, layer.added, "down"),
            "call @GOMP_barrier() : () -> ()",
        )
    )
