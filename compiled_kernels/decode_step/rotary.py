"""The part between a layer's products: queries and keys normed and rotated by their position's angles, keys and values
written."""

from __future__ import annotations

from typing import Literal

from compiled_kernels.decode_step.layer_kernel import LayerKernel
from compiled_kernels.mlir_text import Lines, Named, declare_arguments, largest_divisor, number, vector


def query_norm(layer: LayerKernel) -> list[Named]:
    return [layer.head_norms["query"]] if layer.shape.qk_norm else []


def key_norm(layer: LayerKernel) -> list[Named]:
    return [layer.head_norms["key"]] if layer.shape.qk_norm else []


def rotary_text(layer: LayerKernel) -> str:
    """Emit @{name}_rotate(qkv [row, columns], [cos, sin [row, dim / 2],] [query norm [dim],] q [share, dim], row,
    group): q = the group's query heads of the row, normed, and rotated by the row's angles, where the layer does that.
    """
    shape, t = layer.shape, layer.attention.types
    row_group = [Named("row", "index"), Named("group", "index")]
    taken = [Named("qkv", layer.qkv_out.type), *layer.angles, *query_norm(layer), Named("q", t["queries"]), *row_group]
    lines = Lines("q")
    rotary_head(lines, layer, "query", "%q", "%h", t["queries"])
    return f"""func.func private @{layer.name}_rotate({declare_arguments(taken)}) {{
%zero = arith.constant 0 : index
%one = arith.constant 1 : index
%share = arith.constant {shape.num_heads // shape.num_kv_heads} : index
%dim = arith.constant {shape.head_dim} : index
%first = arith.muli %group, %share : index
scf.for %h = %zero to %share step %one {{
  %head = arith.addi %first, %h : index
  %base = arith.muli %head, %dim : index
  {lines.text()}
}}
return
}}"""


def write_text(layer: LayerKernel) -> str:
    """Emit @{name}_keep(qkv [row, columns], [cos, sin [row, dim / 2],] [key norm [dim],] keys, values, table, lengths,
    row, group): the row's key, normed and rotated, and its value go to the page and offset of the row's last position.
    """
    shape, t = layer.shape, layer.attention.types
    pages = [Named("keys", t["pages"]), Named("values", t["pages"])]
    places = [
        Named("table", t["table"]),
        Named("lengths", t["lengths"]),
        Named("row", "index"),
        Named("group", "index"),
    ]
    taken = [Named("qkv", layer.qkv_out.type), *layer.angles, *key_norm(layer), *pages, *places]
    key = Lines("k")
    rotary_head(key, layer, "key", "%keys", "%page, %group, %offset", t["pages"])
    return f"""func.func private @{layer.name}_keep({declare_arguments(taken)}) {{
%one = arith.constant 1 : index
%size = arith.constant {layer.step.page_size} : index
%dim = arith.constant {shape.head_dim} : index
%length32 = memref.load %lengths[%row] : {t["lengths"]}
%length = arith.index_cast %length32 : i32 to index
%position = arith.subi %length, %one : index
%place = arith.divui %position, %size : index
%offset = arith.remui %position, %size : index
%number = memref.load %table[%row, %place] : {t["table"]}
%page = arith.index_cast %number : i32 to index
%keys_from = arith.constant {shape.num_heads * shape.head_dim} : index
%values_from = arith.constant {(shape.num_heads + shape.num_kv_heads) * shape.head_dim} : index
%within = arith.muli %group, %dim : index
%base = arith.addi %keys_from, %within : index
%value_at = arith.addi %values_from, %within : index
{key.text()}
{_value(layer)}
return
}}"""


