"""Write a program as a Triton function, which kernels take as a constant argument."""

from __future__ import annotations

import functools
import hashlib
import linecache
import math
from typing import Any

from compiled_kernels.backends import BackendError
from compiled_kernels.scalar_code.lower import lowered
from compiled_kernels.scalar_code.program import Number, Program, Step

MAX_TABLE = 64  # maximum entries: a kernel has no memory of its own, so a table is a chain of selections
INFIX = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "quot": "//", "rem": "%", "lt": "<", "le": "<=", "eq": "==",
    "ne": "!=", "and": "&", "or": "|", "xor": "^", "shl": "<<", "shr": ">>",
}  # fmt: skip
CALLS = {
    "min": "tl.minimum", "max": "tl.maximum", "abs": "tl.abs", "exp": "tl.exp", "exp2": "tl.exp2", "log": "tl.log",
    "sqrt": "tl.sqrt", "sin": "tl.sin", "cos": "tl.cos", "floor": "tl.floor", "ceil": "tl.ceil", "select": "tl.where",
}  # fmt: skip


@functools.lru_cache(maxsize=512)
def triton_function(program: Program) -> Any:
    """Return the program as a function of its inputs, numbers or blocks that broadcast. Its name is unique to the
    program, because kernels are cached by the names of the functions they call."""
    import triton

    text = source(program)
    name = text.partition("def ")[2].partition("(")[0]
    place = f"<{name}>"
    linecache.cache[place] = (len(text), None, text.splitlines(keepends=True), place)
    found: dict[str, Any] = {"__name__": __name__}
    exec(compile("import triton\nimport triton.language as tl\n", place, "exec"), found)
    exec(compile(text, place, "exec"), found)
    assert triton is found["triton"]
    return found[name]


def source(program: Program) -> str:
    """Return the source text of the program's Triton function. Raises BackendError for a table that is too long."""
    steps, bits = lowered(program)
    lines = []
    for at, (name, kind) in enumerate(program.inputs):
        lines.append(f"v{at} = {name}.to(tl.int{bits})" if kind == "int" else f"v{at} = {name}")
    for at, step in enumerate(steps.steps, len(program.inputs)):
        lines.append(f"v{at} = {_expression(step, steps, bits)}")
    digest = hashlib.blake2b(f"{program.text} {bits}".encode(), digest_size=8).hexdigest()
    body = "".join(f"    {line}\n" for line in (*lines, f"return v{steps.result}"))
    return f"@triton.jit\ndef traced_{digest}({', '.join(name for name, _ in program.inputs)}):\n{body}"


def _expression(step: Step, program: Program, bits: int) -> str:
    operation, names = step.operation, [f"v{at}" for at in step.reads]
    if operation == "const":
        return _constant(step, bits)
    if operation == "table":
        return _table(step, names[0], bits)
    if operation in INFIX:
        return f"{names[0]} {INFIX[operation]} {names[1]}"
    if operation in CALLS:
        return f"{CALLS[operation]}({', '.join(names)})"
    given = program.kind(step.reads[0])
    if operation == "neg":
        return f"-{names[0]}"
    if operation == "not":
        return f"{names[0]} == 0" if given == "bool" else f"~{names[0]}"
    if operation == "tanh":
        return f"1.0 - 2.0 / (tl.exp(2.0 * {names[0]}) + 1.0)"
    return f"{names[0]}.to(tl.{'float32' if operation == 'float' else f'int{bits}'})"


def _constant(step: Step, bits: int) -> str:
    number, kind = step.numbers[0], {"bool": "int1", "int": f"int{bits}", "float": "float32"}[step.kind]
    return f"tl.full([], {_written(number)}, tl.{kind})"


def _written(number: Number) -> str:
    if isinstance(number, float) and not math.isfinite(number):
        return f'float("{number}")'
    return repr(number)


def _table(step: Step, index: str, bits: int) -> str:
    if len(step.numbers) > MAX_TABLE:
        raise BackendError(f"backend triton: a table of {len(step.numbers)} numbers; it takes up to {MAX_TABLE}")
    kind = "float32" if step.kind == "float" else f"int{bits}"
    found = f"tl.full([], {_written(step.numbers[-1])}, tl.{kind})"
    for at in range(len(step.numbers) - 2, -1, -1):
        found = f"tl.where({index} == {at}, tl.full([], {_written(step.numbers[at])}, tl.{kind}), {found})"
    return found
