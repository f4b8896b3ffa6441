"""Changes to a module that no pass makes, done in place between the passes."""

from __future__ import annotations

import math
from typing import Any

# What a reduction may do in another order, and no more: NaN and infinity keep their meaning (masks are made of them).
FASTMATH = "#arith.fastmath<reassoc,nsz,arcp,contract>"

LOG2_E = 1 / math.log(2)
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4  # the first times any exponent is exact in float32
EXP_TERMS = (1 / 2, 1 / 6, 1 / 24, 1 / 120, 1 / 720)  # of Taylor's series: 2.3e-8 of the value within ln(2) / 2


def allow_reordering(module: Any) -> None:
    """Set the fast-math flags that let LLVM vectorize reductions and use fused multiply-adds."""
    from torch_mlir.ir import Attribute

    flags = Attribute.parse(FASTMATH, module.context)
    for op in found(module, "arith.", "math."):
        if "fastmath" in op.attributes:
            op.attributes["fastmath"] = flags


def polynomial_exp(module: Any) -> None:
    """`math.exp` of float32 as multiplications and additions, which vectorize; libm's is a call for each number.

    exp(x) = 2^n exp(r), n = round(x / ln 2), |r| <= ln(2) / 2. -inf gives 0, inf gives inf, NaN stays; results below
    2e-38 are 0.
    """
    from torch_mlir.dialects import arith, math as math_ops
    from torch_mlir.ir import F32Type, FloatAttr, InsertionPoint, IntegerAttr, IntegerType, Location

    with module.context, Location.unknown():
        f32, i32 = F32Type.get(), IntegerType.get_signless(32)

        def number(value: float) -> Any:
            return arith.ConstantOp(f32, FloatAttr.get(f32, value)).result

        def integer(value: int) -> Any:
            return arith.ConstantOp(i32, IntegerAttr.get(i32, value)).result

        for op in found(module, "math.exp"):
            x = op.operands[0]
            if op.name != "math.exp" or x.type != f32:
                continue
            with InsertionPoint(op):
                # Comparisons are false for NaN, so it passes both.
                low, high = number(-87.3), number(89.0)
                x = arith.SelectOp(arith.CmpFOp(arith.CmpFPredicate.OLT, x, low).result, low, x).result
                x = arith.SelectOp(arith.CmpFOp(arith.CmpFPredicate.OGT, x, high).result, high, x).result
                n = math_ops.RoundEvenOp(arith.MulFOp(x, number(LOG2_E)).result).result
                r = x
                for part in (LN2_HIGH, LN2_LOW):
                    r = arith.SubFOp(r, arith.MulFOp(n, number(part)).result).result
                y = number(EXP_TERMS[-1])
                for term in (*EXP_TERMS[-2::-1], 1.0, 1.0):
                    y = arith.AddFOp(arith.MulFOp(y, r).result, number(term)).result
                # 2^n as 2 * 2^(n - 1): n = 128 has no float32 of its own, though exp(88.5) has.
                bits = arith.AddIOp(arith.FPToSIOp(i32, n).result, integer(126)).result
                scale = arith.BitcastOp(f32, arith.ShLIOp(bits, integer(23)).result).result
                y = arith.MulFOp(arith.MulFOp(y, scale).result, number(2.0)).result
            op.results[0].replace_all_uses_with(y)
            op.erase()


def loops_for_copies(module: Any) -> None:
    """`memref.copy` of strided memory as `linalg.copy`: the wheel lacks the library that carries it out."""
    from torch_mlir.dialects import linalg
    from torch_mlir.ir import InsertionPoint, Location

    for op in found(module, "memref.copy"):
        with InsertionPoint(op), Location.unknown(module.context):
            linalg.copy(op.operands[0], outs=[op.operands[1]])
        op.erase()


def separate_arguments(module: Any) -> None:
    """Promise LLVM that no two arguments of a function overlap."""
    from torch_mlir.ir import ArrayAttr, DictAttr, UnitAttr

    with module.context:
        for op in found(module, "func.func"):
            separate = [
                DictAttr.get({"llvm.noalias": UnitAttr.get()} if str(each).startswith("memref") else {})
                for each in op.type.inputs
            ]
            op.attributes["arg_attrs"] = ArrayAttr.get(separate)


def repeat_casts(module: Any) -> None:
    """Give each reader of a widened tensor its own cast: fused, it costs less than the memory it would be kept in."""
    from torch_mlir.ir import InsertionPoint

    for op in found(module, "linalg.generic"):
        inside = [each.operation.name for each in op.regions[0].blocks[0]]
        if inside != ["arith.extf", "linalg.yield"]:
            continue
        for use in list(op.results[0].uses)[1:]:
            with InsertionPoint(op):
                again = op.operation.clone()
            use.owner.operands[use.operand_number] = again.results[0]


def found(module: Any, *prefixes: str) -> list[Any]:
    """The operations whose names begin so, innermost first."""
    from torch_mlir.ir import WalkResult

    operations = []

    def visit(op: Any) -> Any:
        if op.name.startswith(prefixes):
            operations.append(op.opview if hasattr(op, "opview") else op)
        return WalkResult.ADVANCE

    module.operation.walk(visit)
    return operations
