"""Scales folded into weights: both are multiplied once a run, not once a code."""

from __future__ import annotations

from collections.abc import Callable

from compiled_kernels.mlir_text import Lines, number, vector
from compiled_kernels.quantized_attention.mlir_shape import QuantizedOperand

LARGEST = 32639  # 127 * 256 + 127: the largest fixed-point number whose halves are both signed bytes
# Bits of e4m3 numbers read as those of float32 are 2**120 too small: weights make up for half of it, sums for the rest,
# so that neither is ever too small or too large.
HALF_WAY = 2.0**60
TINY = 1e-30  # weights below it are zero, where their reciprocal would be none

Weight = Callable[[str], str]  # the column's index -> a vector of float32 weights, `folds` long


def fold_scales(lines: Lines, side: QuantizedOperand, memories: tuple[str, str], part: str, slot: str, weight: Weight, given: bool) -> tuple[str, str]:
    """Emit folded[slot] = weights times the scales of a part of the page.

    Returns (unit, bias), two numbers: sum of weight * number = unit * sum of folded * code + bias. With `given`,
    columns of weight zero are left out, whatever their scale is.
    """
    lanes, kind = side.folds, vector(side.folds)
    bias = lines.constant("0.0", lanes)
    products, columns = [], [lines.index(column) for column in range(0, side.summed, lanes)]
    read = memories[:1] if side.format == "fp8" else memories
    for column in columns:
        for memory in read:
            fetch(lines, memory, f"{part}, {column}", side.scales)
        weights = weight(column)
        run = [
            lines.extend(lines.load(memory, f"%page, %group, {part}, {column}", side.scales, lanes, "f16"), lanes, "f16")
            for memory in read
        ]
        if given:
            zero = lines.constant("0.0", lanes)
            counts = lines.let(f"arith.cmpf une, {weights}, {zero} : {kind}")
            bits = vector(lanes, "i1")
            run = [lines.let(f"arith.select {counts}, {each}, {zero} : {bits}, {kind}") for each in run]
        if side.format == "fp8":
            weights = lines.let(f"arith.mulf {weights}, {lines.constant(number(HALF_WAY), lanes)} : {kind}")
        products.append(lines.let(f"arith.mulf {weights}, {run[0]} : {kind}"))
        if len(run) > 1:
            bias = lines.fma(weights, run[1], bias, lanes)
    total = lines.hsum(bias, lanes)
    if not side.uses_int8_dot:
        for column, product in zip(columns, products, strict=True):
            lines.store(product, "%folded_" + _name(memories), f"{slot}, {column}", side.folded, lanes)
        unit = HALF_WAY if side.format == "fp8" else 1.0
        return lines.let(f"arith.constant {number(unit)} : f32"), total
    return _fixed(lines, side, "%folded_" + _name(memories), slot, products), total


def fetch(lines: Lines, memory: str, at: str, kind: str) -> None:
    """Ask for what the next page holds there: between two pages the processor would have nothing under way."""
    lines.emit(f"memref.prefetch {memory}[%next, %group, {at}], read, locality<3>, data : {kind}")


def _name(memories: tuple[str, str]) -> str:
    return memories[0][1]  # %ks -> k


def _fixed(lines: Lines, side: QuantizedOperand, memory: str, slot: str, products: list[str]) -> str:
    """Emit the products as fixed-point numbers of 16 bits, their high and low bytes apart; return the unit they count
    in."""
    lanes, whole = side.folds, vector(side.folds, "i32")
    unit, inverse = _unit(lines, lanes, products)
    half, eight = lines.constant("128", lanes, "i32"), lines.constant("8", lanes, "i32")
    for index, product in enumerate(products):
        scaled = lines.let(f"arith.mulf {product}, {lines.splat(inverse, lanes)} : {vector(lanes)}")
        nearest = lines.let(f"math.roundeven {scaled} : {vector(lanes)}")
        integer = lines.let(f"arith.fptosi {nearest} : {vector(lanes)} to {whole}")
        high = lines.let(f"arith.shrsi {lines.let(f'arith.addi {integer}, {half} : {whole}')}, {eight} : {whole}")
        low = lines.let(f"arith.subi {integer}, {lines.let(f'arith.shli {high}, {eight} : {whole}')} : {whole}")
        place = lines.index(index * lanes // 4)
        for number_of_side, part in enumerate((high, low)):
            octets = lines.let(f"arith.trunci {part} : {whole} to {vector(lanes, 'i8')}")
            words = lines.let(f"vector.bitcast {octets} : {vector(lanes, 'i8')} to {vector(lanes // 4, 'i32')}")
            lines.store(words, memory, f"{slot}, {lines.index(number_of_side)}, {place}", side.folded, lanes // 4, "i32")
    return unit


def _unit(lines: Lines, lanes: int, products: list[str]) -> tuple[str, str]:
    """Emit the unit, in which the largest of the products becomes LARGEST, and its reciprocal."""
    whole = vector(lanes, "i32")
    sign = lines.constant(str(0x7FFFFFFF), lanes, "i32")
    most = lines.constant("0", lanes, "i32")
    for product in products:  # without their signs, floats are in the order of their bits
        bits = lines.let(f"arith.bitcast {product} : {vector(lanes)} to {whole}")
        most = lines.let(f"arith.maxui {most}, {lines.let(f'arith.andi {bits}, {sign} : {whole}')} : {whole}")
    bits = lines.let(f"vector.reduction <maxui>, {most} : {whole} into i32")
    largest = lines.let(f"arith.bitcast {bits} : i32 to f32")
    limit, tiny = (lines.let(f"arith.constant {number(value)} : f32") for value in (float(LARGEST), TINY))
    part = lines.let(f"arith.constant {number(1 / LARGEST)} : f32")
    nothing = lines.let("arith.constant 0.0 : f32")
    vanishes = lines.let(f"arith.cmpf olt, {largest}, {tiny} : f32")
    inverse = lines.let(f"arith.divf {limit}, {largest} : f32")
    inverse = lines.let(f"arith.select {vanishes}, {nothing}, {inverse} : f32")
    return lines.let(f"arith.mulf {largest}, {part} : f32"), inverse
