"""Build the function of one kind of layer, which every thread runs, and the functions that it calls.

    norm -> qkv | rotate, write, attend | merge -> output, add | norm -> gate and up -> gate | down, add |

At each bar (|) of this drawing all threads wait for one another; if some rows belong to the same sequence, they also
wait after the write.
"""

from __future__ import annotations

from compiled_kernels.builder.functions import Given, alloca, call, call_with, function, loop, when
from compiled_kernels.builder.target import Named, indices, largest_divisor, memref
from compiled_kernels.builder.threads import share, wait
from compiled_kernels.builder.values import Value, index
from compiled_kernels.decode_step.elementwise import add_normed, gate
from compiled_kernels.decode_step.layer_kernel import (
    AnyProduct,
    LayerKernel,
    enter,
    int8_buffers,
    make_products,
    multiply,
)
from compiled_kernels.decode_step.mixture import mixture, mixture_buffers, mixture_functions
from compiled_kernels.decode_step.rotary import keep, rotate_queries
from compiled_kernels.page_selection.mlir import select, summarize
from compiled_kernels.paged_attention.mlir_decode import attention, item_arguments


def make_layer(layer: LayerKernel) -> None:
    """Build the function @{name}(see `layer_arguments`; thread, threads) and the functions that it calls: it writes the
    rows' keys and values, and computes the layer's result for each row."""
    make_products(layer.name, layer.products, layer.step.rows)
    mixed = layer.step.has("feedforward") and layer.shape.experts
    if layer.step.has("attention"):
        _attention(layer)
    if mixed:
        mixture_functions(layer)
    with function(layer.name, [*layer_arguments(layer), *indices("thread", "threads")], inline=False) as given:
        given |= {name: alloca(kind) for name, kind in _own_buffers(layer)}
        if layer.step.has("attention"):
            _norm(layer, given, "attention_norm")
            _multiply(layer, given, "normed", layer.qkv_out, *layer.qkv)
            _attend(layer, given)
            # Every thread merges all rows, and adds its columns.
            merged = [given[name] for name, _ in (layer.partial, *layer.sink_logits)]
            call(f"{layer.name}_merge", [*merged, given["mixed"], 0, layer.step.rows])
            _multiply(layer, given, "mixed", layer.added, layer.output)
            _post_norm(layer, given, "attention")
        if layer.step.has("feedforward"):
            _norm(layer, given, "feedforward_norm")
            (mixture if mixed else _feedforward)(layer, given)
            _post_norm(layer, given, "feedforward")


def _attention(layer: LayerKernel) -> None:
    shape, selection = layer.attention, layer.shape.selection
    attention(layer.context, layer.name)
    if selection is not None:
        select(shape, selection, layer.name)
        summarize(shape, selection, layer.name)


def layer_arguments(layer: LayerKernel) -> list[Named]:
    """Return a layer's arguments: its own weights and pages, the experts that its rows choose, its page table and
    angles, and the buffers shared by all layers."""
    places = [*layer.page_tables, *layer.angles] * layer.step.has("attention")
    return [*layer.own_arguments, *layer.chosen, *places, *layer.shared_buffers]


def _own_buffers(layer: LayerKernel) -> list[Named]:
    """Return the separate buffers of each thread."""
    types = layer.attention.types
    own = [Named("mixed", types["mixed"]), Named("queries", types["queries"])]
    own += [Named("read_pages", types["chosen"])] if layer.summaries else []
    experts = mixture_buffers(layer) if layer.shape.experts and layer.step.has("feedforward") else []
    normed = Named("normed", memref((layer.step.rows, layer.step.hidden_size), layer.step.dtype))
    return [normed, *own * layer.step.has("attention"), *int8_buffers(layer.products, layer.step.rows), *experts]


def _norm(layer: LayerKernel, given: Given, name: str) -> None:
    """Emit normed = the norm of x for every row: each thread computes it rather than wait for another."""
    call("norm", [given["x"], given[name], given["normed"], 0, layer.step.rows])


