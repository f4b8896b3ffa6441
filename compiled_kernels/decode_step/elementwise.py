"""Elementwise parts of a decode step as MLIR text: RMSNorm (Zhang and Sennrich, 2019) and the SwiGLU gate (Shazeer,
2020)."""

from __future__ import annotations

from compiled_kernels.decode_step.layer_kernel import LayerKernel
from compiled_kernels.decode_step.shape import StepShape
from compiled_kernels.mlir_text import Lines, largest_divisor, memref, number, vector


def norm_text(shape: StepShape) -> str:
    """Emit @norm(x [row, width], weight [width], out [row, width]): x / sqrt(mean(x²) + eps) * weight of every row,
    rounded to the type that enters products."""
    body = norm_body(shape, shape.dtype)
    return f"""func.func private @norm({_arguments(shape, shape.dtype)}) {{
%from = arith.constant 0 : index
%to = arith.constant {shape.rows} : index
{body}
return
}}"""


def norm_range_text(shape: StepShape, kind: str) -> str:
    """Emit @norm(x, weight, out, from, to): of the rows from..to; `out` is of type `kind`."""
    body = norm_body(shape, kind)
    return f"func.func private @norm({_arguments(shape, kind)}, %from: index, %to: index) {{\n{body}\nreturn\n}}"


def _arguments(shape: StepShape, kind: str) -> str:
    x, out = memref((shape.rows, shape.hidden_size), "f32"), memref((shape.rows, shape.hidden_size), kind)
    return f"%x: {x}, %weight: {memref((shape.hidden_size,), shape.dtype)}, %out: {out}"


def norm_body(shape: StepShape, result: str) -> str:
    """Emit the norm of rows %from..%to, as numbers of type `result`."""
    lanes, rows, width, kind = (
        largest_divisor(shape.hidden_size, shape.target.lanes),
        shape.rows,
        shape.hidden_size,
        shape.dtype,
    )
    x, weight, out = memref((rows, width), "f32"), memref((width,), kind), memref((rows, width), result)
    floats, lines = vector(lanes), Lines()
    value = lines.load("%x", "%row, %at", x, lanes, "f32")
    gain = lines.extend(lines.load("%weight", "%at", weight, lanes, kind), lanes, kind)
    value = lines.let(f"arith.mulf {value}, %factors : {floats}")
    value = lines.truncate(lines.let(f"arith.mulf {value}, {gain} : {floats}"), lanes, result)
    summing = Lines("s")
    total = summing.hsum("%sums", lanes)
    return f"""%zero = arith.constant 0 : index
%one = arith.constant 1 : index
%step = arith.constant {lanes} : index
%width = arith.constant {width} : index
%nothing = arith.constant dense<0.0> : {floats}
scf.for %row = %from to %to step %one {{
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
    vector.store {value}, %out[%row, %at] : {out}, {vector(lanes, result)}
  }}
}}"""


def gate_text(layer: LayerKernel) -> str:
    """Emit @{name}_gate(gate_up [row, 2 * hidden], out [row, hidden], begin, end): silu(gate) * up of hidden columns
    from begin to end, for every row, rounded to the type that enters products."""
    hidden = layer.shape.intermediate_size
    kind = layer.step.dtype if layer.shape.experts is None else layer.expert_dtype
    gate_up, out = layer.gate_up_out.type, layer.gated.type
    lanes = largest_divisor(hidden, layer.step.target.lanes)
    lines = Lines()
    value = lines.load("%gate_up", "%row, %at", gate_up, lanes, "f32")
    up = lines.load("%gate_up", "%row, %beside", gate_up, lanes, "f32")
    value = silu(lines, value, lanes)
    value = lines.truncate(lines.let(f"arith.mulf {value}, {up} : {vector(lanes)}"), lanes, kind)
    return f"""func.func private @{layer.name}_gate(%gate_up: {gate_up}, %out: {out}, %begin: index, %end: index) {{
%zero = arith.constant 0 : index
%one_row = arith.constant 1 : index
%step = arith.constant {lanes} : index
%rows = arith.constant {layer.feedforward_rows} : index
%hidden = arith.constant {hidden} : index
scf.for %row = %zero to %rows step %one_row {{
  scf.for %at = %begin to %end step %step {{
    %beside = arith.addi %at, %hidden : index
    {lines.text()}
    vector.store {value}, %out[%row, %at] : {out}, {vector(lanes, kind)}
  }}
}}
return
}}"""


def silu(lines: Lines, value: str, lanes: int) -> str:
    """Emit x / (1 + exp(-x))."""
    kind = vector(lanes)
    power = lines.exp(lines.let(f"arith.negf {value} : {kind}"), lanes)
    whole = lines.let(f"arith.addf {power}, {lines.constant('1.0', lanes)} : {kind}")
    return lines.let(f"arith.divf {value}, {whole} : {kind}")
