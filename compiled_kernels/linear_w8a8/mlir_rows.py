"""Rows of activations in INT8 as MLIR text: how they lie in memory, how they are made, how they are multiplied.

A row is words of 32 bits, then a tail: the scale's bits, then what is added to every sum of the row, then padding. What
a word holds depends on the instruction that multiplies it, each with int32 sums that never saturate:

| values a word | multiplied by | at |
|---|---|---|
| 4 of INT8 | VPDPBUSD, with 4 bytes of the weight plus 128; 128 times the row's sum is taken off at the end | v4+vnni and above |
| 2 of INT16 | VPMADDWD | v3, v4 |
| 1 of INT32 | VPMULLD, row by row where a width has no such vectors | any |

Weights are bytes in the order of the width. In panels (see blocked/layout.py) a backend's word has four: without byte dots
its even and its odd bytes are two pairs, and a row's words are in that order too.
"""

from __future__ import annotations

from dataclasses import dataclass

from compiled_kernels.mlir_text import Lines, Named, Target, declare_arguments, largest_divisor, memref, number, vector

TAIL = 16  # words; so many that rows of whole cache lines stay such
SCALE, ADDED = 0, 1  # of the tail
SMALLEST = 1.1754943508222875e-38  # the smallest normal float32: quantize_rows' least scale


@dataclass(frozen=True)
class Int8Rows:
    """Rows of `width` numbers of type `x` (f32 or bf16) in INT8, for weights in `panels` or row by row."""

    width: int
    x: str
    target: Target
    panels: bool

    @property
    def values(self) -> int:
        """Values of a row in a word."""
        if self.panels:
            return 4 if self.target.has_int8_dot else 2
        if self.target.has_int8_dot and self.width % (4 * self.lanes) == 0:
            return 4
        return 2 if self.width % (2 * self.lanes) == 0 else 1

    @property
    def lanes(self) -> int:
        """Words of a whole vector."""
        return self.target.lanes

    @property
    def words(self) -> int:
        return self.width // self.values

    def type(self, rows: int) -> str:
        return memref((rows, self.words + TAIL), "i32")

    def named(self, rows: int) -> Named:
        """A buffer for `rows` such rows, named after what it holds."""
        return Named(f"int8_{self.width}x{self.values}", self.type(rows))


def quantize_text(name: str, rows: Int8Rows, count: int) -> str:
    """@name(x [count, width], out [count, words and tail], from, to): the rows from..to in INT8. (Two passes over a row
    that lies in the nearest cache; the largest is found among the bits of the numbers without their signs, so that a
    NaN is larger than all.)"""
    lanes, given = largest_divisor(rows.width, rows.lanes), memref((count, rows.width), rows.x)
    ints, kind = vector(lanes, "i32"), rows.type(count)
    peak, scale, body = Lines("p"), Lines("s"), Lines("q")
    value = peak.extend(peak.load("%x", "%row, %at", given, lanes, rows.x), lanes, rows.x)
    bits = peak.let(f"arith.bitcast {value} : {vector(lanes)} to {ints}")
    bits = peak.let(f"arith.andi {bits}, {peak.constant('2147483647', lanes, 'i32')} : {ints}")
    higher = peak.let(f"arith.maxsi {bits}, %peak : {ints}")
    amax = scale.let("arith.bitcast %top : i32 to f32")
    most, least = (scale.let(f"arith.constant {number(each)} : f32") for each in (127.0, SMALLEST))
    exact = scale.let(f"arith.divf {amax}, {most} : f32")
    exact = scale.let(f"arith.maximumf {exact}, {least} : f32")
    splat = scale.splat(exact, lanes)
    value = body.extend(body.load("%x", "%row, %at", given, lanes, rows.x), lanes, rows.x)
    value = body.let(f"arith.divf {value}, {splat} : {vector(lanes)}")
    value = body.let(f"math.roundeven {value} : {vector(lanes)}")
    value = body.let(f"arith.fptosi {value} : {vector(lanes)} to {ints}")
    total = body.let(f"arith.addi {value}, %total : {ints}")
    packed, count_words = _packed(body, rows, value, lanes)
    place = body.let(f"arith.divui %at, {body.index(rows.values)} : index")
    body.store(packed, "%out", f"%row, {place}", kind, count_words, "i32")
    tail = Lines("t")
    scale_bits = tail.let(f"arith.bitcast {exact} : f32 to i32")
    added = tail.let("arith.constant 0 : i32")
    if rows.values == 4:
        sums = tail.let(f"vector.reduction <add>, %sum : {ints} into i32")
        added = tail.let(f"arith.muli {sums}, {tail.let('arith.constant -128 : i32')} : i32")
    for offset, word in ((SCALE, scale_bits), (ADDED, added)):
        tail.emit(f"memref.store {word}, %out[%row, {tail.index(rows.words + offset)}] : {kind}")
    arguments = declare_arguments([Named("x", given), Named("out", kind), Named("from", "index"), Named("to", "index")])
    return f"""func.func private @{name}({arguments}) attributes {{no_inline}} {{
%zero = arith.constant 0 : index
%one = arith.constant 1 : index
%width = arith.constant {rows.width} : index
%step = arith.constant {lanes} : index
%nothing = arith.constant dense<0> : {ints}
scf.for %row = %from to %to step %one {{
  %peaks = scf.for %at = %zero to %width step %step iter_args(%peak = %nothing) -> ({ints}) {{
{peak.text()}
    scf.yield {higher} : {ints}
  }}
  %top = vector.reduction <maxsi>, %peaks : {ints} into i32
{scale.text()}
  %sum = scf.for %at = %zero to %width step %step iter_args(%total = %nothing) -> ({ints}) {{
{body.text()}
    scf.yield {total} : {ints}
  }}
{tail.text()}
}}
return
}}"""


