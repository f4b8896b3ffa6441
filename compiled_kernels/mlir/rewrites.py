"""Change a module, in place, in ways that no MLIR pass does; these rewrites run between the passes."""

# The type stubs of these optional packages do not list their exports.
# pyright: reportAttributeAccessIssue=false, reportMissingImports=false
from __future__ import annotations

import math
from typing import Any

# Flags that only allow reductions to be reordered: NaN and infinity keep their meaning, because masks use them.
# Divisions and roots get no such flags: with them LLVM would compute 1 / sqrt(x) as an estimate and a Newton step,
# which is NaN for infinite x.
REORDERED = "#arith.fastmath<reassoc,nsz,contract>"
FREE = ("arith.addf", "arith.subf", "arith.mulf", "arith.negf", "arith.maximumf", "arith.minimumf")
# Flags that allow a fused multiply-add but no reordering: the two parts of ln 2 must stay separate.
AS_WRITTEN = "#arith.fastmath<contract>"

LOG2_E = 1 / math.log(2)
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4  # the product of the first part and any exponent is exact in float32
# (exp(r) - 1 - r) / r² at Chebyshev nodes over |r| <= ln(2) / 2, in float32: exp(r) to 1.1e-8 of its value.
EXP_TERMS = (0.5, 0.16666576266288757, 0.041666463017463684, 0.008363205008208752, 0.001393368816934526)


def allow_reordering(module: Any) -> None:
    """Set the fast-math flags that let LLVM vectorize reductions and use fused multiply-adds."""
    from torch_mlir.ir import Attribute

    flags = Attribute.parse(REORDERED, module.context)
    for op in find_operations(module, *FREE):
        op.attributes["fastmath"] = flags


def expand_exp(module: Any) -> None:
    """Expand `math.exp` of float32, or of vectors of it, to multiplications and additions, which vectorize; the C
    library's exp would be one call for each number.

    exp(x) = 2^n exp(r), n = round(x / ln 2), |r| <= ln(2) / 2. -inf gives 0, inf gives inf, NaN stays; results below
    2e-38 are 0.
    """
    from torch_mlir.dialects import arith
    from torch_mlir.dialects import math as math_ops
    from torch_mlir.ir import (
        Attribute,
        DenseElementsAttr,
        F32Type,
        FloatAttr,
        InsertionPoint,
        IntegerAttr,
        IntegerType,
        Location,
        VectorType,
    )  # fmt: skip

    with module.context, Location.unknown():
        f32, i32, order = F32Type.get(), IntegerType.get_signless(32), Attribute.parse(AS_WRITTEN)

        def constant(kind: Any, value: Any) -> Any:
            return arith.ConstantOp(
                kind, value if kind == value.type else DenseElementsAttr.get_splat(kind, value)
            ).result

        def number(value: float) -> Any:
            return constant(x.type, FloatAttr.get(f32, value))

        def integer(value: int) -> Any:
            return constant(whole, IntegerAttr.get(i32, value))

        def times(a: Any, b: Any) -> Any:
            return arith.MulFOp(a, b, fastmath=order).result

        def plus(a: Any, b: Any) -> Any:
            return arith.AddFOp(a, b, fastmath=order).result

        for op in find_operations(module, "math.exp"):
            x = op.operands[0]
            vector = x.type if isinstance(x.type, VectorType) else None
            if op.name != "math.exp" or (vector.element_type if vector else x.type) != f32:
                continue
            whole = VectorType.get(vector.shape, i32) if vector else i32
            with InsertionPoint(op):
                # Comparisons are false for NaN, so it passes both.
                low, high = number(-87.3), number(89.0)
                x = arith.SelectOp(arith.CmpFOp(arith.CmpFPredicate.OLT, x, low).result, low, x).result
                x = arith.SelectOp(arith.CmpFOp(arith.CmpFPredicate.OGT, x, high).result, high, x).result
                n = math_ops.RoundEvenOp(times(x, number(LOG2_E))).result
                r = x
                for part in (LN2_HIGH, LN2_LOW):
                    r = plus(r, times(n, number(-part)))
                y = number(EXP_TERMS[-1])
                for term in (*EXP_TERMS[-2::-1], 1.0, 1.0):
                    y = plus(times(y, r), number(term))
                # 2^n is computed as 2 * 2^(n - 1), because float32 has no 2^128, although exp(88.5) is representable.
                bits = arith.AddIOp(arith.FPToSIOp(whole, n).result, integer(126)).result
                scale = arith.BitcastOp(x.type, arith.ShLIOp(bits, integer(23)).result).result
                y = times(times(y, scale), number(2.0))
            op.results[0].replace_all_uses_with(y)
            op.erase()


