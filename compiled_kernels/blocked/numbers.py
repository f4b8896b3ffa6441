"""Convert the words of a weight in panels (see layout.py) to numbers in registers, called parts, which a product
multiplies with x.

| arithmetic | a part is | weights |
|---|---|---|
| pairs of bfloat16 | a vector of pairs, of two columns of the width | bfloat16, and codes, all of which are exact |
| float32 | a vector of numbers, of one column | all |
| integers | a vector of words: four bytes, or two int16 (see blocked/int8_rows.py) | codes, with x in INT8 |

Codes in planes (see linear/planes.py) are looked up in a register table, if the level has such an instruction.
"""

from __future__ import annotations

from collections.abc import Sequence

from compiled_kernels.blocked.layout import BYTE_OF_COLUMN
from compiled_kernels.blocked.shape import Panels
from compiled_kernels.builder.values import Value, constant, intrinsic, negative
from compiled_kernels.builder.vectors import look_up, look_up_bytes, look_up_floats

Planes = Sequence[tuple[int, Sequence[Value]]]  # for each plane its bits, and the words of a unit
FIRST_BITS = tuple(8 * byte for byte in BYTE_OF_COLUMN)
E4M3_UNIT = 2.0**8  # correction factor of E4M3 bits moved to float16 positions


def unit_words(product: Panels, memory: Value, panel: Value, at: Value, column: int) -> list[Value]:
    """Load a unit, the words that are read together, at position `at` of the width, for a vector of a panel's columns
    from `column` on.
    """
    words = product.words
    if words is None:
        return [memory.load(product.lanes, panel, at // product.unit, column)]
    inside = at % words.block
    start, loaded = at // words.block * words.words, []
    for bits in words.planes:
        first = start + inside // (32 // bits)
        loaded += [memory.load(product.lanes, panel, first + i, column) for i in range(bits * product.unit // 32)]
        start += bits * words.block // 32
    return loaded


def parts(product: Panels, words: Sequence[Value]) -> list[Value]:
    """Return the numbers of a unit without their scales, in the order of the width; the table above lists the forms of
    a part.
    """
    pairs, format = product.uses_bf16_pairs, product.words
    if format is None:
        (word,) = words
        if pairs or product.weight_dtype == "f32":
            return [word.bits(product.weight_dtype)]
        return [word.to("f32")] if product.weight_dtype == "f16" else half_floats(word)
    if product.w8a8:
        return _integers(product, words)
    if product.weight_dtype == "f8":
        return _in_pairs([_e4m3(word >> first) for word in words for first in FIRST_BITS], pairs)
    if format.sign_bit:
        signed = [(word << (24 - first)).signed_shift(24).to("f32") for word in words for first in FIRST_BITS]
        return _in_pairs(signed, pairs)
    planes = _planes(product, words)
    values = format.values or range(-format.offset, (1 << format.bits) - format.offset)
    if pairs:
        return [look_up(values, _field(planes, column, 16)) for column in range(0, product.unit, 2)]
    return [_float(_field(planes, column, 32), values, format.bits) for column in range(product.unit)]


def _planes(product: Panels, words: Sequence[Value]) -> Planes:
    """Split a unit's words by plane."""
    assert product.words is not None
    planes, left = [], list(words)
    for bits in product.words.planes:
        count = bits * product.unit // 32
        planes.append((bits, left[:count]))
        left = left[count:]
    return planes


def _integers(product: Panels, words: Sequence[Value]) -> list[Value]:
    """Return the codes of a unit as words for the product with INT8: unsigned bytes, equal to the codes plus
    `added_to_codes`, or int16.
    """
    format = product.words
    assert format is not None
    signed = words
    if not format.sign_bit:
        planes, each = _planes(product, words), ((1 << format.bits) - 1) * 0x01010101
        codes = [_field(planes, column, 8) & each for column in range(0, product.unit, 4)]
        if not format.values:
            return codes
        signed = [look_up_bytes([int(value) for value in format.values], each) for each in codes]
    if product.int8_rows.values == 4:
        return [word ^ 0x80808080 for word in signed]
    halves = [word.bits("i16") for word in signed]
    return [each.signed_shift(8).bits("i32") for pair in halves for each in (pair << 8, pair)]


def half_floats(word: Value) -> list[Value]:
    """Return the two bfloat16 numbers of each word as float32, of which bfloat16 is the upper half."""
    return [(word << 16).bits("f32"), (word & -65536).bits("f32")]


def _in_pairs(floats: list[Value], pairs: bool) -> list[Value]:
    """Return float32 numbers that are exact in bfloat16; with `pairs`, as pairs of bfloat16."""
    if not pairs:
        return floats
    words = [each.bits("i32") for each in floats]
    return [((words[at] >> 16) | words[at + 1]).bits("bf16") for at in range(0, len(words), 2)]


def _e4m3(bytes_: Value) -> Value:
    """Convert the lowest byte of each word from E4M3 to float32, through float16: s eeee mmm becomes s 0eeee
    mmm0000000. Subnormal float16 numbers convert at full speed, in every denormal mode of the processor.
    """
    halves = ((bytes_ & 0x7F) << 7) | ((bytes_ & 0x80) << 8)
    return halves.to("i16").bits("f16").to("f32") * E4M3_UNIT


def _field(planes: Planes, column: int, spacing: int) -> Value:
    """Return the codes of a column at the lowest bits of each `spacing` bits; the bits above them are arbitrary."""
    (bits, words), *above = planes
    field = _moved(words, bits, column)
    for more, others in above:
        keep = sum(((1 << bits) - 1) << at for at in range(0, 32, spacing))
        field = (field & keep) | (_moved(others, more, column, bits) & ~keep)
        bits += more
    return field


def _moved(words: Sequence[Value], bits: int, column: int, to: int = 0) -> Value:
    """Return the word of a column with its field shifted down to bit `to`."""
    inside = column % (32 // bits)
    down = bits * (inside // 4) + FIRST_BITS[inside % 4] - to
    word = words[column // (32 // bits)]
    return word >> down if down >= 0 else word << -down


def _float(codes: Value, values: Sequence[float], bits: int) -> Value:
    """Return the entries of `values` at the indices in the lowest `bits` bits of each word."""
    if isinstance(values, range):
        return (codes & ((1 << bits) - 1)).to("f32") + float(values[0])
    values = [float(each) for each in values]
    if codes.lanes == 16:
        return look_up_floats(values, codes)
    low, high = (  # AVX2: VPERMPS reads the lowest three bits of an index
        intrinsic("llvm.x86.avx2.permps", half.type, half, codes)
        for half in (constant(values[:8], "f32"), constant(values[8:], "f32"))
    )
    return (codes & 8).equals(0).select(low, high)


def scales_at(product: Panels, weights: Sequence[Value], panel: Value, at: Value, column: int) -> list[Value]:
    """Return the scale, and the minimum if there is one, of the group at position `at`, in float32, for a vector of a
    panel's columns.
    """
    lanes, words = product.lanes, product.words
    assert words is not None
    columns = words.scale_columns if words.group == product.group else product.group
    places = weights[1 : 3 if product.has_minima else 2]
    loaded = [each.load(lanes, panel, at // columns, column) for each in places]
    beside = [_exponents(each) if each.element == "i8" else each.to("f32") for each in loaded]
    if (sub := words.sub_scales) is None:
        return beside
    group, start = at % words.block // words.group, at // words.block * words.words + words.plane_words
    fields = (sub.scale, sub.minimum)[: len(beside)]
    numbers = [_sub_scale(weights[0], each, lanes, panel, start, group, column) for each in fields]
    scale = numbers[0] ^ sub.sign_bit if sub.sign_bit else numbers[0]
    scale = scale - sub.offset if sub.offset else scale
    taken_off = [negative(each * m.to("f32")) for each, m in zip(beside[1:], numbers[1:], strict=True)]
    return [beside[0] * scale.to("f32"), *taken_off]


def _sub_scale(
    memory: Value, fields: Sequence[tuple[int, int]], lanes: int, panel: Value, start: Value, group: Value, column: int
) -> Value:  # fmt: skip
    """Return a group's number from the words that follow a block's codes."""
    number, known = None, 0
    for bits, first in fields:
        place = group * bits + first
        word = memory.load(lanes, panel, start + place // 32, column)
        moved = word >> (place % 32).to("i32").broadcast(lanes)
        value = (moved & ((1 << bits) - 1)) << known
        number = value if number is None else number | value
        known += bits
    assert number is not None
    return number


def _exponents(given: Value) -> Value:
    """Return 2^(byte - 128) as float32; the two smallest results are subnormal."""
    wide = given.to("i32", signed=False)
    return wide.below(2).select((wide + 1) << 21, (wide - 1) << 23).bits("f32")
