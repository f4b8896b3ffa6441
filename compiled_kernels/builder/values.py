"""MLIR values that know their type, and what is computed from them.

Every operation goes to where the builder is (see functions.py). Numbers of Python beside a value become constants of
its type. torch_mlir is imported when the first value is made: code that is compiled already needs none.
"""

# The stubs of this optional package, where installed, do not list what it exports.
# pyright: reportAttributeAccessIssue=false, reportMissingImports=false
from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

Number = int | float


@cache
def mlir() -> Any:
    """Return torch_mlir's dialects as attributes of one module, `ir` beside them."""
    from torch_mlir import dialects, ir
    from torch_mlir.dialects import arith, func, llvm, math, memref, scf, vector  # noqa: F401 (attributes of `dialects`)

    dialects.ir = ir
    return dialects


class _OfThread(threading.local):
    """Hold what a thread knows: the block of the function under construction with its constants, and types' names."""

    function: tuple[Any, dict[Any, Value]]
    names: dict[Any, str]


_of_thread = _OfThread()


@dataclass(frozen=True, eq=False, slots=True)
class Value:
    """A value: a number or an index, a vector of numbers, or a memory (memref) of such.

    `+ - * / // % & | ^ << >>` are those of floats or of integers, as its type says: `/` of floats alone; `//`, `%` and
    `>>` take integers as unsigned. Of a memory `x[i, j]` is one number, `x.load(lanes, i, j)` a vector of them.
    """

    ir: Any

    @property
    def type(self) -> Any:
        return self.ir.type

    @property
    def element(self) -> str:
        """Return the type of its numbers, as MLIR spells it: `f32`, `i8`, `index`."""
        kind, names = self.type, _of_thread.names
        if kind not in names:
            names[kind] = str(getattr(kind, "element_type", kind))
        return names[kind]

    @property
    def lanes(self) -> int:
        """Return how many numbers a vector has; 0 for one number."""
        return self.type.shape[0] if hasattr(self.type, "shape") else 0

    @property
    def is_float(self) -> bool:
        return "f" in self.element

    def like(self, other: Value | Number) -> Value:
        """Return `other`, or where it is a number of Python the constant of this value's type."""
        return other if isinstance(other, Value) else constant(other, self.element, self.lanes)

    def as_type(self, element: str) -> Any:
        """Return this value's type with other numbers."""
        return typed(element, self.lanes)

    def __add__(self, other: Value | Number) -> Value:
        return self._with(other, "addf", "addi")

    def __sub__(self, other: Value | Number) -> Value:
        return self._with(other, "subf", "subi")

    def __mul__(self, other: Value | Number) -> Value:
        return self._with(other, "mulf", "muli")

    def __truediv__(self, other: Value | Number) -> Value:
        return self._with(other, "divf", "")

    def __floordiv__(self, other: Value | int) -> Value:
        return self._with(other, "", "divui")

    def __mod__(self, other: Value | int) -> Value:
        return self._with(other, "remf", "remui")

    def __and__(self, other: Value | int) -> Value:
        return self._with(other, "", "andi")

    def __or__(self, other: Value | int) -> Value:
        return self._with(other, "", "ori")

    def __xor__(self, other: Value | int) -> Value:
        return self._with(other, "", "xori")

    def __lshift__(self, other: Value | int) -> Value:
        return self if other == 0 else self._with(other, "", "shli")

    def __rshift__(self, other: Value | int) -> Value:
        return self if other == 0 else self._with(other, "", "shrui")

    def signed_shift(self, by: int) -> Value:
        """Return it shifted to the right, its sign kept."""
        return self._with(by, "", "shrsi")

    def minimum(self, other: Value | Number) -> Value:
        return self._with(other, "minimumf", "minui")

    def maximum(self, other: Value | Number) -> Value:
        return self._with(other, "maximumf", "maxui")

    def _with(self, other: Value | Number, of_floats: str, of_integers: str) -> Value:
        operation = getattr(mlir().arith, of_floats if self.is_float else of_integers)
        return Value(operation(self.ir, self.like(other).ir))

    def divided_up(self, other: Value | int) -> Value:
        """Return the quotient of unsigned integers, rounded up."""
        return self._with(other, "", "ceildivui")

    def below(self, other: Value | int) -> Value:
        """Return whether it is less than `other`, both unsigned."""
        return self.compared("ult", other)

    def equals(self, other: Value | Number) -> Value:
        return self.compared("oeq" if self.is_float else "eq", other)

    def compared(self, how: str, other: Value | Number) -> Value:
        """Compare integers (`eq`, `ult`, `slt`, ...) or floats (`oeq`, `olt`, `une`, ...)."""
        arith, other = mlir().arith, self.like(other)
        if self.is_float:
            return Value(arith.cmpf(getattr(arith.CmpFPredicate, how.upper()), self.ir, other.ir))
        return Value(arith.cmpi(getattr(arith.CmpIPredicate, how), self.ir, other.ir))

    def select(self, one: Value, other: Value) -> Value:
        """Return `one` where this truth value holds, `other` where it does not."""
        return Value(mlir().arith.select(self.ir, one.ir, other.ir))

    def bits(self, element: str) -> Value:
        """Return the same bits as numbers of another type, of as many bits or (a vector) of more or fewer each."""
        if element == self.element:
            return self
        if not self.lanes:
            return Value(mlir().arith.bitcast(typed(element), self.ir))
        lanes = self.lanes * _width(self.element) // _width(element)
        return Value(mlir().vector.bitcast(typed(element, lanes), self.ir))

    def to(self, element: str, signed: bool = True) -> Value:
        """Convert to the nearest number of another type; integers have a sign unless `signed` is false."""
        if element == self.element:
            return self
        arith, kind = mlir().arith, self.as_type(element)
        if "index" in (element, self.element):
            return Value((arith.index_cast if signed else arith.index_castui)(kind, self.ir))
        wider = _width(element) > _width(self.element)
        if self.is_float and element.startswith("i"):
            return Value(arith.fptosi(kind, self.ir))
        if self.is_float:
            return Value((arith.extf if wider else arith.truncf)(kind, self.ir))
        if element.startswith("i"):
            return Value((arith.trunci if not wider else arith.extsi if signed else arith.extui)(kind, self.ir))
        whole = self if self.element == "i32" else self.to("i32", signed)  # no processor converts bytes by themselves
        return Value((arith.sitofp if signed else arith.uitofp)(kind, whole.ir))

    def broadcast(self, lanes: int) -> Value:
        """Return a vector of this one number."""
        return Value(mlir().vector.broadcast(typed(self.element, lanes), self.ir))

    def at(self, place: int) -> Value:
        """Return one number of a vector."""
        return Value(mlir().vector.extract(self.ir, [], [place]))

    def put(self, place: int, number: Value) -> Value:
        """Return the vector with one number replaced."""
        return Value(mlir().vector.insert(number.ir, self.ir, [], [place]))

    def part(self, start: int, count: int) -> Value:
        """Return `count` neighbours of a vector."""
        return Value(mlir().vector.extract_strided_slice(typed(self.element, count), self.ir, [start], [count], [1]))

    def shuffle(self, other: Value, order: Sequence[int]) -> Value:
        """Return numbers of this vector and of `other`, which are counted on."""
        return Value(mlir().vector.shuffle(self.ir, other.ir, list(order)))

    def reduce(self, how: str) -> Value:
        """Return one number: `add`, `maxsi`, ... over a vector."""
        kind = mlir().ir.Attribute.parse(f"#vector.kind<{how}>")
        return Value(mlir().vector.reduction(typed(self.element), kind, self.ir))

    def __getitem__(self, place: Value | int | tuple[Value | int, ...]) -> Value:
        return Value(mlir().memref.load(self.ir, _place(place)))

    def __setitem__(self, place: Value | int | tuple[Value | int, ...], value: Value) -> None:
        mlir().memref.store(value.ir, self.ir, _place(place))

    def load(self, lanes: int, *place: Value | int, mask: Value | None = None) -> Value:
        """Return `lanes` neighbours of a memory, from `place` on; where `mask` does not hold zeros, nothing is read."""
        memory = self._in_integers()
        if mask is None:
            found = mlir().vector.load(typed(memory.element, lanes), memory.ir, _place(place))
        else:
            zeros = constant(0, memory.element, lanes)
            found = mlir().vector.maskedload(zeros.type, memory.ir, _place(place), mask.ir, zeros.ir)
        return Value(found).bits(self.element)

    def store(self, value: Value, *place: Value | int, mask: Value | None = None) -> None:
        """Store a vector from `place` on, in the memory's type, only where `mask` holds if it is given."""
        memory = self._in_integers()
        whole = value.to(self.element).bits(memory.element)
        if mask is None:
            mlir().vector.store(whole.ir, memory.ir, _place(place))
        else:
            mlir().vector.maskedstore(memory.ir, _place(place), mask.ir, whole.ir)

    def _in_integers(self) -> Value:
        """Return a memory of bfloat16 as one of 16-bit integers. Below AVX-512 LLVM takes a vector of bfloat16 apart
        that is stored where a mask holds, or is kept from block to block, and rounds each number by a library."""
        if self.element != "bf16":
            return self
        kind = typed(str(self.type).replace("bf16", "i16"))
        return Value(mlir().ir.Operation.create("builtin.unrealized_conversion_cast", [kind], [self.ir]).result)

    def flat(self) -> Value:
        """Return a memory of two dimensions, row after row, as one of one."""
        rows, columns = self.type.shape
        kind = typed(f"memref<{rows * columns}x{self.element}>")
        return Value(mlir().memref.collapse_shape(kind, self.ir, [[0, 1]]))

    def prefetch(self, *place: Value | int, nearest: int = 3) -> None:
        """Ask memory for what lies there: 3 for the nearest cache, 2 for the next one."""
        mlir().memref.prefetch(self.ir, _place(place), False, nearest, True)