def _lanes(layer: LayerKernel) -> int:
    return largest_divisor(layer.shape.head_dim // 2, layer.step.target.lanes)


def rotary_head(
    lines: Lines, layer: LayerKernel, of: Literal["query", "key"], out: str, at: str, out_type: str
) -> None:
    """Emit out[at] = the head of `of` (query, key) that begins at column %base of the row, normed, its two halves
    rotated against each other (RoPE, Su et al. 2021), rounded."""
    half, lanes, kind = layer.shape.head_dim // 2, _lanes(layer), layer.step.dtype
    norm = layer.head_norms.get(of)
    factor = None if norm is None else _factor(lines, layer, of)
    for start in range(0, half, lanes):
        places = [lines.index(start), lines.index(start + half)]
        parts = [_part(lines, layer, place, norm, factor) for place in places]
        if layer.angles:
            parts = _rotated_pair(lines, layer, parts, places[0])
        for place, value in zip(places, parts, strict=True):
            lines.store(lines.truncate(value, lanes, kind), out, f"{at}, {place}", out_type, lanes, kind)


def _rotated_pair(lines: Lines, layer: LayerKernel, parts: list[str], place: str) -> list[str]:
    lanes, (first, second) = _lanes(layer), parts
    cos, sin = (lines.load(f"%{each.name}", f"%row, {place}", each.type, lanes, "f32") for each in layer.angles)
    rotated = []
    for a, b, sign in ((first, second, "arith.subf"), (second, first, "arith.addf")):
        one, other = (lines.let(f"arith.mulf {x}, {y} : {vector(lanes)}") for x, y in ((a, cos), (b, sin)))
        rotated.append(lines.let(f"{sign} {one}, {other} : {vector(lanes)}"))
    return rotated


def _part(lines: Lines, layer: LayerKernel, place: str, norm: Named | None, factor: str | None) -> str:
    """Emit columns of the head from `place` on, times the norm's factor and weight where there is one."""
    lanes, kind = _lanes(layer), layer.step.dtype
    column = lines.let(f"arith.addi %base, {place} : index")
    part = lines.load("%qkv", f"%row, {column}", layer.qkv_out.type, lanes, "f32")
    if norm is None or factor is None:
        return part
    if layer.shape.whole_qk_norm:  # of all heads' columns one after another
        place = lines.let(f"arith.subi {column}, {lines.index(_first_column(layer, norm))} : index")
    gain = lines.extend(lines.load(f"%{norm.name}", place, norm.type, lanes, kind), lanes, kind)
    part = lines.let(f"arith.mulf {part}, {factor} : {vector(lanes)}")
    return lines.let(f"arith.mulf {part}, {gain} : {vector(lanes)}")


def _first_column(layer: LayerKernel, norm: Named) -> int:
    """Return the first column of queries, or of keys, in a row."""
    return 0 if norm == layer.head_norms["query"] else layer.shape.num_heads * layer.shape.head_dim


def _factor(lines: Lines, layer: LayerKernel, of: str) -> str:
    """Emit 1 / sqrt(mean(x²) + eps) of the head that begins at column %base, or of all heads of `of`, as a vector."""
    lanes, dim, norm = _lanes(layer), layer.shape.head_dim, layer.head_norms[of]
    first = "%base"
    if layer.shape.whole_qk_norm:
        first = lines.index(_first_column(layer, norm))
        dim *= layer.shape.num_heads if of == "query" else layer.shape.num_kv_heads
    last, name = lines.let(f"arith.addi {first}, {lines.index(dim)} : index"), f"%squares{lines.serial}"
    over = f"{name}_at = {first} to {last} step {lines.index(lanes)}"
    (squares,) = lines.begin_loop(name, over, [f"{name}_so_far"], [lines.constant("0.0", lanes)], lanes)
    part = lines.load("%qkv", f"%row, {name}_at", layer.qkv_out.type, lanes, "f32")
    lines.end_loop([lines.fma(part, part, f"{name}_so_far", lanes)], lanes)
    total, count = lines.hsum(squares, lanes), lines.let(f"arith.constant {number(dim)} : f32")
    eps, unit = (lines.let(f"arith.constant {number(value)} : f32") for value in (layer.step.eps, 1.0))
    raised = lines.let(f"arith.addf {lines.let(f'arith.divf {total}, {count} : f32')}, {eps} : f32")
    return lines.splat(lines.let(f"arith.divf {unit}, {lines.let(f'math.sqrt {raised} : f32')} : f32"), lanes)


def _value(layer: LayerKernel) -> str:
    """Emit %values[%page, %group, %offset] = the head that begins at column %value_at of the row, rounded."""
    lines, lanes, kind = Lines("w"), _lanes(layer), layer.step.dtype
    for at in range(0, layer.shape.head_dim, lanes):
        column = lines.let(f"arith.addi %value_at, {lines.index(at)} : index")
        value = lines.truncate(lines.load("%qkv", f"%row, {column}", layer.qkv_out.type, lanes, "f32"), lanes, kind)
        place = f"%page, %group, %offset, {lines.index(at)}"
        lines.store(value, "%values", place, layer.attention.pages, lanes, kind)
    return lines.text()
