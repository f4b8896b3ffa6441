"""MLIR values in Python: each knows its type and has the arithmetic operators.

Every operation is emitted at the builder's current place (see functions.py). A Python number in an operation becomes a
constant of the other operand's type. torch_mlir is imported when the first value is created, so that compiled code runs
without it.
"""

# The type stubs of this optional package do not list its exports.
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
    """Return a namespace with torch_mlir's dialects as attributes, and with its `ir` module as `ir`."""
    from torch_mlir import dialects, ir
    from torch_mlir.dialects import arith, func, llvm, math, memref, scf, vector  # noqa: F401 (attributes of `dialects`)

    dialects.ir = ir
    return dialects


class _OfThread(threading.local):
    """State of a thread: the block of the function under construction with its constants, and the names of types."""

    function: tuple[Any, dict[Any, Value]]
    names: dict[Any, str]


_of_thread = _OfThread()


@dataclass(frozen=True, eq=False, slots=True)
class Value:
    """A value: a number or an index, a vector of numbers, or a memory (memref) of either.

    `+ - * / // % & | ^ << >>` are float or integer operations, by the value's type: `/` is for floats only; `//`, `%`
    and `>>` treat integers as unsigned. For a memory, `x[i, j]` is one number, `x.load(lanes, i, j)` a vector of
    numbers.
    """

    ir: Any

    @property
    def type(self) -> Any:
        return self.ir.type

    @property
    def element(self) -> str:
        """Return the element type in MLIR's spelling: `f32`, `i8`, `index`."""
        kind, names = self.type, _of_thread.names
        if kind not in names:
            names[kind] = str(getattr(kind, "element_type", kind))
        return names[kind]

    @property
    def lanes(self) -> int:
        """Return the number of elements of a vector; 0 for a single number."""
        return self.type.shape[0] if hasattr(self.type, "shape") else 0

    @property
    def is_float(self) -> bool:
        return "f" in self.element

    def like(self, other: Value | Number) -> Value:
        """Return `other` as a value: a Python number becomes a constant of this value's type."""
        return other if isinstance(other, Value) else constant(other, self.element, self.lanes)

    def as_type(self, element: str) -> Any:
        """Return this value's type with another element type."""
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
        """Return the value shifted right by `by` bits; the sign is kept (arithmetic shift)."""
        return self._with(by, "", "shrsi")

    def minimum(self, other: Value | Number) -> Value:
        return self._with(other, "minimumf", "minui")

    def maximum(self, other: Value | Number) -> Value:
        return self._with(other, "maximumf", "maxui")

    def _with(self, other: Value | Number, of_floats: str, of_integers: str) -> Value:
        operation = getattr(mlir().arith, of_floats if self.is_float else of_integers)
        return Value(operation(self.ir, self.like(other).ir))

    def divided_up(self, other: Value | int) -> Value:
        """Return this value divided by `other` and rounded up; both are unsigned integers."""
        return self._with(other, "", "ceildivui")

    def below(self, other: Value | int) -> Value:
        """Return whether this value is less than `other`, both unsigned."""
        return self.compared("ult", other)

    def equals(self, other: Value | Number) -> Value:
        return self.compared("oeq" if self.is_float else "eq", other)

    def compared(self, how: str, other: Value | Number) -> Value:
        """Compare two values by `how`, for integers (`eq`, `ult`, `slt`, ...) or for floats (`oeq`, `olt`, `une`, ...);
        return a truth value.
        """
        arith, other = mlir().arith, self.like(other)
        if self.is_float:
            return Value(arith.cmpf(getattr(arith.CmpFPredicate, how.upper()), self.ir, other.ir))
        return Value(arith.cmpi(getattr(arith.CmpIPredicate, how), self.ir, other.ir))

    def select(self, one: Value, other: Value) -> Value:
        """Return `one` where this truth value is true, else `other`."""
        return Value(mlir().arith.select(self.ir, one.ir, other.ir))

    def bits(self, element: str) -> Value:
        """Reinterpret the bits as numbers of another type; in a vector the number of elements may change."""
        if element == self.element:
            return self
        if not self.lanes:
            return Value(mlir().arith.bitcast(typed(element), self.ir))
        lanes = self.lanes * _width(self.element) // _width(element)
        return Value(mlir().vector.bitcast(typed(element, lanes), self.ir))

    def to(self, element: str, signed: bool = True) -> Value:
        """Convert to another type, rounded to its nearest number; integers are signed unless `signed` is false."""
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
        """Return a vector with this number in all `lanes` elements."""
        return Value(mlir().vector.broadcast(typed(self.element, lanes), self.ir))

    def at(self, place: int) -> Value:
        """Return the number at index `place` of a vector."""
        return Value(mlir().vector.extract(self.ir, [], [place]))

    def put(self, place: int, number: Value) -> Value:
        """Return the vector with the number at index `place` replaced."""
        return Value(mlir().vector.insert(number.ir, self.ir, [], [place]))

    def part(self, start: int, count: int) -> Value:
        """Return `count` adjacent elements of a vector, from `start` on."""
        return Value(mlir().vector.extract_strided_slice(typed(self.element, count), self.ir, [start], [count], [1]))

    def shuffle(self, other: Value, order: Sequence[int]) -> Value:
        """Return the elements of this vector and of `other` in a new order; indices of `other` follow those of this
        vector.
        """
        return Value(mlir().vector.shuffle(self.ir, other.ir, list(order)))

    def reduce(self, how: str) -> Value:
        """Reduce a vector to one number by an operation: `add`, `maxsi`, ..."""
        kind = mlir().ir.Attribute.parse(f"#vector.kind<{how}>")
        return Value(mlir().vector.reduction(typed(self.element), kind, self.ir))

    def __getitem__(self, place: Value | int | tuple[Value | int, ...]) -> Value:
        return Value(mlir().memref.load(self.ir, _place(place)))

    def __setitem__(self, place: Value | int | tuple[Value | int, ...], value: Value) -> None:
        mlir().memref.store(value.ir, self.ir, _place(place))

    def load(self, lanes: int, *place: Value | int, mask: Value | None = None) -> Value:
        """Return `lanes` consecutive numbers of a memory from `place` on; where `mask` is false, nothing is read and
        the result is 0.
        """
        memory = self._in_integers()
        if mask is None:
            found = mlir().vector.load(typed(memory.element, lanes), memory.ir, _place(place))
        else:
            zeros = constant(0, memory.element, lanes)
            found = mlir().vector.maskedload(zeros.type, memory.ir, _place(place), mask.ir, zeros.ir)
        return Value(found).bits(self.element)

    def store(self, value: Value, *place: Value | int, mask: Value | None = None) -> None:
        """Store a vector from `place` on, converted to the memory's type; with `mask`, only where it is true."""
        memory = self._in_integers()
        whole = value.to(self.element).bits(memory.element)
        if mask is None:
            mlir().vector.store(whole.ir, memory.ir, _place(place))
        else:
            mlir().vector.maskedstore(memory.ir, _place(place), mask.ir, whole.ir)

    def _in_integers(self) -> Value:
        """Return a memory of bfloat16 as a memory of 16-bit integers. Without AVX-512, LLVM would split a bfloat16
        vector in a masked store, or one carried between blocks, and call a library function to round each number."""
        if self.element != "bf16":
            return self
        kind = typed(str(self.type).replace("bf16", "i16"))
        return Value(mlir().ir.Operation.create("builtin.unrealized_conversion_cast", [kind], [self.ir]).result)

    def flat(self) -> Value:
        """View a memory of two dimensions as one dimension, row after row."""
        rows, columns = self.type.shape
        kind = typed(f"memref<{rows * columns}x{self.element}>")
        return Value(mlir().memref.collapse_shape(kind, self.ir, [[0, 1]]))

    def prefetch(self, *place: Value | int, nearest: int = 3) -> None:
        """Prefetch the memory at this place; `nearest` is 3 for the nearest cache, 2 for the next one."""
        mlir().memref.prefetch(self.ir, _place(place), False, nearest, True)