def typed(element: str, lanes: int = 0) -> Any:
    """Return a type of MLIR: a number's as MLIR spells it, or that of a vector of `lanes`."""
    return mlir().ir.Type.parse(f"vector<{lanes}x{element}>" if lanes else element)


def _width(element: str) -> int:
    return 16 if element == "bf16" else int(element[1:])


def _place(place: Value | int | Iterable[Value | int]) -> list[Any]:
    places = (place,) if isinstance(place, Value | int) else place
    return [(index(each) if isinstance(each, int) else each).ir for each in places]


def index(value: int) -> Value:
    return constant(value, "index")


def constant(value: Number | Sequence[Number], element: str, lanes: int = 0) -> Value:
    """Return a constant; of several numbers the vector of them. A function has each once, at its begin."""
    block, kept = _of_thread.function
    key = str(value), element, lanes
    if key not in kept:
        with mlir().ir.InsertionPoint.at_block_begin(block):
            kept[key] = _constant(value, element, lanes)
    return kept[key]


def constants_at(block: Any) -> None:
    """Make constants at the begin of this block, which is a function's, from now on. Names of types are of its context
    too, which they would keep alive."""
    _of_thread.function, _of_thread.names = (block, {}), {}


def _constant(value: Number | Sequence[Number], element: str, lanes: int) -> Value:
    dense = mlir().ir.DenseElementsAttr
    if isinstance(value, Sequence):
        attribute = dense.get(attributes(value, element), typed(element, len(value)))
    else:
        (attribute,) = attributes((value,), element)
        attribute = dense.get_splat(typed(element, lanes), attribute) if lanes else attribute
    return Value(mlir().arith.constant(attribute.type, attribute))


