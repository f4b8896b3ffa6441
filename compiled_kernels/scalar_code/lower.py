"""Lower a program to operations that a processor has: integer division rounds towards zero, table indices stay in
range, and nothing is divided by zero, which would end the process."""

from __future__ import annotations

import functools

from compiled_kernels.scalar_code.intervals import fits_32_bits, ranges
from compiled_kernels.scalar_code.program import Builder, Program, Step


@functools.lru_cache(maxsize=1024)
def lowered(program: Program) -> tuple[Program, int]:
    """Return the program without `floordiv` and `mod` of integers, and the number of bits that its integers need: 32 or
    64.
    """
    builder, known = Builder(program.inputs), ranges(program)
    values = list(range(len(program.inputs)))
    for step in program.steps:
        reads = [values[at] for at in step.reads]
        spans = [known[at] for at in step.reads]
        values.append(_lowered(builder, step, reads, spans))
    return builder.program(values[program.result]), 32 if fits_32_bits(program) else 64


def _lowered(builder: Builder, step: Step, reads: list[int], spans: list[tuple[int, int] | None]) -> int:
    operation = step.operation
    if operation == "const":
        return builder.constant(step.numbers[0], step.kind)
    if operation == "table":
        zero, last = builder.constant(0), builder.constant(len(step.numbers) - 1)
        index = builder.add("max", zero, builder.add("min", reads[0], last))
        return builder.table(index, step.numbers, step.kind)
    if operation not in ("floordiv", "mod", "quot", "rem"):
        return builder.add(operation, *reads)
    a, b = builder.alike(*reads)
    if builder.kind(a) == "float":
        return _of_floats(builder, operation, a, b)
    if builder.number(b) in (None, 0):
        one = builder.constant(1)
        b = builder.add("select", builder.add("eq", b, builder.constant(0)), one, b)
    if all(span is not None and span[0] >= 0 for span in spans):
        return builder.add("quot" if operation in ("floordiv", "quot") else "rem", a, b)
    # The remainder then has the divisor's sign, and the rest is divided without remainder, however a processor rounds.
    rest = builder.add("rem", builder.add("add", builder.add("rem", a, b), b), b)
    if operation == "mod":
        return rest
    down = builder.add("quot", builder.add("sub", a, rest), b)
    if operation == "floordiv":
        return down
    zero = builder.constant(0)
    signs = builder.add("xor", builder.add("lt", a, zero), builder.add("lt", b, zero))
    up = builder.add("int", builder.add("and", signs, builder.add("ne", rest, zero)))
    towards_zero = builder.add("add", down, up)
    return towards_zero if operation == "quot" else builder.add("sub", a, builder.add("mul", towards_zero, b))


def _of_floats(builder: Builder, operation: str, a: int, b: int) -> int:
    """Build a // b = floor(a / b) and a % b = a - b floor(a / b); `quot` and `rem` round towards zero."""
    share = builder.add("div", a, b)
    whole = builder.add("floor", share)
    if operation in ("quot", "rem"):
        below = builder.add("lt", share, builder.constant(0.0))
        whole = builder.add("select", below, builder.add("ceil", share), whole)
    return whole if operation in ("floordiv", "quot") else builder.add("sub", a, builder.add("mul", b, whole))
