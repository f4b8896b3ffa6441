"""Weighted sums of codes as MLIR text: scores (queries over dim) and mixtures (weights over offsets).

Scales are folded into the weights: both are multiplied once a run, not once a code.
"""

from __future__ import annotations

from collections.abc import Callable

from compiled_kernels.mlir_text import Lines, number, vector
from compiled_kernels.paged_attention.mlir_tile import QueryHead
from compiled_kernels.quantized_attention.mlir_shape import QuantizedOperand

LARGEST = 32639  # 127 * 256 + 127: the largest fixed-point number whose halves are both signed bytes
# Bits of e4m3 numbers read as those of float32 are 2**120 too small: weights make up for half of it, sums for the rest,
# so that neither is ever too small or too large.
HALF_WAY = 2.0**60
TINY = 1e-30  # weights below it are zero, where their reciprocal would be none

Weight = Callable[[str], str]  # the column's index -> a vector of float32 weights, `folds` long
ACCUMULATOR_SHARE = 3 / 4  # of the registers: those of sums kept at once
NIBBLES = str(0x0F0F0F0F)
Take = Callable[
    [QueryHead, str, str], None
]  # a head, the index of a run's first number, and the run's sums as a vector


def fold_scales(
    lines: Lines, side: QuantizedOperand, memories: tuple[str, str], part: str, slot: str, weight: Weight, given: bool
) -> tuple[str, str]:
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
            lines.extend(
                lines.load(memory, f"%page, %group, {part}, {column}", side.scales, lanes, "f16"), lanes, "f16"
            )
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
            lines.store(
                words, memory, f"{slot}, {lines.index(number_of_side)}, {place}", side.folded, lanes // 4, "i32"
            )
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


