"""Build a program in MLIR's dialects, on vectors or on single numbers."""

# pyright: reportAttributeAccessIssue=false
from __future__ import annotations

from collections.abc import Mapping

from compiled_kernels.builder.functions import table
from compiled_kernels.builder.values import Value, constant, mlir
from compiled_kernels.builder.vectors import tanh
from compiled_kernels.scalar_code.lower import lowered
from compiled_kernels.scalar_code.program import Kind, Program, Step

OF_INTEGERS = {
    "add": "addi", "sub": "subi", "mul": "muli", "quot": "divsi", "rem": "remsi", "min": "minsi", "max": "maxsi",
    "and": "andi", "or": "ori", "xor": "xori", "shl": "shli", "shr": "shrsi",
}  # fmt: skip
OF_FLOATS = {
    "add": "addf", "sub": "subf", "mul": "mulf", "div": "divf", "min": "minimumf", "max": "maximumf", "neg": "negf",
    "abs": "absf",
}  # fmt: skip
COMPARISONS = {"lt": ("slt", "olt"), "le": ("sle", "ole"), "eq": ("eq", "oeq"), "ne": ("ne", "une")}


def scalar_code(program: Program, inputs: Mapping[str, Value], lanes: int = 0) -> Value:
    """Emit the operations of a program over its `inputs` (values by name), and return the result.

    Integers that come in are indices, floats are float32, bools i1; vectors of `lanes` where that is not 0, or one
    number for all of them.
    """
    steps, bits = lowered(program)
    values = [_input(inputs[name], kind, bits, lanes) for name, kind in program.inputs]
    for step in steps.steps:
        values.append(_step(step, [values[each] for each in step.reads], _element(step.kind, bits), lanes))
    return values[steps.result]


def _element(kind: Kind, bits: int) -> str:
    return {"bool": "i1", "float": "f32"}.get(kind, f"i{bits}")


def _input(value: Value, kind: Kind, bits: int, lanes: int) -> Value:
    value = value.to(_element(kind, bits))
    return value.broadcast(lanes) if lanes and not value.lanes else value


def _step(step: Step, reads: list[Value], element: str, lanes: int) -> Value:
    operation, arith = step.operation, mlir().arith
    if operation == "const":
        return constant(step.numbers[0], element, lanes)
    x, *others = reads
    if operation == "table":
        return _entries(table(step.numbers, element), x)
    if operation == "select":
        return x.select(*others)
    if operation == "float":
        return Value((arith.uitofp if x.element == "i1" else arith.sitofp)(x.as_type("f32"), x.ir))
    if operation == "int":
        return x.to(element, signed=False)
    if operation == "not":
        return x ^ (1 if x.element == "i1" else -1)
    if operation == "tanh":
        return tanh(x * 2.0)
    if operation in COMPARISONS:
        return x.compared(COMPARISONS[operation][x.is_float], *others)
    if not x.is_float and operation in ("neg", "abs"):
        below = x.like(0) - x
        return below if operation == "neg" else Value(arith.maxsi(x.ir, below.ir))
    # other operations, such as exp, have the same name
    made = (OF_FLOATS if x.is_float else OF_INTEGERS).get(operation, operation)
    return Value(getattr(arith if hasattr(arith, made) else mlir().math, made)(*(each.ir for each in reads)))


def _entries(memory: Value, places: Value) -> Value:
    """Return numbers of a table, one by one."""
    if not places.lanes:
        return memory[places.to("index")]
    found = constant(0, memory.element, places.lanes)
    for at in range(places.lanes):
        found = found.put(at, memory[places.at(at).to("index")])
    return found
