"""Trace a user's function of numbers to a program.

torch.fx records the function's operations on tensors of one element; every elementwise operation has a step here.
Operations that cannot be traced (a branch on a value, an operation across elements) are refused with their line in the
user's file.
"""

from __future__ import annotations

import math
import operator
import sys
import traceback
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import torch
from torch import Tensor
from torch._decomp import core_aten_decompositions
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg
from torch.utils._python_dispatch import TorchDispatchMode

from compiled_kernels.backends import describe_callable
from compiled_kernels.scalar_code.program import Builder, Kind, Program
from compiled_kernels.tracing import TRACING

EXAMPLES: dict[Kind, Tensor] = {
    "bool": torch.tensor([True]), "int": torch.tensor([5]), "float": torch.tensor([0.5]),
}  # fmt: skip
MAX_PROGRAMS = 512  # kept
MAX_TABLE = 1 << 16  # entries of a tensor that the function reads by index
OURS = Path(__file__).resolve().parents[2]
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float32, torch.float16, torch.bfloat16)

# Operations of torch that are one step of ours, by their name without overload.
PLAIN = {
    "neg": "neg", "abs": "abs", "exp": "exp", "exp2": "exp2", "log": "log", "sqrt": "sqrt", "tanh": "tanh",
    "sin": "sin", "cos": "cos", "floor": "floor", "ceil": "ceil", "mul": "mul", "floor_divide": "floordiv",
    "remainder": "mod", "fmod": "rem", "minimum": "min", "maximum": "max", "lt": "lt", "le": "le", "eq": "eq",
    "ne": "ne", "bitwise_and": "and", "bitwise_or": "or", "bitwise_xor": "xor", "bitwise_not": "not",
    "bitwise_left_shift": "shl", "bitwise_right_shift": "shr", "where": "select", "__and__": "and", "__or__": "or",
    "__xor__": "xor", "__lshift__": "shl", "__rshift__": "shr", "clamp_min": "max", "clamp_max": "min",
}  # fmt: skip
SWAPPED = {"rsub": "sub", "gt": "lt", "ge": "le"}  # operations that equal another one with swapped arguments
LOGARITHMS = {"log2": 2.0, "log10": 10.0}
LOGICAL = {"logical_and": "and", "logical_or": "or", "logical_xor": "xor", "logical_not": "not"}
SAME = ("alias", "detach", "clone", "lift_fresh_copy", "lift_fresh", "lift", "expand", "view", "contiguous", "_conj")


class Untraceable(Exception):
    """Raised for a function that cannot be traced; the message names the line and the operation."""


def trace(function: Callable[..., Tensor], inputs: Sequence[tuple[str, Kind]], result: Kind) -> Program:
    """Trace `function`, called with a tensor of one number for each input (name, kind), in this order. Raises
    Untraceable if it does anything but elementwise arithmetic, or returns another kind of number.
    """
    examples = [EXAMPLES[kind].clone() for _, kind in inputs]
    name, table = describe_callable(function), cast(Any, core_aten_decompositions())  # its stub has other keys
    try:
        with TRACING:
            graph = make_fx(lambda *given: function(*given), decomposition_table=table)(*examples)
    except Exception as error:  # whatever the user's code or the tracer throws
        raise Untraceable(f"{name} cannot be traced: {_where(error.__traceback__)}{_first_line(error)}") from error
    builder, values, constants = Builder(inputs), dict[Node, int](), dict[Node, Tensor]()
    placeholders = iter(range(len(inputs)))
    found: Any = None
    for node in graph.graph.nodes:
        if node.op == "placeholder":
            values[node] = next(placeholders)
        elif node.op == "get_attr":
            constants[node] = operator.attrgetter(str(node.target))(graph)
        elif node.op == "output":
            found = node.args[0][0] if isinstance(node.args[0], tuple | list) else node.args[0]
        elif all(each in constants for each in node.all_input_nodes):
            constants[node] = _computed(node, constants)
        else:
            try:
                values[node] = _Step(builder, values, constants, node).value()
            except NotImplementedError as error:
                where = _line_of(node, function, examples)
                raise Untraceable(f"{name} cannot be traced: {where}{error}") from None
    if found in constants:
        values[found] = builder.constant(constants[found].flatten()[0].item())
    if found not in values:
        raise Untraceable(f"{name} cannot be traced: it gives {found!r}, not a tensor of its arguments")
    value = values[found]
    if result == "bool" and builder.kind(value) != "bool" or result != "bool" and builder.kind(value) == "bool":
        raise Untraceable(f"{name} gives {builder.kind(value)} numbers, must give {result}")
    return builder.program(builder.cast(value, result))


_known: OrderedDict[Hashable, tuple[Any, str | Untraceable]] = OrderedDict()


def traced_text(function: Callable[..., Tensor], inputs: tuple[tuple[str, Kind], ...], result: Kind) -> str:
    """Return the text of a function's program (see `trace`); equal functions are traced once and cached."""
    try:
        key: Hashable = (hash(function), function, inputs)
    except TypeError:
        key = id(function), inputs
    if key not in _known:
        try:
            found: str | Untraceable = trace(function, inputs, result).text
        except Untraceable as error:
            found = error
        _known[key] = function, found
        if len(_known) > MAX_PROGRAMS:
            _known.popitem(last=False)
    _, found = _known[key]
    if isinstance(found, Untraceable):
        raise found
    return found


