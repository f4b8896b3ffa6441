"""A whole decode step as one MLIR module: every thread runs all of it and takes its share of each product.

    layer for layer (see layer.py), then norm -> head where the step has one

What is small (norms, merging, angles) every thread computes for itself rather than waiting for it.
"""

from __future__ import annotations

from compiled_kernels.decode_step.elementwise import norm_text
from compiled_kernels.decode_step.layer import layer_arguments, layer_text
from compiled_kernels.decode_step.layer_kernel import (
    AnyProduct,
    LayerKernel,
    head_product,
    int8_buffers,
    product_text_of,
    quantize,
    quantizers,
    rotary_arguments,
    taken,
    weight_arguments_of,
)
from compiled_kernels.decode_step.shape import LayerShape, StepShape
from compiled_kernels.mlir_text import THREADS, Named, call, declare_arguments, memref, thread_share
from compiled_kernels.quantized_attention.mlir_decode import span_function


def step_text(shape: StepShape) -> str:
    """Emit @decode_step(see `arguments`), with all it calls; layers of one shape are one function."""
    step = f"""func.func @decode_step({declare_arguments(arguments(shape))}) {{
%thread, %threads = call @thread() : () -> (index, index)
{step_body(shape, last.block if (last := head_product(shape)) else 1)}
return
}}"""
    return "\n".join([*step_functions(shape), step])


def step_functions(shape: StepShape) -> list[str]:
    """Emit all that a step calls."""
    called = [THREADS, span_function(), norm_text(shape)]
    called += [product_text_of(last), *quantizers("head", [last], shape.rows)] if (last := head_product(shape)) else []
    return [*called, *(layer_text(layer) for layer in _kinds(shape).values())]


def step_body(shape: StepShape, unit: int) -> str:
    """Emit the way from x to logits, where there is a head, of which each thread has a share [%vocab_begin,
    %vocab_end) in multiples of `unit`."""
    kinds, last = _kinds(shape), head_product(shape)
    calls = [_layer_call(kinds[each], index) for index, each in enumerate(shape.layers)]
    return "\n".join([*calls, *([_logits(shape, last, unit)] if last else [])])


def _kinds(shape: StepShape) -> dict[LayerShape, LayerKernel]:
    return {kind: LayerKernel(shape, kind, f"layer{i}") for i, kind in enumerate(shape.layer_kinds)}


def arguments(shape: StepShape) -> list[Named]:
    """Emit the step's arguments in order: its own buffers, then what it is given."""
    return [*buffers(shape), *step_inputs(shape)]


def buffers(shape: StepShape) -> list[Named]:
    """Return the buffers that change with each step, then the scratch buffers."""
    rows = shape.rows
    found = [Named("x", memref((rows, shape.hidden_size), "f32"))]
    found += [Named("logits", memref((rows, shape.vocab_size), "f32"))] if shape.head else []
    if shape.layers and shape.has("attention"):
        found += [Named("lengths", memref((rows,), "i32"))]
        found += [Named(f"table_{i}", memref((rows, shape.max_pages), "i32")) for i in range(shape.num_page_tables)]
        for index, dim in shape.rotary_dims.items():
            found += rotary_arguments(shape, dim, f"_{index}")
    for index, kind in enumerate(shape.layers):
        found += [Named(f"{name}_{index}", chosen) for name, chosen in LayerKernel(shape, kind).chosen]
    for kind in shape.layer_kinds:
        found += [buffer for buffer in LayerKernel(shape, kind).shared_buffers if buffer not in found]
    return found


def step_inputs(shape: StepShape) -> list[Named]:
    """Emit all weights and pages."""
    found = []
    if last := head_product(shape):
        found += [Named("norm", memref((shape.hidden_size,), shape.dtype)), *weight_arguments_of("head_", last)]
    for index, kind in enumerate(shape.layers):
        found += [Named(f"{name}_{index}", stored) for name, stored in LayerKernel(shape, kind).own_arguments]
    return found


def _layer_call(layer: LayerKernel, index: int) -> str:
    """Emit the layer of this index: its function, with the step's arguments for the layer's."""
    rotary = layer.shape.rotary_index
    called = {"quantized_table": f"table_{layer.shape.quantized_page_table}"}
    called |= {"table": f"table_{layer.shape.page_table}", "cos": f"cos_{rotary}", "sin": f"sin_{rotary}"}
    called |= {name: f"{name}_{index}" for name, _ in (*layer.own_arguments, *layer.chosen)}
    given = [Named(called.get(name, name), kind) for name, kind in layer_arguments(layer)]
    return call(layer.name, [*given, Named("thread", "index"), Named("threads", "index")])


def _logits(shape: StepShape, head: AnyProduct, unit: int) -> str:
    """Emit logits = the norm of x times the head's weight; this thread's columns."""
    x, weight = (
        Named("x", memref((shape.rows, shape.hidden_size), "f32")),
        Named("norm", memref((shape.hidden_size,), shape.dtype)),
    )
    normed = Named("normed", memref((shape.rows, shape.hidden_size), shape.dtype))
    logits = Named("logits", memref((shape.rows, shape.vocab_size), "f32"))
    columns = [Named("vocab_begin", "index"), Named("vocab_end", "index")]
    buffers = [normed, *int8_buffers([head], shape.rows)]
    return "\n".join(
        (
            *(f"%{name} = memref.alloca() {{alignment = 64 : i64}} : {kind}" for name, kind in buffers),
            call("norm", [x, weight, normed]),
            *quantize("head", head, normed, shape.rows),
            thread_share("vocab", shape.vocab_size, unit),
            call("head", [taken(head, normed, shape.rows), *weight_arguments_of("head_", head), logits, *columns]),
        )
    )
