"""Products of a few rows with a weight matrix as MLIR text: each weight is read once, for all rows, at memory's pace.

The weight's rows are walked in blocks; a block's sums stay in registers, one vector for each pair of weight row and
token. Dense bfloat16 and INT8 and INT4 weights meet bfloat16 tokens in dot products of pairs where the processor has
them (the values of INT8 and INT4 are exact in bfloat16), and in float32 otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from compiled_kernels.mlir_text import Lines, Target, divisor, memref

SUMS = 16  # vectors kept in registers, of the 32 there are
NEAR = 8192  # bytes: with blocks of weights up to this size the next block is fetched while one is read
MOST_ROWS = 4  # tokens whose sums are kept at once; more are more passes over weights that lie in the nearest cache


@dataclass(frozen=True)
class Product:
    """x [rows, width] of type `x` times a weight [out, width] stored as `kind`: f32, bf16, i8 (one scale a row) or
    i4 (a scale for each `group` columns). `adds`: into what `out` holds, in place of overwriting it. `stretches`: `out`
    is that many equal runs of columns, each of which is walked for itself."""

    name: str
    rows: int
    width: int
    out: int
    kind: str
    x: str
    target: Target
    group: int = 0
    bias: bool = False
    adds: bool = False
    stretches: int = 1

    @property
    def pairs(self) -> bool:
        """Whether sums are dot products of bfloat16 pairs."""
        fits = self.group % 32 == 0 if self.kind == "i4" else self.width % 32 == 0
        return self.target.bf16_dots and self.x == "bf16" and self.kind != "f32" and fits

    @property
    def lanes(self) -> int:
        """Numbers of a weight's row read at once."""
        if self.kind == "i4":
            return divisor(self.group // 2, 32)
        return 32 if self.pairs else divisor(self.width, self.target.lanes)

    @property
    def block(self) -> int:
        """Weight rows whose sums are kept at once."""
        return divisor(self.out // self.stretches, max(1, min(4, SUMS // min(self.rows, MOST_ROWS))))

    @property
    def weight_types(self) -> tuple[str, ...]:
        """Memref types of the weight, its scales and its bias, as far as there are such."""
        stored = {
            "i8": (memref((self.out, self.width), "i8"), memref((self.out,), "f32")),
            "i4": (
                memref((self.out, self.width // 2), "i8"),
                memref((self.out, self.width // max(1, self.group)), "f16"),
            ),
        }.get(self.kind, (memref((self.out, self.width), self.kind),))
        return stored + ((memref((self.out,), self.x),) if self.bias else ())

    def text(self) -> str:
        """func @name(x, weight..., out [rows, out] f32, begin, end): the output columns from begin to end, both
        multiples of `block`."""
        weights = [f"%w{i}: {kind}" for i, kind in enumerate(self.weight_types)]
        x, out = memref((self.rows, self.width), self.x), memref((self.rows, self.out), "f32")
        lines = Lines()
        step = lines.index(self.block)
        lines.say(f"scf.for %o = %begin to %end step {step} {{")
        for first in range(0, self.rows, MOST_ROWS):
            self._block(lines, range(first, min(first + MOST_ROWS, self.rows)))
        lines.say("}")
        return (
            f"func.func private @{self.name}(%x: {x}, {', '.join(weights)}, %out: {out}, %begin: index, %end: index) "
            f"attributes {{no_inline}} {{\n{lines.text()}\nreturn\n}}"
        )

    def _block(self, lines: Lines, tokens: range) -> None:
        """The sums of one block of weight rows with `tokens`."""
        lanes = 16 if self.pairs else self.lanes
        kind = f"vector<{lanes}xf32>"
        zero = lines.let(f"arith.constant dense<0.0> : {kind}")
        rows = [lines.let(f"arith.addi %o, {lines.index(i)} : index") for i in range(self.block)]
        places = [lines.index(token) for token in tokens]
        count = len(rows) * len(places)
        start, end = lines.index(0), lines.index(self.width)
        step = lines.index(self.group if self.kind == "i4" else self.lanes)
        names = [f"%s{i}_{tokens.start}" for i in range(count)]
        heads = ", ".join(f"{name} = {zero}" for name in names)
        result = f"%sums{tokens.start}"
        kinds = ", ".join([kind] * count)
        lines.say(f"{result}:{count} = scf.for %k = {start} to {end} step {step} iter_args({heads}) -> ({kinds}) {{")
        sums = self._group(lines, rows, places, names) if self.kind == "i4" else self._run(lines, rows, places, names)
        lines.say(f"scf.yield {', '.join(sums)} : {kinds}")
        lines.say("}")
        parts = [f"{result}#{i}" for i in range(count)]
        self._store(lines, rows, places, self._totals(lines, parts, lanes))

    def _run(self, lines: Lines, rows: list[str], places: list[str], sums: list[str]) -> list[str]:
        """One run of columns: bfloat16 pairs, or float32."""
        weights = [self._weight(lines, row) for row in rows]
        x = [self._x(lines, place, "%k") for place in places]
        return [
            self._multiply(lines, sums[i * len(x) + j], weight, token)
            for i, weight in enumerate(weights)
            for j, token in enumerate(x)
        ]

    def _multiply(self, lines: Lines, total: str, weight: str, token: str) -> str:
        return lines.dot_pairs(total, weight, token) if self.pairs else lines.fma(weight, token, total, self.lanes)

    def _x(self, lines: Lines, place: str, column: str) -> str:
        loaded = lines.load("%x", f"{place}, {column}", memref((self.rows, self.width), self.x), self.lanes, self.x)
        return loaded if self.pairs else lines.wide(loaded, self.lanes, self.x)

    @property
    def ahead(self) -> int:
        """Rows from one that is read to one that is fetched meanwhile; 0 where rows are long enough for the processor
        to see by itself where they go on."""
        row_bytes = {"f32": 4.0, "bf16": 2.0, "i8": 1.0, "i4": 0.5}[self.kind] * self.width
        return self.block if self.block * row_bytes <= NEAR else 0

    def _fetch(self, lines: Lines, row: str, column: str) -> None:
        """Ask for what the next block of rows reads there: the end of a short row is no end to the memory."""
        if self.ahead:
            later = lines.let(f"arith.addi {row}, {lines.index(self.ahead)} : index")
            lines.say(f"memref.prefetch %w0[{later}, {column}], read, locality<3>, data : {self.weight_types[0]}")

    def _weight(self, lines: Lines, row: str) -> str:
        self._fetch(lines, row, "%k")
        loaded = lines.load("%w0", f"{row}, %k", self.weight_types[0], self.lanes, self.kind)
        if not self.pairs:
            return lines.wide(loaded, self.lanes, self.kind)
        if self.kind == "bf16":
            return loaded
        return lines.narrow(lines.wide(loaded, 32, "i8"), 32, "bf16")

    def _group(self, lines: Lines, rows: list[str], places: list[str], sums: list[str]) -> list[str]:
        """One INT4 group of each row: its products are summed apart, then scaled."""
        lanes, half = self.lanes, self.group // 2
        held = 16 if self.pairs else lanes
        byte_at = lines.let(f"arith.divui %k, {lines.index(2)} : index")
        group_at = lines.let(f"arith.divui %k, {lines.index(self.group)} : index")
        joined = self.pairs and half == 16  # a group of 32: both halves in one vector of pairs
        runs = range(0, half, lanes)
        x: list[list[str]] = []
        for place in places:
            if joined:
                x.append([lines.load("%x", f"{place}, %k", memref((self.rows, self.width), self.x), 32, self.x)])
                continue
            columns = [at + side * half for at in runs for side in (0, 1)]
            where = [lines.let(f"arith.addi %k, {lines.index(column)} : index") for column in columns]
            x.append([self._x(lines, place, column) for column in where])
        new = []
        for i, row in enumerate(rows):
            weights: list[str] = []
            for at in runs:
                byte = lines.let(f"arith.addi {byte_at}, {lines.index(at)} : index")
                if at == 0:
                    self._fetch(lines, row, byte)
                weights += self._halves(
                    lines, lines.load("%w0", f"{row}, {byte}", self.weight_types[0], lanes, "i8"), joined
                )
            stored = lines.let(f"memref.load %w1[{row}, {group_at}] : {self.weight_types[1]}")
            scale = lines.splat(lines.let(f"arith.extf {stored} : f16 to f32"), held)
            for j, token in enumerate(x):
                part = lines.let(f"arith.constant dense<0.0> : vector<{held}xf32>")
                for weight, columns in zip(weights, token, strict=True):
                    part = self._multiply(lines, part, weight, columns)
                new.append(lines.fma(part, scale, sums[i * len(x) + j], held))
        return new

    def _halves(self, lines: Lines, packed: str, joined: bool) -> list[str]:
        """Bytes as the values of their low and their high halves."""
        lanes = self.lanes
        kind = f"vector<{lanes}xi8>"
        low = lines.let(f"arith.andi {packed}, {lines.let(f'arith.constant dense<15> : {kind}')} : {kind}")
        high = lines.let(f"arith.shrui {packed}, {lines.let(f'arith.constant dense<4> : {kind}')} : {kind}")
        if not self.pairs:
            eight = lines.let(f"arith.constant dense<8> : {kind}")
            return [lines.wide(lines.let(f"arith.subi {part}, {eight} : {kind}"), lanes, "i8") for part in (low, high)]
        if joined:
            both = lines.let(f"vector.shuffle {low}, {high} {list(range(32))} : {kind}, {kind}")
            return [self._looked_up(lines, both)]
        return [self._looked_up(lines, low), self._looked_up(lines, high)]

    def _looked_up(self, lines: Lines, codes: str) -> str:
        """32 codes 0..15 as bfloat16 values -8..7, by a table in a register (AVX512BW: VPERMW)."""
        table = torch.arange(-8, 8, dtype=torch.bfloat16).view(torch.int16).tolist() * 2
        words = lines.let(f"arith.extui {codes} : vector<32xi8> to vector<32xi16>")
        values = lines.let(f"arith.constant dense<{table}> : vector<32xi16>")
        found = lines.let(
            f'llvm.call_intrinsic "llvm.x86.avx512.permvar.hi.512"({values}, {words}) : '
            "(vector<32xi16>, vector<32xi16>) -> vector<32xi16>"
        )
        return lines.let(f"vector.bitcast {found} : vector<32xi16> to vector<32xbf16>")

    def _totals(self, lines: Lines, vectors: list[str], lanes: int) -> list[str]:
        if len(vectors) != lanes or lanes == 1:
            return [lines.total(vector, lanes) for vector in vectors]
        kind = f"vector<{lanes}xf32>"
        folded = lines.totals(vectors, lanes)
        return [lines.let(f"vector.extract {folded}[{i}] : f32 from {kind}") for i in range(lanes)]

    def _store(self, lines: Lines, rows: list[str], places: list[str], totals: list[str]) -> None:
        out = memref((self.rows, self.out), "f32")
        for i, row in enumerate(rows):
            scale = lines.let(f"memref.load %w1[{row}] : {self.weight_types[1]}") if self.kind == "i8" else None
            bias = self._bias(lines, row) if self.bias else None
            for j, place in enumerate(places):
                value = totals[i * len(places) + j]
                if scale:
                    value = lines.let(f"arith.mulf {value}, {scale} : f32")
                if bias:
                    value = lines.let(f"arith.addf {value}, {bias} : f32")
                if self.adds:
                    before = lines.let(f"memref.load %out[{place}, {row}] : {out}")
                    value = lines.let(f"arith.addf {before}, {value} : f32")
                lines.say(f"memref.store {value}, %out[{place}, {row}] : {out}")

    def _bias(self, lines: Lines, row: str) -> str:
        place = len(self.weight_types) - 1
        stored = lines.let(f"memref.load %w{place}[{row}] : {self.weight_types[place]}")
        return stored if self.x == "f32" else lines.let(f"arith.extf {stored} : {self.x} to f32")
