"""A whole decode step as one MLIR module: every thread runs all of it and takes its share of each product.

layer:   norm -> qkv | turn, write, attend | merge -> output, add | norm -> gate and up -> gate | down, add |

Where a bar stands all threads wait for one another. What is small (norms, merging, angles) every thread computes for
itself rather than waiting for it.
"""

from __future__ import annotations

from compiled_kernels.decode_step.pieces import gate, norm, turn
from compiled_kernels.decode_step.shape import LayerShape, StepShape, Weight
from compiled_kernels.linear.mlir_text import Product
from compiled_kernels.mlir_text import THREADS, exp_function, memref
from compiled_kernels.paged_attention.mlir_text import Attention

Named = list[tuple[str, str]]  # names and memref types


def step_text(shape: StepShape) -> str:
    """@decode_step(see `arguments`)."""
    names = {layer: f"layer{i}" for i, layer in enumerate(shape.kinds)}
    parts = [THREADS, exp_function(shape.target.lanes), norm(shape), _head(shape).text()]
    parts += [_layer(shape, layer, name) for layer, name in names.items()]
    declared = arguments(shape)
    lines = []
    for index, layer in enumerate(shape.layers):
        mine = [(f"{name}_{index}", kind) for name, kind in weights(shape, layer)]
        mine += [
            (f"keys_{index}", _attention(shape, layer).types["pages"]),
            (f"values_{index}", _attention(shape, layer).types["pages"]),
        ]
        mine += [(f"table_{layer.table}", _attention(shape, layer).types["table"])]
        mine += [(f"cos_{layer.dim}", _angles(shape, layer.dim)), (f"sin_{layer.dim}", _angles(shape, layer.dim))]
        mine += _shared(shape, layer)
        lines.append(_call(names[layer], mine))
    head = _head(shape)
    given = [("normed", memref((shape.rows, shape.width), shape.kind))]
    given += [(f"head_{i}", kind) for i, kind in enumerate(head.weight_types)]
    given += [("logits", memref((shape.rows, shape.vocab), "f32"))]
    parts.append(f"""func.func @decode_step({", ".join(f"%{name}: {kind}" for name, kind in declared)}) {{
%thread, %threads = call @thread() : () -> (index, index)
{chr(10).join(lines)}
%normed = memref.alloca() {{alignment = 64 : i64}} : {given[0][1]}
call @norm(%x, %norm, %normed) : ({memref((shape.rows, shape.width), "f32")}, {memref((shape.width,), shape.kind)}, {given[0][1]}) -> ()
{_split("vocab", shape.vocab, head.block)}
{_call("head", given, ", %vocab_begin, %vocab_end", ", index, index")}
return
}}""")
    return "\n".join(parts)


def arguments(shape: StepShape) -> Named:
    """The step's arguments in order: what changes with each step, the scratch buffers, then all weights and pages."""
    rows = shape.rows
    found: Named = [("x", memref((rows, shape.width), "f32")), ("logits", memref((rows, shape.vocab), "f32"))]
    found.append(("lengths", memref((rows,), "i32")))
    found += [(f"table_{i}", memref((rows, shape.held), "i32")) for i in range(shape.tables)]
    for dim in shape.dims:
        found += [(f"cos_{dim}", _angles(shape, dim)), (f"sin_{dim}", _angles(shape, dim))]
    for kind in shape.kinds:
        found += [item for item in _shared(shape, kind) if item not in found]
    found.append(("norm", memref((shape.width,), shape.kind)))
    found += [(f"head_{i}", kind) for i, kind in enumerate(_head(shape).weight_types)]
    for index, layer in enumerate(shape.layers):
        found += [(f"{name}_{index}", kind) for name, kind in weights(shape, layer)]
        pages = _attention(shape, layer).types["pages"]
        found += [(f"keys_{index}", pages), (f"values_{index}", pages)]
    return found


def weights(shape: StepShape, layer: LayerShape) -> Named:
    """A layer's weights in the order in which they are passed."""
    found: Named = [("attention_norm", memref((shape.width,), shape.kind))]
    for product in (_qkv(shape, layer, ""), _output(shape, layer, "")):
        found += [(f"{product.name[1:]}{i}", kind) for i, kind in enumerate(product.weight_types)]
    found.append(("feedforward_norm", memref((shape.width,), shape.kind)))
    for product in (_gate_up(shape, layer, ""), _down(shape, layer, "")):
        found += [(f"{product.name[1:]}{i}", kind) for i, kind in enumerate(product.weight_types)]
    return found