def bfloat16_by_float32(module: Any) -> None:
    """Round float64 to bfloat16 in two steps, by way of float32, as torch does; in one step LLVM would call a library
    function.
    """
    from torch_mlir.dialects import arith
    from torch_mlir.ir import BF16Type, F32Type, F64Type, InsertionPoint, Location

    with module.context, Location.unknown():
        for op in find_operations(module, "arith.truncf"):
            if op.operands[0].type == F64Type.get() and op.results[0].type == BF16Type.get():
                with InsertionPoint(op):
                    op.operands[0] = arith.TruncFOp(F32Type.get(), op.operands[0]).result


def loops_for_copies(module: Any) -> None:
    """Replace `memref.copy` of strided memory by `linalg.copy`, because the torch-mlir wheel lacks the library function
    that `memref.copy` calls.
    """
    from torch_mlir.dialects import linalg
    from torch_mlir.ir import InsertionPoint, Location

    for op in find_operations(module, "memref.copy"):
        with InsertionPoint(op), Location.unknown(module.context):
            linalg.copy(op.operands[0], outs=[op.operands[1]])
        op.erase()


def mark_arguments_noalias(module: Any) -> None:
    """Mark the arguments of functions for LLVM as memory that does not overlap."""
    from torch_mlir.ir import ArrayAttr, DictAttr, UnitAttr

    with module.context:
        for op in find_operations(module, "func.func"):
            separate = [
                DictAttr.get({"llvm.noalias": UnitAttr.get()} if str(each).startswith("memref") else {})
                for each in op.type.inputs
            ]
            op.attributes["arg_attrs"] = ArrayAttr.get(separate)


def duplicate_cheap(module: Any) -> None:
    """Give each operation that reads a cheap elementwise result its own copy of the computation: when fused,
    recomputing costs less than storing the result. Results of the function, and sums of two whole tensors, are not
    duplicated."""
    from torch_mlir.ir import InsertionPoint

    for op in reversed(find_operations(module, "linalg.generic")):
        users = [use.owner.name for use in op.results[0].uses]
        if len(users) < 2 or len(op.results) > 1 or "func.return" in users or not _is_cheap(op):
            continue
        for use in list(op.results[0].uses)[1:]:
            with InsertionPoint(op):
                again = op.operation.clone()
            use.owner.operands[use.operand_number] = again.results[0]


def _is_cheap(op: Any) -> bool:
    cheap = {f"arith.{name}" for name in ("extf", "truncf", "addf", "subf", "mulf", "negf")} | {"linalg.yield"}
    elementwise = not any("reduction" in str(kind) for kind in op.attributes["iterator_types"])
    whole = [each for each in list(op.operands)[:-1] if extents(each) == extents(op.results[0])]
    return elementwise and len(whole) < 2 and {each.operation.name for each in op.regions[0].blocks[0]} <= cheap


def extents(value: Any) -> list[int]:
    """Return a tensor's shape; empty for a number."""
    return list(getattr(value.type, "shape", ()))


def results_as_arguments(module: Any) -> None:
    """Make the function write each result into an additional argument, by a copy where it cannot write there
    directly.
    """
    from torch_mlir.ir import FunctionType, InsertionPoint, Location, Operation, TypeAttr

    (function,) = find_operations(module, "func.func")
    block = function.regions[0].blocks[0]
    leave = list(block.operations)[-1]
    results = list(leave.operands)
    with module.context, Location.unknown():
        for number, result in enumerate(results):
            place = block.add_argument(result.type, Location.unknown())
            if result not in results[:number] and _starts_in(result, place):
                continue
            with InsertionPoint(leave):
                copied = Operation.create(
                    "bufferization.materialize_in_destination", results=[result.type], operands=[result, place]
                )
            leave.operands[number] = copied.result
        inputs = [*function.type.inputs, *function.type.results]
        function.attributes["function_type"] = TypeAttr.get(FunctionType.get(inputs, function.type.results))


def _starts_in(result: Any, place: Any) -> bool:
    """Return whether the operation that fills a new tensor to make `result` could fill `place` instead."""
    from torch_mlir.ir import Block

    while not isinstance(result.owner, Block):
        maker = result.owner
        into = 1 if maker.name == "tensor.insert_slice" else len(maker.operands) - 1
        if maker.name != "tensor.insert_slice" and not (maker.name.startswith("linalg.") and len(maker.results) == 1):
            return False
        start = maker.operands[into]
        if not isinstance(start.owner, Block) and start.owner.name == "tensor.empty":
            maker.operands[into] = place
            return True
        if maker.name != "tensor.insert_slice" or len(list(start.uses)) > 1:
            return False
        result = start
    return False


def find_operations(module: Any, *prefixes: str) -> list[Any]:
    """Return the operations with names that begin with one of `prefixes`, innermost first."""
    from torch_mlir.ir import WalkResult

    operations = []

    def visit(op: Any) -> Any:
        if op.name.startswith(prefixes):
            operations.append(op.opview if hasattr(op, "opview") else op)
        return WalkResult.ADVANCE

    module.operation.walk(visit)
    return operations
