"""A whole decode step as one MLIR module: every thread runs all of it and takes its share of each product.

    layer for layer (see layer.py), then norm -> head where the step has one

What is small (norms, merging, angles) every thread computes for itself rather than waiting for it.
"""

from __future__ import annotations

from compiled_kernels.decode_step.layer import layer_text, passed
from compiled_kernels.decode_step.norm import norm
from compiled_kernels.decode_step.parts import (
    AnyProduct,
    Layer,
    angles,
    head,
    int8_buffers,
    matrices,
    quantize,
    quantizers,
    taken,
    text_of,
)
from compiled_kernels.decode_step.shape import LayerShape, StepShape
from compiled_kernels.mlir_text import THREADS, Named, call, declared, exp_function, memref, share_of
from compiled_kernels.quantized_attention.mlir_item import bounds


def step_text(shape: StepShape) -> str:
    """Emit @decode_step(see `arguments`), with all it calls; layers of one shape are one function."""
    step = f"""func.func @decode_step({declared(arguments(shape))}) {{
%thread, %threads = call @thread() : () -> (index, index)
{computed(shape, last.block if (last := head(shape)) else 1)}
return
}}"""
    return "\n".join([*functions(shape), step])


def functions(shape: StepShape) -> list[str]:
    """Emit all that a step calls."""
    called = [THREADS, exp_function(shape.target.lanes), bounds(), norm(shape)]
    called += [text_of(last), *quantizers("head", [last], shape.rows)] if (last := head(shape)) else []
    return [*called, *(layer_text(layer) for layer in _kinds(shape).values())]


def computed(shape: StepShape, unit: int) -> str:
    """Emit the way from x to logits, where there is a head, of which each thread has a share [%vocab_begin,
    %vocab_end) in multiples of `unit`."""
    kinds, last = _kinds(shape), head(shape)
    calls = [_layer_call(kinds[each], index) for index, each in enumerate(shape.layers)]
    return "\n".join([*calls, *([_logits(shape, last, unit)] if last else [])])


def _kinds(shape: StepShape) -> dict[LayerShape, Layer]:
    return {kind: Layer(shape, kind, f"layer{i}") for i, kind in enumerate(shape.kinds)}


def arguments(shape: StepShape) -> list[Named]:
    """Emit the step's arguments in order: its own buffers, then what it is given."""
    return [*buffers(shape), *given(shape)]


def buffers(shape: StepShape) -> list[Named]:
    """Return the buffers that change with each step, then the scratch buffers."""
    rows = shape.rows
    found = [Named("x", memref((rows, shape.width), "f32"))]
    found += [Named("logits", memref((rows, shape.vocab), "f32"))] if shape.head else []
    found += [Named("lengths", memref((rows,), "i32"))] if shape.layers else []
    found += [Named(f"table_{i}", memref((rows, shape.held), "i32")) for i in range(shape.tables)]
    for index, dim in shape.turns.items():
        found += angles(shape, dim, f"_{index}")
    for kind in shape.kinds:
        found += [buffer for buffer in Layer(shape, kind).shared if buffer not in found]
    return found


def given(shape: StepShape) -> list[Named]:
    """Emit all weights and pages."""
    found = []
    if last := head(shape):
        found += [Named("norm", memref((shape.width,), shape.kind)), *matrices("head_", last)]
    for index, kind in enumerate(shape.layers):
        found += [Named(f"{name}_{index}", stored) for name, stored in Layer(shape, kind).own]
    return found


def _layer_call(layer: Layer, index: int) -> str:
    """Emit the layer of this index: its function, with the step's arguments for the layer's."""
    turn = layer.shape.turn
    packing = layer.shape.packing
    called = {"packed_table": f"table_{packing.table}"} if packing else {}
    called |= {"table": f"table_{layer.shape.table}", "cos": f"cos_{turn}", "sin": f"sin_{turn}"}
    called |= {name: f"{name}_{index}" for name, _ in layer.own}
    given = [Named(called.get(name, name), kind) for name, kind in passed(layer)]
    return call(layer.name, [*given, Named("thread", "index"), Named("threads", "index")])


def _logits(shape: StepShape, head: AnyProduct, unit: int) -> str:
    """Emit logits = the norm of x times the head's weight; this thread's columns."""
    x, weight = Named("x", memref((shape.rows, shape.width), "f32")), Named("norm", memref((shape.width,), shape.kind))
    normed = Named("normed", memref((shape.rows, shape.width), shape.kind))
    logits = Named("logits", memref((shape.rows, shape.vocab), "f32"))
    columns = [Named("vocab_begin", "index"), Named("vocab_end", "index")]
    buffers = [normed, *int8_buffers([head], shape.rows)]
    return "\n".join(
        (
            *(f"%{name} = memref.alloca() {{alignment = 64 : i64}} : {kind}" for name, kind in buffers),
            call("norm", [x, weight, normed]),
            *quantize("head", head, normed, shape.rows),
            share_of("vocab", shape.vocab, unit),
            call("head", [taken(head, normed, shape.rows), *matrices("head_", head), logits, *columns]),
        )
    )