def _computed(node: Node, constants: Mapping[Node, Tensor]) -> Tensor:
    """Carry out an operation on constants alone."""
    arguments, keywords = map_arg((node.args, node.kwargs), lambda each: constants[each])
    return node.target(*arguments, **keywords)  # type: ignore[operator] (it is a function: there are no modules here)


class _Step:
    """One node of the graph, added to the builder."""

    def __init__(self, builder: Builder, values: Mapping[Node, int], constants: Mapping[Node, Tensor], node: Node):
        self.builder, self.values, self.constants, self.node = builder, values, constants, node
        self.name = getattr(node.target, "__name__", str(node.target)).split(".")[0]
        if isinstance(node.target, torch._ops.OpOverload):
            self.name = node.target._schema.name.removeprefix("aten::")

    def operand(self, given: Any) -> int:
        """Return the value of an argument: of a node, a number, or a constant tensor of one."""
        if isinstance(given, Node):
            if given in self.values:
                return self.values[given]
            tensor = self.constants[given]
            if tensor.numel() != 1:
                raise NotImplementedError(f"a tensor of {tuple(tensor.shape)} is used as a whole: read it by an index")
            return self.builder.constant(tensor.item())
        if isinstance(given, bool | int | float):
            return self.builder.constant(given)
        raise NotImplementedError(f"{self.name} of {given!r} has no scalar form")

    def value(self) -> int:
        node, builder, name = self.node, self.builder, self.name
        if name in PLAIN:
            return builder.add(PLAIN[name], *map(self.operand, node.args))
        if name in SWAPPED:
            return builder.add(SWAPPED[name], *map(self.operand, node.args[1::-1]))
        if name in LOGARITHMS:
            log = builder.add("log", self.operand(node.args[0]))
            return builder.add("mul", log, builder.constant(1 / math.log(LOGARITHMS[name])))
        if name in LOGICAL:
            return builder.add(LOGICAL[name], *(builder.cast(self.operand(each), "bool") for each in node.args))
        if name in SAME:
            return self.operand(node.args[0])
        special = getattr(self, f"_{name.strip('_')}", None)
        if special is None:
            raise NotImplementedError(f"{name} has no scalar form")
        return special()

    def _add(self) -> int:
        return self._scaled("add")

    def _sub(self) -> int:
        return self._scaled("sub")

    def _scaled(self, operation: str) -> int:
        first, second = map(self.operand, self.node.args[:2])
        alpha = self.node.kwargs.get("alpha", 1)
        if alpha != 1:
            second = self.builder.add("mul", second, self.operand(alpha))
        return self.builder.add(operation, first, second)

    def _div(self) -> int:
        mode = self.node.kwargs.get("rounding_mode")
        first, second = map(self.operand, self.node.args[:2])
        if mode is None:
            return self.builder.add("div", first, second)
        integers = "float" not in (self.builder.kind(first), self.builder.kind(second))
        if mode == "floor":
            return self.builder.add("floordiv", first, second)
        if integers:
            return self.builder.add("quot", first, second)
        return self._truncated(self.builder.add("div", first, second))

    def _truncated(self, value: int) -> int:
        builder = self.builder
        below = builder.add("lt", value, builder.constant(0.0))
        return builder.add("select", below, builder.add("ceil", value), builder.add("floor", value))

    def _trunc(self) -> int:
        return self._truncated(self.operand(self.node.args[0]))

    def _reciprocal(self) -> int:
        return self.builder.add("div", self.builder.constant(1.0), self.operand(self.node.args[0]))

    def _rsqrt(self) -> int:
        return self.builder.add(
            "div", self.builder.constant(1.0), self.builder.add("sqrt", self.operand(self.node.args[0]))
        )

    def _sigmoid(self) -> int:
        builder = self.builder
        power = builder.add("exp", builder.add("neg", self.operand(self.node.args[0])))
        return builder.add("div", builder.constant(1.0), builder.add("add", builder.constant(1.0), power))

    def _relu(self) -> int:
        value = self.operand(self.node.args[0])
        return self.builder.add("max", value, self.builder.constant(0, self.builder.kind(value)))

    def _log1p(self) -> int:
        """Build log(1 + x), accurate for small x: x log(u) / (u - 1) with u = 1 + x rounded (Goldberg, 1991)."""
        builder, one = self.builder, self.builder.constant(1.0)
        x = builder.cast(self.operand(self.node.args[0]), "float")
        u = builder.add("add", one, x)
        away = builder.add("sub", u, one)
        exact = builder.add("mul", builder.add("log", u), builder.add("div", x, away))
        return builder.add("select", builder.add("eq", away, builder.constant(0.0)), x, exact)

    def _pow(self) -> int:
        builder, (base, power) = self.builder, self.node.args[:2]
        if isinstance(power, int | float) and float(power).is_integer() and 0 <= power <= 8:
            value = self.operand(base)
            found = builder.constant(1, builder.kind(value))
            for _ in range(int(power)):
                found = builder.add("mul", found, value)
            return builder.cast(found, "float") if isinstance(power, float) else found
        if power == 0.5:
            return builder.add("sqrt", self.operand(base))
        if isinstance(base, int | float):  # as torch.pow(2.0, x)
            if base <= 0:
                raise NotImplementedError(f"{base} to a computed power has no scalar form: the base must be above 0")
            return builder.add("exp2", builder.add("mul", self.operand(power), builder.constant(math.log2(base))))
        value = builder.cast(self.operand(base), "float")
        whole = isinstance(power, int | float) and float(power).is_integer()
        size = builder.add("abs", value) if whole else value  # other powers of a negative number are NaN
        exponent = builder.cast(self.operand(power), "float")
        found = builder.add("exp", builder.add("mul", exponent, builder.add("log", size)))
        if isinstance(power, int | float) and float(power) % 2 == 1:
            negative = builder.add("lt", value, builder.constant(0.0))
            found = builder.add("select", negative, builder.add("neg", found), found)
        return found

    def _clamp(self) -> int:
        value, *bounds = self.node.args
        bounds += [self.node.kwargs.get(name) for name in ("min", "max")[len(bounds) :]]
        found = self.operand(value)
        for operation, bound in zip(("max", "min"), bounds, strict=False):
            if bound is not None:
                found = self.builder.add(operation, found, self.operand(bound))
        return found

    def _to_copy(self) -> int:
        value = self.operand(self.node.args[0])
        dtype = self.node.kwargs.get("dtype")
        return value if dtype is None else self._as(value, dtype)

    def _as(self, value: int, dtype: Any) -> int:
        builder = self.builder
        if dtype == torch.bool:
            return builder.cast(value, "bool")
        if dtype in INTEGERS:
            return builder.cast(value, "int")
        if dtype in FLOATS:
            return builder.cast(value, "float")
        raise NotImplementedError(f"numbers of {str(dtype).removeprefix('torch.')} have no scalar form: use float32")

    def _full(self) -> int:
        return self._filled(self.node.args[1])

    _full_like = _full

    def _scalar_tensor(self) -> int:
        return self._filled(self.node.args[0])

    def _zeros_like(self) -> int:
        return self._filled(0)

    def _ones_like(self) -> int:
        return self._filled(1)

    def _filled(self, number: Any) -> int:
        value = self.operand(number)
        dtype = self.node.kwargs.get("dtype")
        if dtype is None and "val" in self.node.meta:
            dtype = self.node.meta["val"].dtype
        return value if dtype is None else self._as(value, dtype)

    def _index(self) -> int:
        """Build the read of one element of a constant tensor."""
        table, places = self.node.args[:2]
        assert isinstance(table, Node) and isinstance(places, tuple | list)
        if table not in self.constants:
            raise NotImplementedError("an index into a computed tensor has no scalar form")
        numbers = self.constants[table]
        if numbers.ndim != 1 or len(places) != 1 or not 0 < numbers.numel() <= MAX_TABLE:
            what = f"a tensor of {tuple(numbers.shape)} is read by {len(places)} indices"
            raise NotImplementedError(f"{what}: tables have one axis, of up to {MAX_TABLE} entries")
        kind: Kind = "float" if numbers.is_floating_point() else "int"
        index, count = self.operand(places[0]), self.builder.constant(numbers.numel())
        negative = self.builder.add("lt", index, self.builder.constant(0))
        index = self.builder.add("select", negative, self.builder.add("add", index, count), index)
        is_bool = numbers.dtype == torch.bool
        found = self.builder.table(index, tuple((numbers.int() if is_bool else numbers).tolist()), kind)
        return self.builder.cast(found, "bool") if is_bool else found