def typed(element: str, lanes: int = 0) -> Any:
    """Return the MLIR type `element`, or the type of a vector of `lanes` such elements."""
    return mlir().ir.Type.parse(f"vector<{lanes}x{element}>" if lanes else element)


def _width(element: str) -> int:
    return 16 if element == "bf16" else int(element[1:])


def _place(place: Value | int | Iterable[Value | int]) -> list[Any]:
    places = (place,) if isinstance(place, Value | int) else place
    return [(index(each) if isinstance(each, int) else each).ir for each in places]


def index(value: int) -> Value:
    return constant(value, "index")


def constant(value: Number | Sequence[Number], element: str, lanes: int = 0) -> Value:
    """Return a constant number, or a vector of constants. A function defines each constant once, at its begin."""
    block, kept = _of_thread.function
    key = str(value), element, lanes
    if key not in kept:
        with mlir().ir.InsertionPoint.at_block_begin(block):
            kept[key] = _constant(value, element, lanes)
    return kept[key]


def constants_at(block: Any) -> None:
    """Define constants from now on at the begin of this block, the body of a function. Names of types are reset too,
    because they would keep their context alive."""
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
    """Return Python numbers as MLIR attributes of type `element`."""
    ir, kind = mlir().ir, typed(element)
    if "f" in element:
        return [ir.FloatAttr.get(kind, float(each)) for each in numbers]
    return [ir.IntegerAttr.get(kind, _wrapped(int(each), element)) for each in numbers]


def counted(lanes: int) -> Value:
    """Return the indices 0, 1, ... as a vector."""
    return Value(mlir().vector.step(typed("index", lanes)))


def _wrapped(value: int, element: str) -> int:
    """Return an integer as the signed number with the same bits, which MLIR's parser requires."""
    if element in ("index", "i1"):
        return value
    half = 1 << (_width(element) - 1)
    return (value + half) % (2 * half) - half


def fma(a: Value, b: Value, c: Value) -> Value:
    """Return a * b + c, rounded once."""
    return Value(mlir().vector.fma(a.ir, b.ir, c.ir))


def exp(value: Value) -> Value:
    """Return e to the power of the value (see `expand_exp`)."""
    return Value(mlir().math.exp(value.ir))


def sqrt(value: Value) -> Value:
    """Return the square root."""
    return Value(mlir().math.sqrt(value.ir))


def rounded(value: Value) -> Value:
    """Return floats rounded to whole numbers, ties to even."""
    return Value(mlir().math.roundeven(value.ir))


def negative(value: Value) -> Value:
    """Return the floats with their signs changed."""
    return Value(mlir().arith.negf(value.ir))


def intrinsic(name: str, result: Any, *given: Value) -> Value:
    """Emit a processor instruction that no dialect has, and return its result."""
    return Value(mlir().llvm.call_intrinsic(result, name, [each.ir for each in given], [], []))
