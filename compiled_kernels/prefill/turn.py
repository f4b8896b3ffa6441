"""Between the first product of a block and its attention: heads normed and rotated, as cache and attention
take them."""

from __future__ import annotations

from compiled_kernels.decode_step.rotation import rotary_head
from compiled_kernels.mlir_text import Lines, Named, declare_arguments, largest_divisor
from compiled_kernels.prefill.shape import BlockShape


def rotary_text(shape: BlockShape) -> str:
    """Emit @turn(qkv [row, columns], [cos, sin [row, dim / 2],] [query norm, key norm [dim],] q, k, v [row, head,
    dim], from, to): queries and keys of the rows from..to, normed and rotated where the layer does that, and their
    values."""
    layer, types = shape.layer, {name: kind for name, kind in shape.heads}
    arguments = [shape.layer_kernel.qkv_out._replace(name="qkv"), *shape.layer_kernel.angles, *shape.layer_kernel.head_norms.values()]
    bounds = [Named("from", "index"), Named("to", "index")]
    query, key = Lines("q"), Lines("k")
    rotary_head(query, shape.layer_kernel, "%query_norm", "%q", "%row, %head", types["q"])
    rotary_head(key, shape.layer_kernel, "%key_norm", "%k", "%row, %head", types["k"])
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