def _shared(shape: StepShape, layer: LayerShape) -> Named:
    """Buffers that all threads see, named after their sizes so that layers alike share them."""
    rows, attention = shape.rows, _attention(shape, layer)
    columns = (layer.heads + 2 * layer.groups) * layer.dim
    partial = attention.types["partial"]
    return [
        ("x", memref((rows, shape.width), "f32")),
        ("lengths", attention.types["lengths"]),
        (f"qkv_out_{columns}", memref((rows, columns), "f32")),
        (f"partial_{layer.heads}_{layer.dim}", partial),
        (f"gate_up_out_{layer.hidden}", memref((rows, 2 * layer.hidden), "f32")),
        (f"gated_{layer.hidden}", memref((rows, layer.hidden), shape.kind)),
    ]


def _layer(shape: StepShape, layer: LayerShape, name: str) -> str:
    attention = _attention(shape, layer)
    t = attention.types
    qkv, output = _qkv(shape, layer, name), _output(shape, layer, name)
    gate_up, down = _gate_up(shape, layer, name), _down(shape, layer, name)
    products = [product.text() for product in (qkv, output, gate_up, down)]
    x, qkv_out, partial, gate_up_out, gated = (_shared(shape, layer)[i] for i in (0, 2, 3, 4, 5))
    passed = [*weights(shape, layer), ("keys", t["pages"]), ("values", t["pages"]), ("table", t["table"])]
    passed += [("cos", _angles(shape, layer.dim)), ("sin", _angles(shape, layer.dim)), *_shared(shape, layer)]
    normed = ("normed", memref((shape.rows, shape.width), shape.kind))
    mixed = ("mixed", t["mixed"])
    norm_type = memref((shape.width,), shape.kind)

    def product(each: Product, x: tuple[str, str], out: tuple[str, str], begin: str, end: str) -> str:
        stem = each.name.removeprefix(name + "_")
        held = [(f"{stem}{i}", kind) for i, kind in enumerate(each.weight_types)]
        return _call(each.name, [x, *held, out], f", {begin}, {end}", ", index, index")

    angles = _angles(shape, layer.dim)
    unit = max(gate_up.block, attention.run)
    items = shape.rows * layer.groups * shape.chunks
    body = f"""
%zero = arith.constant 0 : index
%one = arith.constant 1 : index
%normed = memref.alloca() {{alignment = 64 : i64}} : {normed[1]}
%mixed = memref.alloca() {{alignment = 64 : i64}} : {mixed[1]}
%queries = memref.alloca() {{alignment = 64 : i64}} : {t["queries"]}
call @norm(%x, %attention_norm, %normed) : ({x[1]}, {norm_type}, {normed[1]}) -> ()
{_split("qkv", qkv.out, qkv.block)}
{product(qkv, normed, qkv_out, "%qkv_begin", "%qkv_end")}
call @GOMP_barrier() : () -> ()
%groups = arith.constant {layer.groups} : index
%chunks = arith.constant {shape.chunks} : index
%last_chunk = arith.constant {shape.chunks - 1} : index
%items = arith.constant {items} : index
scf.for %item = %thread to %items step %threads {{
  %chunk = arith.remui %item, %chunks : index
  %pair = arith.divui %item, %chunks : index
  %group = arith.remui %pair, %groups : index
  %row = arith.divui %pair, %groups : index
  func.call @{name}_turn(%{qkv_out[0]}, %cos, %sin, %queries, %row, %group)
    : ({qkv_out[1]}, {angles}, {angles}, {t["queries"]}, index, index) -> ()
  %newest = arith.cmpi eq, %chunk, %last_chunk : index
  scf.if %newest {{
    func.call @{name}_keep(%{qkv_out[0]}, %cos, %sin, %keys, %values, %table, %lengths, %row, %group)
      : ({qkv_out[1]}, {angles}, {angles}, {t["pages"]}, {t["pages"]}, {t["table"]}, {t["lengths"]}, index, index) -> ()
  }}
  func.call @{name}_item(%queries, %keys, %values, %table, %lengths, %{partial[0]}, %row, %group, %chunk)
    : ({t["queries"]}, {t["pages"]}, {t["pages"]}, {t["table"]}, {t["lengths"]}, {partial[1]}, index, index, index) -> ()
}}
call @GOMP_barrier() : () -> ()
%rows = arith.constant {shape.rows} : index
call @{name}_merge(%{partial[0]}, %mixed, %zero, %rows) : ({partial[1]}, {mixed[1]}, index, index) -> ()
{_split("output", output.out, output.block)}
{product(output, mixed, x, "%output_begin", "%output_end")}
call @GOMP_barrier() : () -> ()
call @norm(%x, %feedforward_norm, %normed) : ({x[1]}, {norm_type}, {normed[1]}) -> ()
{_split("gate", layer.hidden, unit)}
%hidden = arith.constant {layer.hidden} : index
%up_begin = arith.addi %gate_begin, %hidden : index
%up_end = arith.addi %gate_end, %hidden : index
{product(gate_up, normed, gate_up_out, "%gate_begin", "%gate_end")}
{product(gate_up, normed, gate_up_out, "%up_begin", "%up_end")}
call @{name}_gate(%{gate_up_out[0]}, %{gated[0]}, %gate_begin, %gate_end) : ({gate_up_out[1]}, {gated[1]}, index, index) -> ()
call @GOMP_barrier() : () -> ()
{_split("down", down.out, down.block)}
{product(down, gated, x, "%down_begin", "%down_end")}
call @GOMP_barrier() : () -> ()
return"""
    declared = ", ".join(f"%{each}: {kind}" for each, kind in passed)
    parts = [*products, attention.text(name), turn(shape, layer, name, attention), gate(shape, layer, f"{name}_gate")]
    function = (
        f"func.func private @{name}({declared}, %thread: index, %threads: index) attributes {{no_inline}} {{{body}\n}}"
    )
    return "\n".join([*parts, function])


