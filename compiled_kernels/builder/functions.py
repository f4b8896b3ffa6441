"""Functions of a module under construction, and the loops and branches in them."""

# pyright: reportAttributeAccessIssue=false
from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from compiled_kernels.builder.target import Named
from compiled_kernels.builder.values import Number, Value, attributes, constants_at, index, mlir, typed

Given = dict[str, Value]
"""The values of a function under construction, by name."""


def text_of(emit: Callable[[], object]) -> str:
    """Return the MLIR text of the functions that `emit` builds, to be placed in a module with other functions."""
    ir = mlir().ir
    with _context(), ir.Location.unknown():
        module = ir.Module.create()
        with ir.InsertionPoint(module.body):
            emit()
        # Its reader verifies it; alone it would not verify, because it lacks the functions that it calls.
        text = module.operation.get_asm(assume_verified=True, use_local_scope=True)
        return text[text.index("{") + 1 : text.rindex("}")]


_of_thread = threading.local()


def _context() -> Any:
    """Return this thread's MLIR context; creating one takes longer than building most functions."""
    if not hasattr(_of_thread, "context"):
        _of_thread.context = mlir().ir.Context()
    return _of_thread.context


@contextmanager
def function(
    name: str, arguments: Iterable[Named], *, results: Sequence[str] = (), inline: bool = True, private: bool = True
) -> Iterator[Given]:
    """Build a function with the operations emitted in this context; yield its arguments by name.

    A function with `results` must end with `return_`. `inline`: the compiler may copy it to its call sites.
    """
    ir, arguments = mlir().ir, tuple(arguments)
    kind = ir.FunctionType.get([typed(each.type) for each in arguments], [typed(each) for each in results])
    made = mlir().func.FuncOp(name, kind, visibility="private" if private else None)
    if not inline:
        made.attributes["no_inline"] = ir.UnitAttr.get()
    given = made.add_entry_block().arguments
    constants_at(made.body.blocks[0])
    with ir.InsertionPoint(made.body.blocks[0]):
        yield {each.name: Value(value) for each, value in zip(arguments, given, strict=True)}
        if not results:
            mlir().func.return_([])


def return_(*values: Value) -> None:
    """End a function with results."""
    mlir().func.return_([each.ir for each in values])


def declare(name: str, arguments: Sequence[str], results: Sequence[str]) -> None:
    """Declare a function that another library defines."""
    kind = mlir().ir.FunctionType.get([typed(each) for each in arguments], [typed(each) for each in results])
    mlir().func.FuncOp(name, kind, visibility="private")


def call(name: str, given: Iterable[Value | int], results: Sequence[str] = ()) -> list[Value]:
    """Emit a call of a function of the module, which may be built later."""
    values = [(index(each) if isinstance(each, int) else each).ir for each in given]
    made = mlir().func.CallOp([typed(each) for each in results], name, values)
    return [Value(each) for each in made.operation.results]


def call_with(name: str, arguments: Iterable[Named], given: Given) -> None:
    """Emit a call of a function without results; its arguments are the values of `given` with the names in
    `arguments`.
    """
    call(name, [given[each.name] for each in arguments])


def alloca(kind: str) -> Value:
    """Return memory of a memref type that lives until the function returns; its initial contents are undefined."""
    return Value(mlir().memref.alloca(typed(kind), [], [], alignment=64))


def table(numbers: Sequence[Number], element: str) -> Value:
    """Return a constant memory of the module that holds these numbers; its name is unique to the current function."""
    ir, shape = mlir().ir, f"{len(numbers)}x{element}"
    holder = ir.InsertionPoint.current.block.owner
    while holder.parent.parent is not None:
        holder = holder.parent
    digest = hashlib.blake2b(f"{element}{numbers}".encode(), digest_size=6).hexdigest()
    name, kind = f"{ir.StringAttr(holder.attributes['sym_name']).value}_table_{digest}", typed(f"memref<{shape}>")
    if name not in ir.SymbolTable(holder.parent.operation):
        given = ir.DenseElementsAttr.get(attributes(numbers, element), typed(f"tensor<{shape}>"))
        with ir.InsertionPoint(holder):
            mlir().memref.GlobalOp(name, kind, sym_visibility="private", initial_value=given, constant=True)
    return Value(mlir().memref.get_global(kind, name))


@dataclass
class Loop:
    """A loop under construction: its `index`, the values carried between iterations, and in the end its `results`."""

    operation: Any
    index: Value
    carried: list[Value]
    results: list[Value] = field(default_factory=list)

    def carry(self, values: Sequence[Value]) -> None:
        """End an iteration of the loop with these values, which the next iteration receives."""
        mlir().scf.yield_([each.ir for each in values])
        self.results = [Value(each) for each in self.operation.operation.results]


@contextmanager
def loop(begin: Value | int, end: Value | int, step: Value | int = 1, carried: Sequence[Value] = ()) -> Iterator[Loop]:
    """Build a loop over `begin`, `begin + step`, ... below `end`. A loop that carries values must end each iteration
    with `carry`.
    """
    bounds = [(index(each) if isinstance(each, int) else each).ir for each in (begin, end, step)]
    made = mlir().scf.ForOp(*bounds, [each.ir for each in carried])
    with mlir().ir.InsertionPoint(made.body):
        yield Loop(made, Value(made.induction_variable), [Value(each) for each in made.inner_iter_args])
        if not carried:
            mlir().scf.yield_([])


@contextmanager
def when(condition: Value) -> Iterator[Callable[[], Any]]:
    """Emit the operations of this context so that they run only if `condition` is true. Yields `otherwise`, a context
    for operations that run if it is false.
    """
    made = mlir().scf.IfOp(condition.ir, has_else=True)

    @contextmanager
    def otherwise() -> Iterator[None]:
        with mlir().ir.InsertionPoint.at_block_begin(made.else_block):
            yield

    with mlir().ir.InsertionPoint(made.then_block):
        yield otherwise
        mlir().scf.yield_([])
    with mlir().ir.InsertionPoint(made.else_block):
        mlir().scf.yield_([])


@contextmanager
def repeat(begin: Value, goes_on: Callable[[Value], Value]) -> Iterator[Loop]:
    """Build a loop that begins with the value `begin` and continues while `goes_on` is true of the value; each
    iteration ends with `carry` of the next value.
    """
    ir = mlir().ir
    made = mlir().scf.WhileOp([begin.type], [begin.ir])
    before, after = (each.blocks.append(begin.type) for each in (made.before, made.after))
    with ir.InsertionPoint(before):
        mlir().scf.condition(goes_on(Value(before.arguments[0])).ir, before.arguments)
    with ir.InsertionPoint(after):
        value = Value(after.arguments[0])
        yield Loop(made, value, [value])


def either(condition: Value, one: Callable[[], Value], other: Callable[[], Value], kind: str = "i1") -> Value:
    """Return the result of `one` if `condition` is true, else of `other`; only one of the two is computed."""
    made = mlir().scf.IfOp(condition.ir, [typed(kind)], has_else=True)
    for block, make in ((made.then_block, one), (made.else_block, other)):
        with mlir().ir.InsertionPoint(block):
            mlir().scf.yield_([make().ir])
    return Value(made.operation.result)
