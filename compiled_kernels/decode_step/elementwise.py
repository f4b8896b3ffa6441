"""Elementwise parts of a decode step: RMSNorm (Zhang and Sennrich, 2019) and the SwiGLU gate (Shazeer, 2020)."""

from __future__ import annotations

import math

from compiled_kernels.builder.functions import Given, function, loop
from compiled_kernels.builder.target import Named, indices, largest_divisor, memref
from compiled_kernels.builder.values import Value, exp
from compiled_kernels.builder.vectors import norm_factor, silu
from compiled_kernels.decode_step.layer_kernel import LayerKernel
from compiled_kernels.decode_step.shape import StepShape


def norm(shape: StepShape, kind: str) -> None:
    """Build the function @norm(x [row, width], weight [width], out [row, width] of type `kind`, from, to), which
    computes x / sqrt(mean(x²) + eps) * weight for the rows from `from` to `to`."""
    width, lanes = shape.hidden_size, largest_divisor(shape.hidden_size, shape.target.lanes)
    x, out = (Named(name, memref((shape.rows, width), each)) for name, each in (("x", "f32"), ("out", kind)))
    weight = Named("weight", shape.norm_type)
    with function("norm", [x, weight, out, *indices("from", "to")]) as given, loop(given["from"], given["to"]) as row:
        factor = norm_factor(given["x"], row.index, 0, width, shape.eps, lanes)
        with loop(0, width, lanes) as turn:
            place = row.index, turn.index
            value = given["x"].load(lanes, *place) * factor * given["weight"].load(lanes, turn.index).to("f32")
            given["out"].store(value, *place)


Range = tuple[Value | int, Value | int]


def add_normed(layer: LayerKernel, given: Given, weight: str, rows: Range, columns: Range) -> None:
    """Emit x += norm(added) for these rows and columns; the buffer `added` holds the result of attention or of the
    feed-forward.
    """
    width, eps, added, x = layer.step.hidden_size, layer.step.eps, given[layer.added.name], given["x"]
    lanes = largest_divisor(width, layer.step.target.lanes)
    with loop(*rows) as row:
        factor = norm_factor(added, row.index, 0, width, eps, lanes)
        with loop(*columns, lanes) as turn:
            place = row.index, turn.index
            value = added.load(lanes, *place) * factor * given[weight].load(lanes, turn.index).to("f32")
            x.store(x.load(lanes, *place) + value, *place)


def activated(kind: str, value: Value) -> Value:
    """Return the activation of a gate: SiLU, or GELU in its tanh form, where 0.5 (1 + tanh u) is computed as 1 / (1 +
    exp(-2u)).
    """
    if kind == "silu":
        return silu(value)
    doubled = (value * value * 0.044715 + 1.0) * value * -(2.0 * math.sqrt(2.0 / math.pi))
    return value / (exp(doubled) + 1.0)


def gate(layer: LayerKernel, given: Given, begin: Value, end: Value) -> None:
    """Emit activation(gate) * up for every row and the intermediate columns from begin to end, in the type of the
    products' operands.
    """
    hidden, gate_up, out = layer.shape.intermediate_size, given[layer.gate_up_out.name], given[layer.gated.name]
    lanes = largest_divisor(hidden, layer.step.target.lanes)
    with loop(0, layer.feedforward_rows) as row, loop(begin, end, lanes) as turn:
        value, up = (gate_up.load(lanes, row.index, turn.index + skipped) for skipped in (0, hidden))
        out.store(activated(layer.shape.activation, value) * up, row.index, turn.index)
