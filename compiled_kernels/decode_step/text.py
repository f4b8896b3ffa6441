"""A whole decode step as one MLIR module: every thread runs all of it and computes its share of each product.

    layer for layer (see layer.py), then norm -> head if the step has one

Every thread computes small parts (norms, merging, angles) itself rather than wait for another.
"""

from __future__ import annotations

from compiled_kernels.builder.functions import Given, alloca, call, text_of
from compiled_kernels.builder.target import Named, memref
from compiled_kernels.builder.threads import entry, share
from compiled_kernels.builder.values import Value
from compiled_kernels.decode_step.elementwise import norm
from compiled_kernels.decode_step.layer import layer_arguments, make_layer
from compiled_kernels.decode_step.layer_kernel import (
    AnyProduct,
    LayerKernel,
    enter,
    head_product,
    int8_buffers,
    make_products,
    multiply,
    rotary_arguments,
    weight_arguments_of,
)
from compiled_kernels.decode_step.shape import LayerShape, StepShape


def step_text(shape: StepShape) -> str:
    """Return the MLIR text of the function @decode_step(see `arguments`) and of all functions that it calls; layers of
    equal shape share a function.
    """

    def step() -> None:
        step_functions(shape)
        with entry("decode_step", arguments(shape)) as given:
            make_step(shape, given, head.block if (head := head_product(shape)) else 1)

    return text_of(step)


def step_functions(shape: StepShape) -> None:
    """Build all functions that a step calls."""
    norm(shape, shape.dtype)
    make_products("head", [last] if (last := head_product(shape)) else [], shape.rows)
    for layer in _kinds(shape).values():
        make_layer(layer)


def make_step(shape: StepShape, given: Given, unit: int) -> list[Value]:
    """Emit the operations from x to the logits, if the step has a head; return the begin and end of this thread's share
    of the logits, in multiples of `unit`."""
    kinds, last = _kinds(shape), head_product(shape)
    for number, each in enumerate(shape.layers):
        _call_layer(kinds[each], number, given)
    return _logits(shape, last, given, unit) if last else []


def _kinds(shape: StepShape) -> dict[LayerShape, LayerKernel]:
    return {kind: LayerKernel(shape, kind, f"layer{i}") for i, kind in enumerate(shape.layer_kinds)}


def arguments(shape: StepShape) -> list[Named]:
    """Return the step's arguments in order: its own buffers, then its inputs."""
    return [*buffers(shape), *step_inputs(shape)]


def buffers(shape: StepShape) -> list[Named]:
    """Return the step's own buffers: first its inputs and outputs, which change with each step, then scratch memory."""
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
    """Return the arguments for all weights and pages, which the caller passes."""
    found = []
    if last := head_product(shape):
        found += [Named("norm", shape.norm_type), *weight_arguments_of("head_", last)]
    for index, kind in enumerate(shape.layers):
        found += [Named(f"{name}_{index}", stored) for name, stored in LayerKernel(shape, kind).own_arguments]
    return found


def _call_layer(layer: LayerKernel, number: int, given: Given) -> None:
    """Emit a call of the layer's function with this layer's arguments of the step."""
    rotary = layer.shape.rotary_index
    called = {"quantized_table": f"table_{layer.shape.quantized_page_table}"}
    called |= {"table": f"table_{layer.shape.page_table}", "cos": f"cos_{rotary}", "sin": f"sin_{rotary}"}
    called |= {name: f"{name}_{number}" for name, _ in (*layer.own_arguments, *layer.chosen)}
    names = [*(name for name, _ in layer_arguments(layer)), "thread", "threads"]
    call(layer.name, [given[called.get(name, name)] for name in names])


def _logits(shape: StepShape, head: AnyProduct, given: Given, unit: int) -> list[Value]:
    """Emit logits = norm(x) times the head's weight for this thread's columns, and return these columns."""
    normed, rows = Named("normed", memref((shape.rows, shape.hidden_size), shape.dtype)), (0, shape.rows)
    given = given | {name: alloca(kind) for name, kind in (normed, *int8_buffers([head], shape.rows))}
    call("norm", [given["x"], given["norm"], given["normed"], *rows])
    columns = share(given, shape.vocab_size, unit)
    enter([head], given, "normed", "head", rows)
    multiply(head, "head_", given, "normed", "logits", columns)
    return columns
