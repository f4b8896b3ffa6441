"""Bound a program over intervals of its inputs: find the values that it may have for any query of a tile and any key of
a page.

For each value, programs compute `low`, `high` and `known` from the inputs' bounds: if `known`, the value is not NaN and
lies between `low` and `high` for all inputs. So a kernel can skip a page without visible keys, without reading it.
Monotone operations have interval bounds (Moore, 1966: interval arithmetic), if all inputs are in the operation's domain
(no root of a negative number, no infinity minus infinity). For other operations the bounds are known only if each input
is a single number, as the block number is that a block mask computes for a page.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch

from compiled_kernels.scalar_code.program import Builder, Kind, Number, Program, Step

MAX_POSITION = 1 << 24
MAX_HEAD = 1 << 12
ARITHMETIC = ("add", "sub", "mul", "div", "floordiv", "quot")
DIVISIONS = ("floordiv", "mod", "quot", "rem")
LIMITS: dict[str, int] = {"query": MAX_POSITION, "key": MAX_POSITION, "head": MAX_HEAD}
FITS = 1 << 31  # integers below it, either way, are computed in 32 bits
WRAPS = 1 << 63  # integers below it, either way, are computed as they are; others lose their highest bits


class ValueBounds(NamedTuple):
    """The bounds of one value, as the numbers of three values in a program: `low`, `high`, and `known`, which is
    whether the bounds hold. For a bool, `low` is whether it is always true, and `high` whether it may be true."""

    low: int
    high: int
    known: int


@functools.lru_cache(maxsize=1024)
def reach(program: Program) -> Program:
    """Return a program that decides from its inputs' bounds (`key_low`, `key_high`, ...) whether `program`, whose
    result is a bool, may be true for any inputs within these bounds."""
    builder, bounds = _bound(program)
    result = bounds[program.result]
    unknown = builder.add("not", result.known)
    return builder.program(builder.add("or", unknown, result.high))


def _bound(program: Program) -> tuple[Builder, list[ValueBounds]]:
    builder = Builder([(f"{name}_{end}", kind) for name, kind in program.inputs for end in ("low", "high")])
    true = builder.constant(True)
    found = [ValueBounds(2 * at, 2 * at + 1, true) for at in range(len(program.inputs))]
    sizes = _sizes(program)
    for step in program.steps:
        rule = _Rule(builder, program, step, [found[at] for at in step.reads])
        wraps = step.kind == "int" and sizes[len(found)] >= WRAPS
        found.append(rule.of_points() if wraps else rule.bounds())
    return builder, found


def _sizes(program: Program) -> list[int]:
    """Return a bound of each integer's absolute value, for positions and heads within `LIMITS`: at most `WRAPS`, from
    which on it may overflow, so that increasing operations no longer increase."""
    sizes = [LIMITS.get(name, MAX_POSITION) for name, _ in program.inputs]
    for step in program.steps:
        sizes.append(min(WRAPS, _size(program, step, [sizes[at] for at in step.reads])))
    return sizes


def _size(program: Program, step: Step, sizes: list[int]) -> int:
    if step.kind != "int":
        return 1
    match step.operation:
        case "const" | "table":
            return max(abs(int(each)) for each in step.numbers)
        case "int":
            return FITS if program.kind(step.reads[0]) == "float" else 1
        case "add" | "sub":
            return sum(sizes)
        case "mul":
            return math.prod(sizes)
        case "shl":
            return sizes[0] << min(sizes[1], 63)
        case "mod":
            return sizes[1]
        case "and" | "or" | "xor" | "not":
            return 2 * max(sizes) + 1  # all bits of the larger
        case _:
            return max(sizes)


class _Rule:
    """The bounds of one step, computed from the bounds of its operands."""

    def __init__(self, builder: Builder, program: Program, step: Step, reads: list[ValueBounds]):
        self.builder, self.step, self.reads = builder, step, reads
        self.kinds: list[Kind] = [program.kind(at) for at in step.reads]
        self.known = functools.reduce(self._and, (each.known for each in reads), builder.constant(True))

    def bounds(self) -> ValueBounds:
        special = getattr(self, f"_of_{self.step.operation}", None)
        found = None if special is None else special()
        return self.of_points() if found is None else found

    def _add(self, operation: str, *reads: int) -> int:
        return self.builder.add(operation, *reads)

    def _and(self, a: int, b: int) -> int:
        return self.builder.add("and", a, b)

    def _number(self, at: int) -> Number | None:
        """Return the constant that the step reads there."""
        return self.builder.number(self.reads[at].low)

    def of_points(self) -> ValueBounds:
        """Return the bounds of any operation with single points as operands: its value."""
        known = self.known
        for each in self.reads:
            known = self._and(known, self._add("eq", each.low, each.high))
        lows = [each.low for each in self.reads]
        if self.step.operation == "table":
            value = self._clamped_table(lows[0])
        elif self.step.operation in DIVISIONS and self.step.kind == "int":
            zero = self._add("eq", lows[1], self.builder.constant(0))
            known = self._and(known, self._add("not", zero))
            divisor = self._add("select", zero, self.builder.constant(1), lows[1])
            value = self._add(self.step.operation, lows[0], divisor)
        else:
            value = self._add(self.step.operation, *lows)
        if self.step.kind == "float":
            known = self._and(known, self._add("eq", value, value))  # no NaN
        return ValueBounds(value, value, known)

    def _finite(self) -> int:
        """Return whether the floats that the step reads are finite: arithmetic with infinity may give NaN."""
        found = self.builder.constant(True)
        least, most = self.builder.constant(-math.inf), self.builder.constant(math.inf)
        for each, kind in zip(self.reads, self.kinds, strict=True):
            if kind == "float":
                found = self._and(found, self._add("lt", least, each.low))
                found = self._and(found, self._add("lt", each.high, most))
        return found

    def _clamped_table(self, index: int) -> int:
        """Read the table with the index limited to its ends, because an unknown index may be out of range."""
        last = self.builder.constant(len(self.step.numbers) - 1)
        index = self._add("max", self.builder.constant(0), self._add("min", index, last))
        return self.builder.table(index, self.step.numbers, self.step.kind)

    def _of_const(self) -> ValueBounds:
        number = self.step.numbers[0]
        value = self.builder.constant(number, self.step.kind)
        return ValueBounds(value, value, self.builder.constant(number == number))

    def _of_table(self) -> ValueBounds:
        point = self.of_points()
        if any(each != each for each in self.step.numbers):
            return point
        least, most = (self.builder.constant(end(self.step.numbers), self.step.kind) for end in (min, max))
        low, high = (self._add("select", point.known, point.low, each) for each in (least, most))
        return ValueBounds(low, high, self.known)

    # Monotone arithmetic.

    def _ends(self, operation: str, *pairs: tuple[int, int]) -> ValueBounds:
        """ValueBounds where the operation of these (values for low, values for high) gives the ends."""
        low, high = (self._add(operation, *(pair[end] for pair in pairs)) for end in (0, 1))
        known = self._and(self.known, self._finite()) if operation in ARITHMETIC else self.known
        return ValueBounds(low, high, known)

    def _twice(self, at: int) -> tuple[int, int]:
        """Return a known number as both low and high."""
        return self.reads[at].low, self.reads[at].low

    def _rising(self) -> ValueBounds:
        return self._ends(self.step.operation, *((each.low, each.high) for each in self.reads))

    def _of_sub(self) -> ValueBounds:
        a, b = self.reads
        return self._ends("sub", (a.low, a.high), (b.high, b.low))

    def _of_neg(self) -> ValueBounds:
        return self._ends("neg", (self.reads[0].high, self.reads[0].low))

    _of_add = _of_min = _of_max = _of_exp = _of_exp2 = _of_tanh = _of_floor = _of_ceil = _rising
    _of_float = _rising  # also of a bool, as `int`

    def _of_sqrt(self) -> ValueBounds:
        found = self._rising()
        defined = self._add("le", self.builder.constant(0.0), self.reads[0].low)
        return found._replace(known=self._and(found.known, defined))

    _of_log = _of_sqrt

    def _of_int(self) -> ValueBounds:
        """Return bounds of a conversion to int. For a bool, `low` is whether it is always true, `high` whether it may
        be true; floats must be within `FITS`.
        """
        found, value = self._rising(), self.reads[0]
        if self.kinds[0] != "float":
            return found
        least, most = (self.builder.constant(float(each)) for each in (-FITS, FITS))
        within = self._and(self._add("le", least, value.low), self._add("lt", value.high, most))
        return found._replace(known=self._and(found.known, within))

    def _of_mul(self) -> ValueBounds | None:
        for at, other in ((0, 1), (1, 0)):
            factor = self._number(at)
            if factor is not None and math.isfinite(factor):
                value = self.reads[other]
                ends = (value.low, value.high) if factor >= 0 else (value.high, value.low)
                return self._ends("mul", ends, self._twice(at))
        return None

    def _of_div(self) -> ValueBounds | None:
        divisor = self._number(1)
        if divisor is None or not divisor or not math.isfinite(divisor):
            return None
        value = self.reads[0]
        ends = (value.low, value.high) if divisor > 0 else (value.high, value.low)
        return self._ends(self.step.operation, ends, self._twice(1))

    _of_floordiv = _of_quot = _of_div

    def _of_shr(self) -> ValueBounds | None:
        count = self._number(1)
        return self._rising() if count is not None and 0 <= count < 63 else None

    _of_shl = _of_shr

    def _of_mod(self) -> ValueBounds | None:
        """Return bounds of a mod n: within one period the two ends, otherwise 0 and n - 1 (for floats n)."""
        divisor = self._number(1)
        if divisor is None or not 0 < divisor < math.inf:
            return None
        value, by = self.reads[0], self.reads[1].low
        same = self._add("eq", self._add("floordiv", value.low, by), self._add("floordiv", value.high, by))
        kind = self.step.kind
        least = self.builder.constant(0, kind)
        most = self.builder.constant(divisor - 1 if kind == "int" else divisor, kind)
        low = self._add("select", same, self._add("mod", value.low, by), least)
        high = self._add("select", same, self._add("mod", value.high, by), most)
        return ValueBounds(low, high, self._and(self.known, self._finite()))

    def _of_abs(self) -> ValueBounds:
        value, zero = self.reads[0], self.builder.constant(0, self.step.kind)
        low = self._add("max", self._add("max", value.low, self._add("neg", value.high)), zero)
        return ValueBounds(low, self._add("max", self._add("neg", value.low), value.high), self.known)

    # Comparisons and logical operations.

    def _of_lt(self) -> ValueBounds:
        a, b = self.reads
        operation = self.step.operation
        return ValueBounds(self._add(operation, a.high, b.low), self._add(operation, a.low, b.high), self.known)

    _of_le = _of_lt

    def _equal(self) -> tuple[int, int]:
        """Return whether both are always equal, and whether they may be."""
        a, b = self.reads
        always = self._and(self._add("eq", a.low, b.high), self._add("eq", a.high, b.low))
        return always, self._and(self._add("le", a.low, b.high), self._add("le", b.low, a.high))

    def _of_eq(self) -> ValueBounds:
        return ValueBounds(*self._equal(), self.known)

    def _of_ne(self) -> ValueBounds:
        always, maybe = self._equal()
        return ValueBounds(self._add("not", maybe), self._add("not", always), self.known)

    def _of_not(self) -> ValueBounds | None:
        if self.step.kind != "bool":
            return None
        value = self.reads[0]
        return ValueBounds(self._add("not", value.high), self._add("not", value.low), self.known)

    def _of_and(self) -> ValueBounds | None:
        """Return bounds of `and`. One known operand is enough for bools: if it is never true, the result is false."""
        if self.step.kind != "bool":
            return None
        a, b = self.reads
        low = self._add(self.step.operation, self._surely(a), self._surely(b))
        high = self._add(self.step.operation, self._maybe(a), self._maybe(b))
        return ValueBounds(low, high, self.builder.constant(True))

    _of_or = _of_and

    def _surely(self, value: ValueBounds) -> int:
        return self._and(value.known, value.low)

    def _maybe(self, value: ValueBounds) -> int:
        return self._add("or", self._add("not", value.known), value.high)

    def _of_select(self) -> ValueBounds:
        condition, first, second = self.reads
        always, maybe = self._surely(condition), self._maybe(condition)
        if self.step.kind == "bool":
            both = [self._add("and", self._surely(first), self._surely(second))]
            both.append(self._add("or", self._maybe(first), self._maybe(second)))
            ends = [(self._surely(first), self._surely(second)), (self._maybe(first), self._maybe(second))]
            known = self.builder.constant(True)
        else:
            both = [self._add("min", first.low, second.low), self._add("max", first.high, second.high)]
            ends = [(first.low, second.low), (first.high, second.high)]
            either = self._and(first.known, second.known)
            known = self._add("select", always, first.known, self._add("select", maybe, either, second.known))
        low, high = (
            self._add("select", always, one, self._add("select", maybe, wide, other))
            for wide, (one, other) in zip(both, ends, strict=True)
        )
        return ValueBounds(low, high, known)


@functools.lru_cache(maxsize=1024)
def ranges(program: Program) -> tuple[tuple[int, int] | None, ...]:
    """Return the smallest and largest number that each integer value of the program can have, for positions and heads
    within `LIMITS`; None for a value without known bounds."""
    builder, bounds = _bound(program)
    whole = Program(builder.inputs, tuple(builder.steps), 0)
    ends = {"low": 0, "high": 1}
    given = {}
    for name, kind in builder.inputs:
        base, _, end = name.rpartition("_")
        number = (LIMITS.get(base, MAX_POSITION) - 1) * ends[end] if kind == "int" else float("nan")
        given[name] = torch.tensor(number, dtype=torch.int64 if kind == "int" else torch.float32)
    values = whole.values(given)
    found: list[tuple[int, int] | None] = []
    for at, each in enumerate(bounds):
        known = program.kind(at) == "int" and bool(values[each.known])
        found.append((int(values[each.low]), int(values[each.high])) if known else None)
    return tuple(found)


def fits_32_bits(program: Program) -> bool:
    """Return whether every integer of the program fits in 32 bits."""
    integers = (span for at, span in enumerate(ranges(program)) if program.kind(at) == "int")
    return all(span is not None and span[0] >= -FITS and span[1] < FITS for span in integers)
