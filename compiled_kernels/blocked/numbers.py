"""Words of a weight as numbers, in registers: what a product multiplies with x.

| arithmetic | a part is | of |
|---|---|---|
| pairs of bfloat16 | a vector of pairs, of two columns of the width | bfloat16, and codes, all of which are exact |
| float32 | a vector of numbers, of one column | all |

Codes in planes (see linear/planes.py) are looked up in a table in a register, where the level has such a table.
"""

from __future__ import annotations

from collections.abc import Sequence

from compiled_kernels.blocked.shape import FP4_VALUES, UNIT, Panels
from compiled_kernels.builder.values import Value, constant, intrinsic, negative
from compiled_kernels.builder.vectors import look_up, look_up_floats
from compiled_kernels.linear.matrix_format import SubScales

Fields = Sequence[tuple[int, Sequence[Value]]]  # of each plane its bits, and the words of a unit
NATURAL, PAIRED = (0, 8, 16, 24), (0, 16, 8, 24)  # first bits of four columns in a word: in order, and as pairs


def unit_words(product: Panels, memory: Value, panel: Value, at: Value, column: int) -> list[Value]:
    """Load the words that hold the unit at `at` of the width, of a vector of a panel's columns from `column` on."""
    words = product.words
    if words is None:
        return [memory.load(product.lanes, panel, at // product.values_per_word, column)]
    inside = at % words.block
    start, found = at // words.block * words.words, []
    for bits in words.planes:
        first = start + inside // (32 // bits)
        found += [memory.load(product.lanes, panel, first + i, column) for i in range(bits * UNIT // 32)]
        start += bits * words.block // 32
    return found


def parts(product: Panels, words: Sequence[Value]) -> list[Value]:
    """Return the numbers of a unit in the order of the width, without their scales."""
    pairs, kind = product.uses_bf16_pairs, product.weight_dtype
    if (format := product.words) is not None:
        planes, left = [], list(words)
        for bits in format.planes:
            planes.append((bits, left[:bits]))
            left = left[bits:]
        if format.sign_bit:
            return _signed(words, PAIRED, pairs)
        values = format.values or range(-format.offset, (1 << format.bits) - format.offset)
        return _numbers(planes, values, PAIRED, UNIT, pairs)
    (word,) = words
    if kind == "f32":
        return [word.bits("f32")]
    if kind == "bf16":
        return [word.bits("bf16")] if pairs else half_floats(word)
    if kind == "i8":
        return _signed([word], NATURAL, pairs)
    return _numbers([(4, [word])], FP4_VALUES if kind == "f4" else range(-8, 8), None, 8, pairs)


def half_floats(word: Value) -> list[Value]:
    """Return two bfloat16 of each word as float32, of which bfloat16 are the upper halves."""
    return [(word << 16).bits("f32"), (word & -65536).bits("f32")]


def _signed(words: Sequence[Value], order: Sequence[int], pairs: bool) -> list[Value]:
    """Return bytes with a sign."""
    floats = [(word << (24 - first)).signed_shift(24).to("f32") for word in words for first in order]
    if not pairs:
        return floats
    return [_joined(floats[at], floats[at + 1]) for at in range(0, len(floats), 2)]


def _joined(first: Value, second: Value) -> Value:
    """Return float32 that bfloat16 holds exactly, as pairs of such."""
    return ((first.bits("i32") >> 16) | second.bits("i32")).bits("bf16")


def _numbers(
    planes: Fields, values: Sequence[float], order: Sequence[int] | None, columns: int, pairs: bool
) -> list[Value]:
    """Return the numbers of a unit, whose codes are places in `values`."""
    if pairs and order is not None:
        return [look_up(values, _field(planes, column, order, 16)) for column in range(0, columns, 2)]
    bits = sum(each for each, _ in planes)
    floats = [_float(_field(planes, column, order, 32), values, bits) for column in range(columns)]
    if not pairs:
        return floats
    return [_joined(floats[at], floats[at + 1]) for at in range(0, columns, 2)]


def _field(planes: Fields, column: int, order: Sequence[int] | None, spacing: int) -> Value:
    """Return the codes of a column at the lowest bits of each `spacing` bits; other bits stand above them."""
    (bits, words), *above = planes
    found = _moved(words, bits, column, order)
    for more, others in above:
        keep = sum(((1 << bits) - 1) << at for at in range(0, 32, spacing))
        found = (found & keep) | (_moved(others, more, column, order, bits) & ~keep)
        bits += more
    return found


def _moved(words: Sequence[Value], bits: int, column: int, order: Sequence[int] | None, to: int = 0) -> Value:
    """Return the word of a column with its field moved down to the bit `to`."""
    inside = column % (32 // bits)
    down = (bits * inside if order is None else bits * (inside // 4) + order[inside % 4]) - to
    word = words[column // (32 // bits)]
    return word >> down if down >= 0 else word << -down


def _float(codes: Value, values: Sequence[float], bits: int) -> Value:
    """Return numbers by their place in `values`, given by the lowest bits of each word."""
    if bits == 4 and codes.lanes == 16:
        return look_up_floats(values, codes)
    if isinstance(values, range):
        return (codes & ((1 << bits) - 1)).to("f32") + float(values[0])
    low, high = (  # AVX2: VPERMPS reads the lowest three bits of an index
        intrinsic("llvm.x86.avx2.permps", half.type, half, codes)
        for half in (constant(values[:8], "f32"), constant(values[8:], "f32"))
    )
    return (codes & 8).equals(0).choose(low, high)


def scales_at(product: Panels, weights: Sequence[Value], panel: Value, at: Value, column: int) -> list[Value]:
    """Return scales of the group at `at`, of a vector of a panel's columns, in float32; and its minima where there are
    such."""
    lanes, words = product.lanes, product.words
    if words is None:
        given = weights[1].load(lanes, panel, at // product.group, column)
        return [_exponents(given) if product.weight_dtype == "f4" else given.to("f32")]
    places = weights[1 : 3 if words.minima else 2]
    found = [each.load(lanes, panel, at // words.scale_columns, column).to("f32") for each in places]
    if words.sub_scales is None:
        return found
    sub, group = words.sub_scales, at % words.block // words.group
    start = at // words.block * words.words + words.plane_words
    fields = (sub.scale, sub.minimum)[: len(found)]
    numbers = [_sub_scale(weights[0], sub, each, lanes, panel, start, group, column) for each in fields]
    scale = numbers[0] ^ sub.sign_bit if sub.sign_bit else numbers[0]
    scale = scale - sub.offset if sub.offset else scale
    taken_off = [negative(each * m.to("f32")) for each, m in zip(found[1:], numbers[1:], strict=True)]
    return [found[0] * scale.to("f32"), *taken_off]


def _sub_scale(
    memory: Value, sub: SubScales, fields: Sequence[tuple[int, int]], lanes: int, panel: Value, start: Value,
    group: Value, column: int,
) -> Value:  # fmt: skip
    """Return a number of a group from the words behind a block's codes."""
    found, known = None, 0
    for bits, first in fields:
        place = group * bits + first
        word = memory.load(lanes, panel, start + place // 32, column)
        moved = word >> (place % 32).to("i32").spread(lanes)
        value = (moved & ((1 << bits) - 1)) << known
        found = value if found is None else found | value
        known += bits
    assert found is not None
    return found


def _exponents(given: Value) -> Value:
    """Return bytes e8m0 as float32: two to their value less 127; 255 is not a number."""
    wide = given.to("i32", signed=False)
    special = wide.equals(0) | wide.equals(255)  # subnormal, and not a number
    none = wide.like(0)
    return ((wide << 23) | special.choose(none.like(1 << 22), none)).bits("f32")
