"""Represent a function of numbers as a list of steps: the traced form of a user's mask or score function.

    (key <= query) & (key % 4 == 0)

    inputs   query: int, key: int
    steps    2: le key query | 3: const 4 | 4: mod key 3 | 5: const 0 | 6: eq 4 5 | 7: and 2 6
    result   7

Values are numbered, inputs first. A program is a value: it can be hashed, compared and written as text, so that it can
be part of a kernel's shape and an argument of an operator in a graph.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

Kind = Literal["bool", "int", "float"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Number = bool | int | float

# Steps by name: the number of operands, and the operation on tensors. `floordiv` and `mod` round down, as in Python;
# `quot` and `rem` round towards zero, as processors do (see `lower.py`).
OPERATIONS: dict[str, tuple[int, Any]] = {
    "add": (2, torch.add),
    "sub": (2, torch.sub),
    "mul": (2, torch.mul),
    "div": (2, torch.true_divide),
    "floordiv": (2, torch.floor_divide),
    "mod": (2, torch.remainder),
    "quot": (2, lambda a, b: torch.div(a, b, rounding_mode="trunc")),
    "rem": (2, torch.fmod),
    "min": (2, torch.minimum),
    "max": (2, torch.maximum),
    "lt": (2, torch.lt),
    "le": (2, torch.le),
    "eq": (2, torch.eq),
    "ne": (2, torch.ne),
    "and": (2, torch.bitwise_and),
    "or": (2, torch.bitwise_or),
    "xor": (2, torch.bitwise_xor),
    "shl": (2, torch.bitwise_left_shift),
    "shr": (2, torch.bitwise_right_shift),
    "not": (1, torch.bitwise_not),
    "neg": (1, torch.neg),
    "abs": (1, torch.abs),
    "exp": (1, torch.exp),
    "exp2": (1, torch.exp2),
    "log": (1, torch.log),
    "sqrt": (1, torch.sqrt),
    "tanh": (1, torch.tanh),
    "sin": (1, torch.sin),
    "cos": (1, torch.cos),
    "floor": (1, torch.floor),
    "ceil": (1, torch.ceil),
    "select": (3, torch.where),
    "int": (1, lambda a: a.to(torch.int64)),
    "float": (1, lambda a: a if a.is_floating_point() else a.to(torch.float32)),
}
COMPARISONS = ("lt", "le", "eq", "ne")


class Step(NamedTuple):
    """One operation of a program, with a result of kind `kind`. `reads` are the numbers of the earlier values that it
    reads. Constants are in `numbers`: one for `const`, and for `table` one for each entry (the value that it reads is
    the index)."""

    operation: str
    kind: Kind
    reads: tuple[int, ...] = ()
    numbers: tuple[Number, ...] = ()


@dataclass(frozen=True)
class Program:
    """A traced function: `inputs` (name, kind), the `steps` that compute further values, and the number of the value
    that is the `result`.
    """

    inputs: tuple[tuple[str, Kind], ...]
    steps: tuple[Step, ...]
    result: int

    def kind(self, value: int) -> Kind:
        count = len(self.inputs)
        return self.inputs[value][1] if value < count else self.steps[value - count].kind

    def uses(self, name: str) -> bool:
        """Return whether the result depends on the input `name`."""
        at = [known for known, _ in self.inputs].index(name)
        return self.result == at or any(at in step.reads for step in self.steps)

    @functools.cached_property
    def text(self) -> str:
        """Return the program in one line; `Program.parse` reads it."""
        inputs = ",".join(f"{name}:{kind}" for name, kind in self.inputs)
        steps = (
            " ".join((step.operation, step.kind, ",".join(map(str, step.reads)), ",".join(map(repr, step.numbers))))
            for step in self.steps
        )
        return "|".join((inputs, *steps, str(self.result)))

    @staticmethod
    @functools.lru_cache(maxsize=1024)
    def parse(text: str) -> Program:
        head, *steps, result = text.split("|")
        split = (each.partition(":") for each in head.split(","))
        inputs: tuple[tuple[str, Kind], ...] = tuple((name, _kind(kind)) for name, _, kind in split)
        return Program(inputs, tuple(map(_step, steps)), int(result))

    def values(self, given: Mapping[str, Tensor]) -> list[Tensor]:
        """Return every value of the program, computed on tensors that broadcast: the specification of what kernels
        compute.
        """
        found = [given[name] for name, _ in self.inputs]
        like = next(iter(found))
        for step in self.steps:
            found.append(_carry_out(step, [found[at] for at in step.reads], like.device))
        return found

    def __call__(self, **given: Tensor) -> Tensor:
        """Return the result over tensors that broadcast."""
        return self.values(given)[self.result]


def _carry_out(step: Step, reads: Sequence[Tensor], device: torch.device) -> Tensor:
    if step.operation == "const":
        kinds = {"bool": torch.bool, "int": torch.int64, "float": torch.float32}
        return torch.tensor(step.numbers[0], dtype=kinds[step.kind], device=device)
    if step.operation == "table":
        dtype = torch.float32 if step.kind == "float" else torch.int64
        return torch.tensor(step.numbers, dtype=dtype, device=device)[reads[0].long()]
    return OPERATIONS[step.operation][1](*reads)


def _kind(text: str) -> Kind:
    return next(kind for kind in KINDS if kind == text)


def _step(text: str) -> Step:
    operation, kind, reads, numbers = text.split(" ")
    known = {"True": True, "False": False, "inf": math.inf, "-inf": -math.inf, "nan": math.nan}

    def number(each: str) -> Number:
        return known[each] if each in known else (float if kind == "float" else int)(each)

    return Step(
        operation,
        _kind(kind),
        tuple(int(each) for each in reads.split(",") if each),
        tuple(number(each) for each in numbers.split(",") if each),
    )


class Builder:
    """A program under construction: each method adds a step and returns the number of its value.

    Known results are folded: constants, repeated steps, neutral operands of `and` and `or`.
    """

    def __init__(self, inputs: Sequence[tuple[str, Kind]]):
        self.inputs = tuple(inputs)
        self.steps: list[Step] = []
        self._known: dict[Step, int] = {}

    def kind(self, value: int) -> Kind:
        count = len(self.inputs)
        return self.inputs[value][1] if value < count else self.steps[value - count].kind

    def constant(self, number: Number, kind: Kind | None = None) -> int:
        kind = kind or ("bool" if isinstance(number, bool) else "int" if isinstance(number, int) else "float")
        made = {"bool": bool, "int": int, "float": float}[kind](number)
        return self._add(Step("const", kind, (), (made,)))

    def table(self, index: int, numbers: Sequence[Number], kind: Kind) -> int:
        return self._add(Step("table", kind, (index,), tuple(numbers)))

    def number(self, value: int) -> Number | None:
        """Return the constant that a value is; None if it is not constant."""
        at = value - len(self.inputs)
        return self.steps[at].numbers[0] if at >= 0 and self.steps[at].operation == "const" else None

    def add(self, operation: str, *reads: int) -> int:
        """Add an operation, after converting its operands to one kind, and return the number of its value."""
        if operation == "select":
            condition, *reads_ = reads
            known = self.number(condition)
            if known is not None:
                return reads_[0] if known else reads_[1]
            if reads_[0] == reads_[1]:
                return reads_[0]
            both = self.alike(*reads_)
            return self._add(Step("select", self.kind(both[0]), (condition, *both)))
        if operation in ("int", "float"):
            return self.cast(reads[0], operation)
        reads = self.alike(*reads)
        if operation in ("and", "or") and self.kind(reads[0]) == "bool":
            for one, other in (reads, reads[::-1]):
                known = self.number(one)
                if known is not None:
                    return other if known == (operation == "and") else one
            if reads[0] == reads[1]:
                return reads[0]
        kind: Kind = "bool" if operation in COMPARISONS else self.kind(reads[0])
        if operation in ("div", "exp", "exp2", "log", "sqrt", "tanh", "sin", "cos"):
            reads, kind = tuple(self.cast(each, "float") for each in reads), "float"
        elif self.kind(reads[0]) == "bool" and operation not in ("and", "or", "xor", "not"):
            reads = tuple(self.cast(each, "int") for each in reads)
            kind = kind if operation in COMPARISONS else "int"
        return self._add(Step(operation, kind, tuple(reads)))

    def alike(self, *reads: int) -> tuple[int, ...]:
        """Convert values to the widest of their kinds, and return their numbers."""
        kinds = {self.kind(each) for each in reads}
        widest: Kind = next(kind for kind in reversed(KINDS) if kind in kinds)  # type: ignore[assignment] (of KINDS)
        return tuple(self.cast(each, widest) for each in reads)

    def cast(self, value: int, kind: Kind) -> int:
        if self.kind(value) == kind:
            return value
        known = self.number(value)
        if known is not None and (kind != "int" or math.isfinite(known)):
            return self.constant(known, kind)
        if kind == "bool":
            return self.add("ne", value, self.constant(0, self.kind(value)))
        return self._add(Step(kind, kind, (value,)))

    def program(self, result: int) -> Program:
        """Return the program for `result`, with only the steps that it depends on."""
        count, needed = len(self.inputs), {result}
        for at in range(len(self.steps) - 1, -1, -1):
            if at + count in needed:
                needed.update(self.steps[at].reads)
        kept = [at for at in range(len(self.steps)) if at + count in needed]
        new = {**{at: at for at in range(count)}, **{at + count: place + count for place, at in enumerate(kept)}}
        steps = tuple(
            self.steps[at]._replace(reads=tuple(new[each] for each in self.steps[at].reads)) for at in kept
        )
        return Program(self.inputs, steps, new[result])

    def _add(self, step: Step) -> int:
        numbers = [self.number(each) for each in step.reads]
        if step.reads and step.operation != "table" and None not in numbers:
            folded = self._folded(step)
            if folded is not None:
                return folded
        if step not in self._known:  # True == 1 == 1.0: the kind is part of the step
            self.steps.append(step)
            self._known[step] = len(self.inputs) + len(self.steps) - 1
        return self._known[step]

    def _folded(self, step: Step) -> int | None:
        """Return the constant result of a step over constants; None if it has no value (a division by 0)."""
        dtypes = {"bool": torch.bool, "int": torch.int64, "float": torch.float32}
        given = [torch.tensor(self.number(each), dtype=dtypes[self.kind(each)]) for each in step.reads]
        try:
            return self.constant(_carry_out(step, given, torch.device("cpu")).item(), step.kind)
        except (RuntimeError, ZeroDivisionError):
            return None
