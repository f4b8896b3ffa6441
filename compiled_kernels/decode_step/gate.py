"""The gate of a step's feed-forwards (SwiGLU: Shazeer, 2020)."""

from __future__ import annotations

from compiled_kernels.decode_step.parts import LayerKernel
from compiled_kernels.mlir_text import Lines, largest_divisor, vector


def gate_text(layer: LayerKernel) -> str:
    """Emit @{name}_gate(gate_up [row, 2 * hidden], out [row, hidden], begin, end): silu(gate) * up of hidden columns
    from begin to end, for every row, rounded to the type that enters products."""
    hidden, kind = layer.shape.intermediate_size, layer.step.dtype
    gate_up, out = layer.gate_up_out.type, layer.gated.type
    lanes = largest_divisor(hidden, layer.step.target.lanes)
    lines = Lines()
    value = lines.load("%gate_up", "%row, %at", gate_up, lanes, "f32")
    up = lines.load("%gate_up", "%row, %beside", gate_up, lanes, "f32")
    value = silu(lines, value, lanes, layer.step.target.lanes)
    value = lines.truncate(lines.let(f"arith.mulf {value}, {up} : {vector(lanes)}"), lanes, kind)
    return f"""func.func private @{layer.name}_gate(%gate_up: {gate_up}, %out: {out}, %begin: index, %end: index) {{
%zero = arith.constant 0 : index
%one_row = arith.constant 1 : index
%step = arith.constant {lanes} : index
%rows = arith.constant {layer.step.rows} : index
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


def silu(lines: Lines, value: str, lanes: int, wide: int) -> str:
    """Emit x / (1 + exp(-x)); @exp takes vectors of `wide` lanes."""
    kind = vector(lanes)
    power = exp(lines, lines.let(f"arith.negf {value} : {kind}"), lanes, wide)
    one = lines.constant("1.0", lanes)
    whole = lines.let(f"arith.addf {power}, {one} : {kind}")
    return lines.let(f"arith.divf {value}, {whole} : {kind}")


def exp(lines: Lines, value: str, lanes: int, wide: int) -> str:
    """A vector narrower than what @exp takes is widened with copies of itself and cut again."""
    if lanes == wide:
        return lines.exp(value, lanes)
    copies, first = [i % lanes for i in range(wide)], list(range(lanes))
    widened = lines.let(f"vector.shuffle {value}, {value} {copies} : {vector(lanes)}, {vector(lanes)}")
    power = lines.exp(widened, wide)
    return lines.let(f"vector.shuffle {power}, {power} {first} : {vector(wide)}, {vector(wide)}")