def _multiply(layer: LayerKernel, given: Given, x: str, out: Named, *products: AnyProduct) -> None:
    """Multiply this thread's columns of each product, and wait for the other threads."""
    enter(products, given, x, layer.name, (0, layer.step.rows))
    for product in products:
        columns = share(given, product.out_features, product.block)
        multiply(product, layer.name_of(product), given, x, out.name, columns)
    wait()


def _post_norm(layer: LayerKernel, given: Given, part: str) -> None:
    """Add the norm of a part's result to x, this thread's columns, if the layer has such norms."""
    for weight, _ in layer.post_norm(part):
        width = layer.step.hidden_size
        begin, end = share(given, width, largest_divisor(width, layer.step.target.lanes))
        add_normed(layer, given, weight, (0, layer.step.rows), (begin, end))
        wait()


def _attend(layer: LayerKernel, given: Given) -> None:
    """Emit the loop over items (row, key/value head, chunk), divided among threads in turn. The thread with a row's
    last chunk, which has the newest position, first writes that position's key and value; if pages are selected and the
    page is full, it also summarizes the page. If rows may belong to one sequence, all keys and values are written
    before the first item."""
    groups, chunks, pairs = layer.shape.num_kv_heads, layer.step.chunks, layer.step.rows * layer.shape.num_kv_heads
    summaries = [name for name, _ in layer.summaries]
    places, context = ["table", "lengths", "row", "group"], layer.context

    def attend(what: str, here: Given, *names: str) -> None:
        call(f"{layer.name}_{what}", [here[name] for name in names])

    writes = [lambda here: keep(layer, here)]
    if summaries:
        writes.append(lambda here: attend("summarize", here, "keys", *summaries, *places))

    def at(pair: Value) -> Given:
        return given | {"row": pair // groups, "group": pair % groups}

    for each in writes * layer.step.same_sequence:
        with loop(given["thread"], pairs, given["threads"]) as turn:
            each(at(turn.index))
        wait()
    tables = dict(zip((each.kind for each in context.kinds), layer.page_tables, strict=True))
    given |= {f"{kind}_table": given[table.name].flat() for kind, table in tables.items()}
    given |= {"q": given["queries"], "k": given["keys"], "v": given["values"], "partial": given[layer.partial.name]}
    with loop(given["thread"], pairs * chunks, given["threads"]) as turn:
        here = at(turn.index // chunks) | {"chunk": turn.index % chunks}
        rotate_queries(layer, here)
        if not layer.step.same_sequence:
            with when(here["chunk"].equals(chunks - 1)):
                for each in writes:
                    each(here)
        if summaries:
            attend("select", here, "queries", *summaries, *places, "read_pages")
            here |= {"chosen": here["read_pages"], "chosen_line": index(0)}
        here |= {f"{kind}_line": here["row"] * layer.step.max_pages for kind in tables}
        here |= {"length": here["lengths"][here["row"]].to("index")}
        call_with(f"{layer.name}_item", item_arguments(context), here)
    wait()


def _feedforward(layer: LayerKernel, given: Given) -> None:
    """Emit x += (silu(gate) * up) times the down weight. A thread multiplies the same columns of gate and up, so that
    it can apply the gate without waiting; if a panel holds columns of both, all threads wait in between."""
    hidden, gate_up = layer.shape.intermediate_size, layer.gate_up
    own = share(given, hidden, max(gate_up.block, layer.attention.lanes))
    apart = hidden % gate_up.block == 0
    columns = (own, [each + hidden for each in own]) if apart else (share(given, 2 * hidden, gate_up.block),)
    enter([gate_up], given, "normed", layer.name, (0, layer.step.rows))
    multiply(gate_up, "gate_up", given, "normed", layer.gate_up_out.name, *columns)
    if not apart:
        wait()
    gate(layer, given, *own)
    wait()
    _multiply(layer, given, layer.gated.name, layer.added, layer.down)
