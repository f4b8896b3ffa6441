"""The small functions of a step, between its products: norm, gate, rotation of a row's heads, the write."""

from __future__ import annotations

from compiled_kernels.decode_step.shape import LayerShape, StepShape
from compiled_kernels.mlir_text import Lines, divisor, memref, number
from compiled_kernels.paged_attention.mlir_text import Attention


def norm(shape: StepShape) -> str:
    """@norm(x, weight, out): x / sqrt(mean(x²) + eps) * weight of every row, rounded to the products' type."""
    lanes, rows, width, kind = divisor(shape.width, shape.target.lanes), shape.rows, shape.width, shape.kind
    x, weight, out = memref((rows, width), "f32"), memref((width,), kind), memref((rows, width), kind)
    vector = f"vector<{lanes}xf32>"
    lines = Lines()
    value = lines.load("%x", "%row, %at", x, lanes, "f32")
    gain = lines.wide(lines.load("%weight", "%at", weight, lanes, kind), lanes, kind)
    value = lines.let(f"arith.mulf {value}, %factors : {vector}")
    value = lines.narrow(lines.let(f"arith.mulf {value}, {gain} : {vector}"), lanes, kind)
    return f"""func.func private @norm(%x: {x}, %weight: {weight}, %out: {out}) {{
%zero = arith.constant 0 : index
%one = arith.constant 1 : index
%step = arith.constant {lanes} : index
%rows = arith.constant {rows} : index
%width = arith.constant {width} : index
%nothing = arith.constant dense<0.0> : {vector}
scf.for %row = %zero to %rows step %one {{
  %sums = scf.for %at = %zero to %width step %step iter_args(%sum = %nothing) -> ({vector}) {{
    %part = vector.load %x[%row, %at] : {x}, {vector}
    %next = vector.fma %part, %part, %sum : {vector}
    scf.yield %next : {vector}
  }}
  %total = vector.reduction <add>, %sums : {vector} into f32
  %count = arith.constant {number(width)} : f32
  %mean = arith.divf %total, %count : f32
  %eps = arith.constant {number(shape.eps)} : f32
  %raised = arith.addf %mean, %eps : f32
  %root = math.sqrt %raised : f32
  %unit = arith.constant 1.0 : f32
  %factor = arith.divf %unit, %root : f32
  %factors = vector.broadcast %factor : f32 to {vector}
  scf.for %at = %zero to %width step %step {{
    {lines.text()}
    vector.store {value}, %out[%row, %at] : {out}, vector<{lanes}x{kind}>
  }}
}}
return
}}"""


def gate(shape: StepShape, layer: LayerShape, name: str) -> str:
    """@{name}(gate_up, out, begin, end): silu(gate) * up of hidden columns from begin to end, for every row."""
    lanes, hidden, kind = shape.target.lanes, layer.hidden, shape.kind
    lanes = divisor(hidden, lanes)
    gate_up, out = memref((shape.rows, 2 * hidden), "f32"), memref((shape.rows, hidden), kind)
    vector, run = f"vector<{lanes}xf32>", f"vector<{shape.target.lanes}xf32>"
    lines = Lines()
    value = lines.load("%gate_up", "%row, %at", gate_up, lanes, "f32")
    up = lines.load("%gate_up", "%row, %beside", gate_up, lanes, "f32")
    negative = lines.let(f"arith.negf {value} : {vector}")
    power = _exp(lines, negative, lanes, shape.target.lanes, run)
    one = lines.let(f"arith.constant dense<1.0> : {vector}")
    whole = lines.let(f"arith.addf {power}, {one} : {vector}")
    value = lines.let(f"arith.divf {value}, {whole} : {vector}")
    value = lines.narrow(lines.let(f"arith.mulf {value}, {up} : {vector}"), lanes, kind)
    return f"""func.func private @{name}(%gate_up: {gate_up}, %out: {out}, %begin: index, %end: index) {{
%zero = arith.constant 0 : index
%one_row = arith.constant 1 : index
%step = arith.constant {lanes} : index
%rows = arith.constant {shape.rows} : index
%hidden = arith.constant {hidden} : index
scf.for %row = %zero to %rows step %one_row {{
  scf.for %at = %begin to %end step %step {{
    %beside = arith.addi %at, %hidden : index
    {lines.text()}
    vector.store {value}, %out[%row, %at] : {out}, vector<{lanes}x{kind}>
  }}
}}
return
}}"""


