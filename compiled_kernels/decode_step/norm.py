"""RMSNorm of a step's rows (Zhang and Sennrich, 2019)."""

from __future__ import annotations

from compiled_kernels.decode_step.shape import StepShape
from compiled_kernels.mlir_text import Lines, divisor, memref, number, vector


def norm(shape: StepShape) -> str:
    """@norm(x [row, width], weight [width], out [row, width]): x / sqrt(mean(x²) + eps) * weight of every row, rounded
    to the type that enters products."""
    lanes, rows, width, kind = divisor(shape.width, shape.target.lanes), shape.rows, shape.width, shape.kind
    x, weight, out = memref((rows, width), "f32"), memref((width,), kind), memref((rows, width), kind)
    floats, lines = vector(lanes), Lines()
    value = lines.load("%x", "%row, %at", x, lanes, "f32")
    gain = lines.wide(lines.load("%weight", "%at", weight, lanes, kind), lanes, kind)
    value = lines.let(f"arith.mulf {value}, %factors : {floats}")
    value = lines.narrow(lines.let(f"arith.mulf {value}, {gain} : {floats}"), lanes, kind)
    summing = Lines("s")
    total = summing.total("%sums", lanes)
    return f"""func.func private @norm(%x: {x}, %weight: {weight}, %out: {out}) {{
%zero = arith.constant 0 : index
%one = arith.constant 1 : index
%step = arith.constant {lanes} : index
%rows = arith.constant {rows} : index
%width = arith.constant {width} : index
%nothing = arith.constant dense<0.0> : {floats}
scf.for %row = %zero to %rows step %one {{
  %sums = scf.for %at = %zero to %width step %step iter_args(%sum = %nothing) -> ({floats}) {{
    %part = vector.load %x[%row, %at] : {x}, {floats}
    %next = vector.fma %part, %part, %sum : {floats}
    scf.yield %next : {floats}
  }}
  {summing.text()}
  %count = arith.constant {number(width)} : f32
  %mean = arith.divf {total}, %count : f32
  %eps = arith.constant {number(shape.eps)} : f32
  %raised = arith.addf %mean, %eps : f32
  %root = math.sqrt %raised : f32
  %unit = arith.constant 1.0 : f32
  %factor = arith.divf %unit, %root : f32
  %factors = vector.broadcast %factor : f32 to {floats}
  scf.for %at = %zero to %width step %step {{
    {lines.text()}
    vector.store {value}, %out[%row, %at] : {out}, {vector(lanes, kind)}
  }}
}}
return
}}"""
