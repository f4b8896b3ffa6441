"""Elementwise parts of a decode step: RMSNorm (Zhang and Sennrich, 2019) and the SwiGLU gate (Shazeer, 2020)."""

from __future__ import annotations

from compiled_kernels.builder.functions import Given, function, loop
from compiled_kernels.builder.values import Value
from compiled_kernels.builder.vectors import norm_factor, silu
from compiled_kernels.decode_step.layer_kernel import LayerKernel
from compiled_kernels.decode_step.shape import StepShape
from compiled_kernels.mlir_text import Named, indices, largest_divisor, memref


def norm(shape: StepShape, kind: str) -> None:
    """Make @norm(x [row, width], weight [width], out [row, width] of type `kind`, from, to): x / sqrt(mean(x²) + eps) *
    weight of the rows from..to."""
    width, lanes = shape.hidden_size, largest_divisor(shape.hidden_size, shape.target.lanes)
    x, out = (Named(name, memref((shape.rows, width), each)) for name, each in (("x", "f32"), ("out", kind)))
    weight = Named("weight", memref((width,), shape.dtype))
    with function("norm", [x, weight, out, *indices("from", "to")]) as given, loop(given["from"], given["to"]) as row:
        factor = norm_factor(given["x"], row.index, 0, width, shape.eps, lanes)
        with loop(0, width, lanes) as turn:
            place = row.index, turn.index
            value = given["x"].load(lanes, *place) * factor * given["weight"].load(lanes, turn.index).to("f32")
            given["out"].store(value.to(kind), *place)


def gate(layer: LayerKernel, given: Given, begin: Value, end: Value) -> None:
    """Make silu(gate) * up of hidden columns from begin to end, for every row, in the type that enters products."""
    hidden, gate_up, out = layer.shape.intermediate_size, given[layer.gate_up_out.name], given[layer.gated.name]
    lanes = largest_divisor(hidden, layer.step.target.lanes)
    with loop(0, layer.feedforward_rows) as row, loop(begin, end, lanes) as turn:
        value, up = (gate_up.load(lanes, row.index, turn.index + skipped) for skipped in (0, hidden))
        out.store((silu(value) * up).to(out.element), row.index, turn.index)
