"""Between the first product of a block and its attention: heads normed and rotated, as cache and attention
take them."""

from __future__ import annotations

from compiled_kernels.decode_step.rotation import turned
from compiled_kernels.mlir_text import Lines, Named, declared, divisor
from compiled_kernels.prefill.shape import BlockShape


def turn(shape: BlockShape) -> str:
    """Emit @turn(qkv [row, columns], [cos, sin [row, dim / 2],] [query norm, key norm [dim],] q, k, v [row, head,
    dim], from, to): queries and keys of the rows from..to, normed and rotated where the layer does that, and their
    values."""
    layer, types = shape.layer, {name: kind for name, kind in shape.heads}
    arguments = [shape.parts.qkv_out._replace(name="qkv"), *shape.parts.angles, *shape.parts.head_norms.values()]
    bounds = [Named("from", "index"), Named("to", "index")]
    query, key = Lines("q"), Lines("k")
    turned(query, shape.parts, "%query_norm", "%q", "%row, %head", types["q"])
    turned(key, shape.parts, "%key_norm", "%k", "%row, %head", types["k"])
    return f"""func.func private @turn({declared([*arguments, *shape.heads, *bounds])}) {{
%zero = arith.constant 0 : index
%one = arith.constant 1 : index
%dim = arith.constant {layer.dim} : index
%heads = arith.constant {layer.heads} : index
%groups = arith.constant {layer.groups} : index
%with_keys = arith.constant {layer.heads + layer.groups} : index
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
    lines, lanes = Lines("w"), divisor(shape.layer.dim, shape.target.lanes)
    for at in range(0, shape.layer.dim, lanes):
        place = lines.index(at)
        column = lines.let(f"arith.addi %value_at, {place} : index")
        value = lines.load("%qkv", f"%row, {column}", shape.parts.qkv_out.type, lanes, "f32")
        lines.store(lines.narrow(value, lanes, shape.kind), "%v", f"%row, %head, {place}", kind, lanes, shape.kind)
    return lines.text()
