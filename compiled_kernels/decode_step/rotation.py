"""Between a layer's products: queries and keys turned by their position's angles, keys and values written."""

from __future__ import annotations

from compiled_kernels.decode_step.parts import Layer
from compiled_kernels.mlir_text import Lines, divisor, vector


def turn(layer: Layer) -> str:
    """@{name}_turn(qkv [row, columns], cos, sin [row, dim / 2], q [share, dim], row, group): q = the group's query
    heads of the row, turned by the row's angles."""
    shape, t = layer.shape, layer.attention.types
    qkv, angles = layer.qkv_out.type, layer.angles
    lines = Lines("q")
    _turned(lines, layer, "%q", "%h", t["queries"])
    return f"""func.func private @{layer.name}_turn(%qkv: {qkv}, %cos: {angles}, %sin: {angles}, %q: {t["queries"]},
    %row: index, %group: index) {{
%zero = arith.constant 0 : index
%one = arith.constant 1 : index
%share = arith.constant {shape.heads // shape.groups} : index
%dim = arith.constant {shape.dim} : index
%first = arith.muli %group, %share : index
scf.for %h = %zero to %share step %one {{
  %head = arith.addi %first, %h : index
  %base = arith.muli %head, %dim : index
  {lines.text()}
}}
return
}}"""


def keep(layer: Layer) -> str:
    """@{name}_keep(qkv [row, columns], cos, sin [row, dim / 2], keys, values, table, lengths, row, group): the row's
    key, turned, and its value go to the page and offset of the row's last position."""
    shape, t = layer.shape, layer.attention.types
    qkv, angles = layer.qkv_out.type, layer.angles
    key = Lines("k")
    _turned(key, layer, "%keys", "%page, %group, %offset", t["pages"])
    return f"""func.func private @{layer.name}_keep(%qkv: {qkv}, %cos: {angles}, %sin: {angles}, %keys: {t["pages"]}, %values: {t["pages"]},
    %table: {t["table"]}, %lengths: {t["lengths"]}, %row: index, %group: index) {{
%one = arith.constant 1 : index
%size = arith.constant {layer.step.size} : index
%dim = arith.constant {shape.dim} : index
%length32 = memref.load %lengths[%row] : {t["lengths"]}
%length = arith.index_cast %length32 : i32 to index
%position = arith.subi %length, %one : index
%place = arith.divui %position, %size : index
%offset = arith.remui %position, %size : index
%number = memref.load %table[%row, %place] : {t["table"]}
%page = arith.index_cast %number : i32 to index
%keys_from = arith.constant {shape.heads * shape.dim} : index
%values_from = arith.constant {(shape.heads + shape.groups) * shape.dim} : index
%within = arith.muli %group, %dim : index
%base = arith.addi %keys_from, %within : index
%value_at = arith.addi %values_from, %within : index
{key.text()}
{_value(layer)}
return
}}"""


def _lanes(layer: Layer) -> int:
    return divisor(layer.shape.dim // 2, layer.step.target.lanes)


def _turned(lines: Lines, layer: Layer, out: str, at: str, out_type: str) -> None:
    """out[at] = the head that begins at column %base of the row, its two halves turned against each other (RoPE,
    Su et al. 2021), rounded."""
    half, lanes, kind, qkv = layer.shape.dim // 2, _lanes(layer), layer.step.kind, layer.qkv_out.type
    for start in range(0, half, lanes):
        places = [lines.index(start), lines.index(start + half)]
        columns = (lines.let(f"arith.addi %base, {place} : index") for place in places)
        first, second = (lines.load("%qkv", f"%row, {column}", qkv, lanes, "f32") for column in columns)
        cos, sin = (lines.load(each, f"%row, {places[0]}", layer.angles, lanes, "f32") for each in ("%cos", "%sin"))
        turned = []
        for a, b, sign in ((first, second, "arith.subf"), (second, first, "arith.addf")):
            one, other = (lines.let(f"arith.mulf {x}, {y} : {vector(lanes)}") for x, y in ((a, cos), (b, sin)))
            turned.append(lines.narrow(lines.let(f"{sign} {one}, {other} : {vector(lanes)}"), lanes, kind))
        for place, value in zip(places, turned, strict=True):
            lines.store(value, out, f"{at}, {place}", out_type, lanes, kind)


def _value(layer: Layer) -> str:
    """%values[%page, %group, %offset] = the head that begins at column %value_at of the row, rounded."""
    lines, lanes, kind = Lines("w"), _lanes(layer), layer.step.kind
    for at in range(0, layer.shape.dim, lanes):
        column = lines.let(f"arith.addi %value_at, {lines.index(at)} : index")
        value = lines.narrow(lines.load("%qkv", f"%row, {column}", layer.qkv_out.type, lanes, "f32"), lanes, kind)
        place = f"%page, %group, %offset, {lines.index(at)}"
        lines.store(value, "%values", place, layer.attention.pages, lanes, kind)
    return lines.text()