def _exp(lines: Lines, value: str, lanes: int, run: int, kind: str) -> str:
    """@exp takes vectors of `run`; a narrower one is widened with copies of itself and cut again."""
    if lanes == run:
        return lines.let(f"func.call @exp({value}) : ({kind}) -> {kind}")
    narrow = f"vector<{lanes}xf32>"
    wide = lines.let(f"vector.shuffle {value}, {value} {[i % lanes for i in range(run)]} : {narrow}, {narrow}")
    power = lines.let(f"func.call @exp({wide}) : ({kind}) -> {kind}")
    return lines.let(f"vector.shuffle {power}, {power} {list(range(lanes))} : {kind}, {kind}")


def turn(shape: StepShape, layer: LayerShape, name: str, attention: Attention) -> str:
    """@{name}_turn(qkv, cos, sin, out, row, group): the group's query heads, turned by the row's angles.
    @{name}_keep(qkv, cos, sin, keys, values, table, lengths, row, group): the row's key, turned, and its value, put
    where the row's last position lies."""
    t = attention.types
    rows, dim, kind = shape.rows, layer.dim, shape.kind
    qkv = memref((rows, (layer.heads + 2 * layer.groups) * dim), "f32")
    angles = memref((rows, dim // 2), "f32")
    lanes = divisor(dim // 2, shape.target.lanes)
    queries, keys, values = Lines("q"), Lines("k"), Lines("w")
    _turned(queries, "%q", "%h", t["queries"], lanes, shape, layer, qkv, angles)
    _turned(keys, "%keys", "%page, %group, %offset", t["pages"], lanes, shape, layer, qkv, angles)
    for at in range(0, dim, lanes):
        column = values.let(f"arith.addi %value_at, {values.index(at)} : index")
        value = values.narrow(values.load("%qkv", f"%row, {column}", qkv, lanes, "f32"), lanes, kind)
        place = values.index(at)
        values.say(
            f"vector.store {value}, %values[%page, %group, %offset, {place}] : {t['pages']}, vector<{lanes}x{kind}>"
        )
    return f"""func.func private @{name}_turn(%qkv: {qkv}, %cos: {angles}, %sin: {angles}, %q: {t["queries"]},
    %row: index, %group: index) {{
%zero = arith.constant 0 : index
%one = arith.constant 1 : index
%share = arith.constant {layer.heads // layer.groups} : index
%dim = arith.constant {dim} : index
%first = arith.muli %group, %share : index
scf.for %h = %zero to %share step %one {{
  %head = arith.addi %first, %h : index
  %base = arith.muli %head, %dim : index
  {queries.text()}
}}
return
}}
func.func private @{name}_keep(%qkv: {qkv}, %cos: {angles}, %sin: {angles}, %keys: {t["pages"]}, %values: {t["pages"]},
    %table: {t["table"]}, %lengths: {t["lengths"]}, %row: index, %group: index) {{
%one = arith.constant 1 : index
%size = arith.constant {shape.size} : index
%dim = arith.constant {dim} : index
%length32 = memref.load %lengths[%row] : {t["lengths"]}
%length = arith.index_cast %length32 : i32 to index
%position = arith.subi %length, %one : index
%place = arith.divui %position, %size : index
%offset = arith.remui %position, %size : index
%number = memref.load %table[%row, %place] : {t["table"]}
%page = arith.index_cast %number : i32 to index
%keys_from = arith.constant {layer.heads * dim} : index
%values_from = arith.constant {(layer.heads + layer.groups) * dim} : index
%within = arith.muli %group, %dim : index
%base = arith.addi %keys_from, %within : index
%value_at = arith.addi %values_from, %within : index
{keys.text()}
{values.text()}
return
}}"""


def _turned(
    lines: Lines,
    out: str,
    at: str,
    out_type: str,
    lanes: int,
    shape: StepShape,
    layer: LayerShape,
    qkv: str,
    angles: str,
) -> None:
    """out[at] = the head that begins at column %base of qkv, turned."""
    half, kind, vector = layer.dim // 2, shape.kind, f"vector<{lanes}xf32>"
    for start in range(0, half, lanes):
        places = [lines.index(start), lines.index(start + half)]
        first, second = (
            lines.load("%qkv", f"%row, {lines.let(f'arith.addi %base, {p} : index')}", qkv, lanes, "f32")
            for p in places
        )
        cos, sin = (lines.load(memory, f"%row, {places[0]}", angles, lanes, "f32") for memory in ("%cos", "%sin"))
        turned = []
        for a, b, sign in ((first, second, "arith.subf"), (second, first, "arith.addf")):
            one, other = (lines.let(f"arith.mulf {x}, {y} : {vector}") for x, y in ((a, cos), (b, sin)))
            turned.append(lines.narrow(lines.let(f"{sign} {one}, {other} : {vector}"), lanes, kind))
        for place, value in zip(places, turned, strict=True):
            lines.say(f"vector.store {value}, {out}[{at}, {place}] : {out_type}, vector<{lanes}x{kind}>")