def attributes(numbers: Sequence[Number], element: str) -> list[Any]:
    """Return numbers of Python as attributes of MLIR."""
    ir, kind = mlir().ir, typed(element)
    if "f" in element:
        return [ir.FloatAttr.get(kind, float(each)) for each in numbers]
    return [ir.IntegerAttr.get(kind, _wrapped(int(each), element)) for each in numbers]


def counted(lanes: int) -> Value:
    """Return the indices 0, 1, ... as a vector."""
    return Value(mlir().vector.step(typed("index", lanes)))


def _wrapped(value: int, element: str) -> int:
    """Return an integer as one with a sign of as many bits, which MLIR reads."""
    if element in ("index", "i1"):
        return value
    half = 1 << (_width(element) - 1)
    return (value + half) % (2 * half) - half


def fma(a: Value, b: Value, c: Value) -> Value:
    """Return a * b + c, rounded once."""
    return Value(mlir().vector.fma(a.ir, b.ir, c.ir))


def exp(value: Value) -> Value:
    """Return e to the x (see `expand_exp`)."""
    return Value(mlir().math.exp(value.ir))


def sqrt(value: Value) -> Value:
    """Return the square root."""
    return Value(mlir().math.sqrt(value.ir))


def rounded(value: Value) -> Value:
    """Return floats rounded to whole numbers, ties to even."""
    return Value(mlir().math.roundeven(value.ir))


def negative(value: Value) -> Value:
    """Return -x of floats."""
    return Value(mlir().arith.negf(value.ir))


def intrinsic(name: str, result: Any, *given: Value) -> Value:
    """Return the result of an instruction of the processor that no dialect names."""
    return Value(mlir().llvm.call_intrinsic(result, name, [each.ir for each in given], [], []))