def _first_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    if "_local_scalar_dense" in text or "data-dependent" in text.lower():
        text = "it takes a decision in Python by a tensor's value (`if`, `int()`, `.item()`): use torch.where"
    return text[:200]


def _where(found: TracebackType | None) -> str:
    """Return "FILE:LINE `code`: " of the last line of a traceback that is neither torch's nor ours."""
    torch_folder = Path(torch.__file__).resolve().parent
    for frame in reversed(traceback.extract_tb(found)):
        path = Path(frame.filename)
        if not path.is_file() or torch_folder in path.resolve().parents or path.resolve() == Path(__file__).resolve():
            continue
        return f"{path.name}:{frame.lineno} `{frame.line}`: "
    return ""


def _line_of(node: Node, function: Callable[..., Tensor], examples: Sequence[Tensor]) -> str:
    """Return the line of the user's function that executes `node`: the function is run again up to that operation."""
    target = node.target

    class _StopThere(TorchDispatchMode):
        def __torch_dispatch__(self, called: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if called is target or called.overloadpacket is getattr(target, "overloadpacket", None):
                raise Untraceable
            return called(*args, **(kwargs or {}))

    try:
        with _StopThere():
            function(*examples)
    except Untraceable:
        return _where(sys.exc_info()[2])
    except Exception:  # the user's function may raise anything, and the line is only additional information
        return ""
    return ""