def weighted_sums(
    lines: Lines,
    side: QuantizedOperand,
    name: str,
    heads: list[QueryHead],
    weight: Callable[[QueryHead, str], str],
    given: bool,
    take: Take,
) -> None:
    """Emit for every head and every number kept the sum of weight * (minimum + scale * code) over all that is summed.

    Codes, scales and minima lie in %{name}c, %{name}s and %{name}m, at %page and %group; %next is the next page.
    """
    mark = lines.serial
    part, zero, one, parts = (
        f"%part{mark}",
        lines.index(0),
        lines.index(1),
        lines.index(side.kept // side.numbers_per_scale),
    )
    lines.emit(f"scf.for {part} = {zero} to {parts} step {one} {{")
    memories = f"%{name}s", f"%{name}m"
    found = [
        fold_scales(lines, side, memories, part, head.slot, lambda column, head=head: weight(head, column), given)
        for head in heads
    ]
    base = lines.let(f"arith.muli {part}, {lines.index(side.numbers_per_scale)} : index")
    most = max(1, int(ACCUMULATOR_SHARE * side.target.registers) // (len(heads) * (2 if side.uses_int8_dot else 1)))
    starts = range(0, side.numbers_per_scale, side.lanes)
    for first in range(0, len(starts), most):
        kept = [lines.let(f"arith.addi {base}, {lines.index(start)} : index") for start in starts[first : first + most]]
        totals = iter((_fixed_sums if side.uses_int8_dot else _exact_sums)(lines, side, name, heads, kept))
        for head, (unit, bias) in zip(heads, found, strict=True):
            units, biases = lines.splat(unit, side.lanes), lines.splat(bias, side.lanes)
            for place in kept:
                take(head, place, lines.fma(next(totals), units, biases, side.lanes))
    lines.emit("}")


def _words(lines: Lines, side: QuantizedOperand, name: str, kept: list[str], word: str) -> list[str]:
    """Emit the loads of one word of codes; the same of the next page is prefetched."""
    memory = f"%{name}c"
    for at in kept:
        fetch(lines, memory, f"{word}, {at}", side.codes)
    return [lines.load(memory, f"%page, %group, {word}, {at}", side.codes, side.lanes, "i32") for at in kept]


def _fixed_sums(lines: Lines, side: QuantizedOperand, name: str, heads: list[QueryHead], kept: list[str]) -> list[str]:
    """Emit four codes at a time against four high bytes, and four low bytes, of the weights."""
    mark, words = lines.serial, vector(16, "i32")
    zero = lines.constant("0", 16, "i32")
    names = [f"%s{mark}_{i}" for i in range(2 * len(heads) * len(kept))]
    word, over = f"%w{mark}", (lines.index(0), lines.index(side.words), lines.index(1))
    loop = f"{word} = {over[0]} to {over[1]} step {over[2]}"
    after = lines.begin_loop(f"%f{mark}", loop, names, [zero] * len(names), 16, "i32")
    moved = list(names)
    loaded = _words(lines, side, name, kept, word)
    for quad, codes in _quads(lines, side, loaded, word):
        carried = 0
        for head in heads:
            for half in (lines.index(0), lines.index(1)):
                bits = lines.let(f"memref.load %folded_{name}[{head.slot}, {half}, {quad}] : {side.folded}")
                weights = lines.let(f"vector.broadcast {bits} : i32 to {words}")
                for each in codes:
                    moved[carried] = lines.dot_bytes(moved[carried], each, weights)
                    carried += 1
    lines.end_loop(moved, 16, "i32")
    return _joined(lines, after, len(heads), len(kept))


def _quads(lines: Lines, side: QuantizedOperand, loaded: list[str], word: str) -> list[tuple[str, list[str]]]:
    """Emit the quads of weights of a word, each with its codes as bytes."""
    if side.format == "int8":
        return [(word, loaded)]
    words = vector(16, "i32")
    low_half, four = lines.constant(NIBBLES, 16, "i32"), lines.constant("4", 16, "i32")
    first = lines.let(f"arith.muli {word}, {lines.index(2)} : index")
    second = lines.let(f"arith.addi {first}, {lines.index(1)} : index")
    above = [lines.let(f"arith.shrui {each}, {four} : {words}") for each in loaded]
    return [
        (quad, [lines.let(f"arith.andi {each}, {low_half} : {words}") for each in half])
        for quad, half in ((first, loaded), (second, above))
    ]


def _joined(lines: Lines, after: list[str], heads: int, kept: int) -> list[str]:
    """Emit 256 times the sums of high bytes plus those of low bytes, as float32; for each head, each vector."""
    words, floats = vector(16, "i32"), vector(16)
    shift = lines.constant("256.0", 16)
    found = []
    for head in range(heads):
        high, low = (after[(2 * head + half) * kept : (2 * head + half + 1) * kept] for half in (0, 1))
        for pair in zip(high, low, strict=True):
            above, below = (lines.let(f"arith.sitofp {each} : {words} to {floats}") for each in pair)
            found.append(lines.fma(above, shift, below, 16))
    return found


def _exact_sums(lines: Lines, side: QuantizedOperand, name: str, heads: list[QueryHead], kept: list[str]) -> list[str]:
    """Emit one code at a time, as float32."""
    mark, lanes = lines.serial, side.lanes
    zero = lines.constant("0.0", lanes)
    names = [f"%s{mark}_{i}" for i in range(len(heads) * len(kept))]
    word, over = f"%w{mark}", (lines.index(0), lines.index(side.words), lines.index(1))
    loop = f"{word} = {over[0]} to {over[1]} step {over[2]}"
    after = lines.begin_loop(f"%f{mark}", loop, names, [zero] * len(names), lanes)
    moved = list(names)
    loaded = _words(lines, side, name, kept, word)
    first = lines.let(f"arith.muli {word}, {lines.index(side.codes_per_word)} : index")
    for code in range(side.codes_per_word):
        at = lines.let(f"arith.addi {first}, {lines.index(code)} : index")
        numbers = [(_e4m3 if side.format == "fp8" else _integer)(lines, side, each, code) for each in loaded]
        carried = 0
        for head in heads:
            scalar = lines.let(f"memref.load %folded_{name}[{head.slot}, {at}] : {side.folded}")
            weights = lines.splat(scalar, lanes)
            for each in numbers:
                moved[carried] = lines.fma(each, weights, moved[carried], lanes)
                carried += 1
    lines.end_loop(moved, lanes)
    return after


def _integer(lines: Lines, side: QuantizedOperand, word: str, code: int) -> str:
    """Emit the code of that number in every word, as float32."""
    words = vector(side.lanes, "i32")
    shift = lines.constant(str(8 * (code % 4) + 4 * (code // 4)), side.lanes, "i32")
    mask = lines.constant("255" if side.format == "int8" else "15", side.lanes, "i32")
    bits = lines.let(f"arith.andi {lines.let(f'arith.shrui {word}, {shift} : {words}')}, {mask} : {words}")
    return lines.let(f"arith.sitofp {bits} : {words} to {vector(side.lanes)}")


def _e4m3(lines: Lines, side: QuantizedOperand, word: str, code: int) -> str:
    """Emit the byte of that number in every word, as a float32 that is 2**120 times too small: sign, exponent and
    fraction are moved to their places in float32."""
    words = vector(side.lanes, "i32")

    def moved(bits: int, by: int) -> str:
        way, shift = ("arith.shli", by) if by >= 0 else ("arith.shrui", -by)
        there = lines.let(f"{way} {word}, {lines.constant(str(shift), side.lanes, 'i32')} : {words}")
        return lines.let(f"arith.andi {there}, {lines.constant(str(bits), side.lanes, 'i32')} : {words}")

    both = lines.let(f"arith.ori {moved(-(2**31), 24 - 8 * code)}, {moved(0x7F << 20, 20 - 8 * code)} : {words}")
    return lines.let(f"arith.bitcast {both} : {words} to {vector(side.lanes)}")