def _call(function: str, given: Named, more: str = ", %thread, %threads", more_types: str = ", index, index") -> str:
    names = ", ".join(f"%{name}" for name, _ in given)
    return f"call @{function}({names}{more}) : ({', '.join(kind for _, kind in given)}{more_types}) -> ()"


def _split(name: str, count: int, unit: int) -> str:
    """%{name}_begin and %{name}_end: this thread's share of `count` columns."""
    return f"""%{name}_count = arith.constant {count} : index
%{name}_unit = arith.constant {unit} : index
%{name}_begin, %{name}_end = call @share(%{name}_count, %{name}_unit, %thread, %threads) : (index, index, index, index) -> (index, index)"""


def _angles(shape: StepShape, dim: int) -> str:
    return memref((shape.rows, dim // 2), "f32")


def _product(
    shape: StepShape, name: str, width: int, out: int, weight: Weight, adds: bool = False, stretches: int = 1
) -> Product:
    stored = weight.kind, shape.kind, shape.target, weight.group, weight.bias
    return Product(name, shape.rows, width, out, *stored, adds, stretches)


def _qkv(shape: StepShape, layer: LayerShape, name: str) -> Product:
    columns = (layer.heads + 2 * layer.groups) * layer.dim
    return _product(shape, f"{name}_qkv", shape.width, columns, layer.qkv)


def _output(shape: StepShape, layer: LayerShape, name: str) -> Product:
    return _product(shape, f"{name}_output", layer.heads * layer.dim, shape.width, layer.output, adds=True)


def _gate_up(shape: StepShape, layer: LayerShape, name: str) -> Product:
    return _product(shape, f"{name}_gate_up", shape.width, 2 * layer.hidden, layer.gate_up, stretches=2)


def _down(shape: StepShape, layer: LayerShape, name: str) -> Product:
    return _product(shape, f"{name}_down", layer.hidden, shape.width, layer.down, adds=True)


def _head(shape: StepShape) -> Product:
    return _product(shape, "head", shape.width, shape.vocab, shape.head)


def _attention(shape: StepShape, layer: LayerShape) -> Attention:
    return Attention(
        shape.rows,
        layer.heads,
        layer.groups,
        layer.dim,
        shape.size,
        shape.held,
        shape.kind,
        layer.scale,
        shape.target,
        shape.chunks,
        layer.window,
        layer.sinks,
        layer.softcap,
    )