def _packed(lines: Lines, rows: Int8Rows, value: str, lanes: int) -> tuple[str, int]:
    """A vector of int32 that INT8 holds as a row's words, and how many these are."""
    if rows.values == 1:
        return value, lanes
    narrow, count = vector(lanes, "i8" if rows.values == 4 else "i16"), lanes // rows.values
    value = lines.let(f"arith.trunci {value} : {vector(lanes, 'i32')} to {narrow}")
    if rows.panels and rows.values == 4:
        order = [4 * (i // 4) + (0, 2, 1, 3)[i % 4] for i in range(lanes)]
        value = lines.let(f"vector.shuffle {value}, {value} {order} : {narrow}, {narrow}")
    return lines.let(f"vector.bitcast {value} : {narrow} to {vector(count, 'i32')}"), count


def dot(lines: Lines, rows: Int8Rows, sums: str, weights: str, x: str) -> str:
    """`sums` and the products of vectors of words: of `weights` as `unpack` gives them (or, of one value a word, as
    they are), and of a row."""
    if rows.values == 4:
        return lines.dot_bytes(sums, weights, x)
    kind = vector(rows.lanes, "i32")
    if rows.values == 2:
        return lines.let(f"arith.addi {sums}, {lines.dot_words(weights, x, rows.lanes)} : {kind}")
    lanes = largest_divisor(rows.width, rows.lanes)
    product = lines.let(f"arith.muli {weights}, {x} : {vector(lanes, 'i32')}")
    return lines.let(f"arith.addi {sums}, {product} : {vector(lanes, 'i32')}")


def row_scale(lines: Lines, rows: Int8Rows, x: Named, row: str) -> tuple[str, str]:
    """A row's scale (f32), and what is added to its sums (i32)."""
    words = [
        lines.let(f"memref.load %{x.name}[{row}, {lines.index(rows.words + offset)}] : {x.type}")
        for offset in (SCALE, ADDED)
    ]
    return lines.let(f"arith.bitcast {words[0]} : i32 to f32"), words[1]


def scaled(lines: Lines, sums: str, scale: str, added: str, lanes: int) -> str:
    """A vector of a row's int32 sums as float32, times the row's scale; a number where `lanes` is 0."""
    ints, floats = (vector(lanes, kind) if lanes else kind for kind in ("i32", "f32"))
    if lanes:
        added = lines.let(f"vector.broadcast {added} : i32 to {ints}")
        scale = lines.splat(scale, lanes)
    sums = lines.let(f"arith.addi {sums}, {added} : {ints}")
    return lines.let(f"arith.mulf {lines.let(f'arith.sitofp {sums} : {ints} to {floats}')}, {scale} : {floats}")
