"""Attention of a span of many tokens over its paged context as MLIR text.

First keys and values are laid out anew, in blocks of consecutive positions, so that one vector holds many keys (or many
columns of values) and one number of a query (or one weight) is spread over it: products need no sums across lanes.
Then tiles of queries walk the blocks they may see with a running softmax (FlashAttention, Dao et al. 2022). Where the
processor multiplies pairs of bfloat16, a vector's element is a pair: two columns of a key, two keys' values.
"""

from __future__ import annotations

from dataclasses import dataclass

from compiled_kernels.mlir_text import Lines, Target, divisor, memref, number
from compiled_kernels.paged_attention.mlir_text import PAGES

BLOCK = 64  # positions
ROWS = 4  # queries whose sums are in registers at once
TILE = 64  # queries (tokens times heads) that walk the context together


@dataclass(frozen=True)
class SpanAttention:
    """`kind` is the type of queries and cache; how many tokens there are, and how long the context, is not compiled in."""

    heads: int
    groups: int
    dim: int
    size: int
    kind: str
    scale: float
    target: Target
    window: int = 0
    sinks: int = 0
    softcap: float = 0.0
    sink_logits: bool = False

    @property
    def share(self) -> int:
        return self.heads // self.groups

    @property
    def pairs(self) -> bool:
        return self.target.bf16_dots and self.kind == "bf16" and self.dim % 32 == 0

    @property
    def packed(self) -> str:
        """Type of an element of the new layout."""
        return "i32" if self.pairs else "f32"

    @property
    def each(self) -> int:
        """Numbers an element holds."""
        return 2 if self.pairs else 1

    @property
    def lanes(self) -> int:
        return self.target.lanes

    @property
    def columns(self) -> int:
        """Columns of a value that one vector holds."""
        return divisor(self.dim, self.lanes)

    @property
    def tokens(self) -> int:
        """Tokens of a tile."""
        return max(1, TILE // self.share)

    @property
    def slots(self) -> int:
        """Queries of a tile, and room for the last few to be computed twice."""
        return -(-self.tokens * self.share // ROWS) * ROWS

    @property
    def types(self) -> dict[str, str]:
        return {
            "q": memref((PAGES, self.heads, self.dim), self.kind),
            "pages": memref((PAGES, self.groups, self.size, self.dim), self.kind),
            "table": memref((PAGES,), "i32"),
            "sizes": memref((2,), "i64"),
            "keys": memref((PAGES, self.dim // self.each, BLOCK), self.packed),
            "values": memref((PAGES, BLOCK // self.each, self.dim), self.packed),
            "sinks": memref((self.heads,), "f32"),
            "sums": memref((self.slots, self.dim), "f32"),
            "peaks": memref((self.slots,), "f32"),
            "weights": memref((ROWS, BLOCK), "bf16" if self.pairs else "f32"),
        }

    def text(self) -> str:
        """@paged_attention(q, keys, values, table, (tokens, context), packed keys, packed values[, sink logits], out)."""
        return "\n".join((self._pack(), self._rows(), self._finish(), self._entry()))

    def _pack(self) -> str:
        """@pack: the keys and values of one block and one group, zeros beyond the context."""
        t, lines = self.types, Lines()
        run = divisor(self.dim, 32 if self.pairs else self.lanes)
        vector, wide = f"vector<{run}x{self.kind}>", f"vector<{run // self.each}x{self.packed}>"
        for at in range(0, self.dim, run):
            column = lines.index(at)
            loaded = lines.load("%k", f"%page, %group, %offset, {column}", t["pages"], run, self.kind)
            if self.pairs:
                elements = lines.let(f"vector.bitcast {loaded} : {vector} to {wide}")
            else:
                elements = lines.wide(loaded, run, self.kind)
            for i in range(run // self.each):
                element = lines.let(f"vector.extract {elements}[{i}] : {self.packed} from {wide}")
                place = lines.index(at // self.each + i)
                lines.say(f"memref.store {element}, %keys[%at, {place}, %key] : {t['keys']}")
        values = Lines("u")
        step = self.columns
        narrow, out = f"vector<{step}x{self.kind}>", f"vector<{step}x{self.packed}>"
        for at in range(0, self.dim, step):
            column = values.index(at)
            loaded = values.load("%v", f"%page, %group, %offset, {column}", t["pages"], step, self.kind)
            if self.pairs:
                # A pair's two keys come one after the other: the first in the low half of each element.
                bits = values.let(f"arith.extui {values.let(f'vector.bitcast {loaded} : {narrow} to vector<{step}xi16>')} "
                                  f": vector<{step}xi16> to {out}")  # fmt: skip
                spread = values.let(f"vector.broadcast %shift : i32 to {out}")
                bits = values.let(f"arith.shli {bits}, {spread} : {out}")
                before = values.load("%values", f"%at, %half, {column}", t["values"], step, self.packed)
                loaded = values.let(f"arith.ori {before}, {bits} : {out}")
            else:
                loaded = values.wide(loaded, step, self.kind)
            values.say(f"vector.store {loaded}, %values[%at, %half, {column}] : {t['values']}, {out}")
        zero = "arith.constant 0 : i32" if self.pairs else "arith.constant 0.0 : f32"
        return f"""func.func private @pack(%k: {t["pages"]}, %v: {t["pages"]}, %table: {t["table"]}, %keys: {t["keys"]},
    %values: {t["values"]}, %group: index, %block: index, %blocks: index, %context: index) {{
%zero = arith.constant 0 : index
%one = arith.constant 1 : index
%size = arith.constant {self.size} : index
%length = arith.constant {BLOCK} : index
%each = arith.constant {self.each} : index
%halves = arith.constant {BLOCK // self.each} : index
%elements = arith.constant {self.dim // self.each} : index
%dim = arith.constant {self.dim} : index
%sixteen = arith.constant 16 : index
%nothing = {zero}
%mine = arith.muli %group, %blocks : index
%at = arith.addi %mine, %block : index
%start = arith.muli %block, %length : index
scf.for %half = %zero to %halves step %one {{
  scf.for %d = %zero to %dim step %one {{
    memref.store %nothing, %values[%at, %half, %d] : {t["values"]}
  }}
}}
scf.for %key = %zero to %length step %one {{
  %position = arith.addi %start, %key : index
  %known = arith.cmpi ult, %position, %context : index
  scf.if %known {{
    %place = arith.divui %position, %size : index
    %offset = arith.remui %position, %size : index
    %number = memref.load %table[%place] : {t["table"]}
    %page = arith.index_cast %number : i32 to index
    %half = arith.divui %key, %each : index
    %side = arith.remui %key, %each : index
    %bits = arith.muli %side, %sixteen : index
    %shift = arith.index_cast %bits : index to i32
    {lines.text()}
    {values.text()}
  }} else {{
    scf.for %d = %zero to %elements step %one {{
      memref.store %nothing, %keys[%at, %d, %key] : {t["keys"]}
    }}
  }}
}}
return
}}"""

    def _rows(self) -> str:
        """@rows: ROWS queries of a tile over one block: scores, weights, sums."""
        t, lines = self.types, Lines()
        places = [lines.index(i) for i in range(ROWS)]
        slots = [lines.let(f"arith.addi %slot, {place} : index") for place in places]
        last = lines.let("arith.subi %queries, %one : index")
        share, first_head = lines.index(self.share), lines.let(f"arith.muli %group, {lines.index(self.share)} : index")
        tokens, heads, positions = [], [], []
        for slot in slots:
            row = lines.let(f"arith.minui {slot}, {last} : index")
            token = lines.let(f"arith.addi %token, {lines.let(f'arith.divui {row}, {share} : index')} : index")
            tokens.append(token)
            heads.append(
                lines.let(f"arith.addi {first_head}, {lines.let(f'arith.remui {row}, {share} : index')} : index")
            )
            positions.append(lines.let(f"arith.addi %before, {token} : index"))
        scores = self._scores(lines, tokens, heads)
        for i, position in enumerate(positions):
            self._weights(lines, i, places[i], slots[i], position, scores[i])
        self._mix(lines, places, slots)
        return f"""func.func private @rows(%q: {t["q"]}, %keys: {t["keys"]}, %values: {t["values"]}, %at: index, %start: index,
    %group: index, %token: index, %slot: index, %queries: index, %before: index, %sums: {t["sums"]}, %peaks: {t["peaks"]},
    %totals: {t["peaks"]}, %weights: {t["weights"]}) {{
%zero = arith.constant 0 : index
%one = arith.constant 1 : index
{lines.text()}
return
}}"""

    def _scores(self, lines: Lines, tokens: list[str], heads: list[str]) -> list[list[str]]:
        """For each query a vector of scores for each run of keys in the block."""
        t, lanes = self.types, self.lanes
        runs = [lines.index(at) for at in range(0, BLOCK, lanes)]
        kind = f"vector<{lanes}xf32>"
        zero = lines.let(f"arith.constant dense<0.0> : {kind}")
        count = ROWS * len(runs)
        names = [f"%s{i}" for i in range(count)]
        ends = lines.index(self.dim // self.each)
        kinds = ", ".join([kind] * count)
        initial = ", ".join(f"{name} = {zero}" for name in names)
        lines.say(f"%found:{count} = scf.for %d = %zero to {ends} step %one iter_args({initial}) -> ({kinds}) {{")
        key = [lines.load("%keys", f"%at, %d, {run}", t["keys"], lanes, self.packed) for run in runs]
        if self.pairs:
            key = [lines.let(f"vector.bitcast {k} : vector<{lanes}xi32> to vector<32xbf16>") for k in key]
        column = lines.let(f"arith.muli %d, {lines.index(self.each)} : index")
        new = []
        for i, (token, head) in enumerate(zip(tokens, heads, strict=True)):
            if self.pairs:
                loaded = lines.load("%q", f"{token}, {head}, {column}", t["q"], 2, "bf16")
                query = self._spread(lines, loaded)
                new += [lines.dot_pairs(names[i * len(runs) + j], k, query) for j, k in enumerate(key)]
            else:
                loaded = lines.let(f"memref.load %q[{token}, {head}, {column}] : {t['q']}")
                single = loaded if self.kind == "f32" else lines.let(f"arith.extf {loaded} : {self.kind} to f32")
                query = lines.splat(single, lanes)
                new += [lines.fma(k, query, names[i * len(runs) + j], lanes) for j, k in enumerate(key)]
        lines.say(f"scf.yield {', '.join(new)} : {kinds}")
        lines.say("}")
        return [[f"%found#{i * len(runs) + j}" for j in range(len(runs))] for i in range(ROWS)]

    def _spread(self, lines: Lines, pair: str) -> str:
        """A pair of bfloat16 in every element of a vector."""
        bits = lines.let(f"vector.bitcast {pair} : vector<2xbf16> to vector<1xi32>")
        single = lines.let(f"vector.extract {bits}[0] : i32 from vector<1xi32>")
        spread = lines.let(f"vector.broadcast {single} : i32 to vector<16xi32>")
        return lines.let(f"vector.bitcast {spread} : vector<16xi32> to vector<32xbf16>")

    def _weights(self, lines: Lines, i: int, place: str, slot: str, position: str, scores: list[str]) -> None:
        """One query's scores become weights; its peak, total and sums move on."""
        t, lanes = self.types, self.lanes
        kind, whole, bits = f"vector<{lanes}xf32>", f"vector<{lanes}xindex>", f"vector<{lanes}xi1>"
        scale = lines.let(f"arith.constant dense<{number(self.scale)}> : {kind}")
        none, zero = (lines.let(f"arith.constant dense<{v}> : {kind}") for v in ("0xFF800000", "0.0"))
        steps = lines.let(f"vector.step : {whole}")
        here = lines.let(f"vector.broadcast {position} : index to {whole}")
        seen, hidden = [], []
        for j, score in enumerate(scores):
            base = lines.let(f"arith.addi %start, {lines.index(j * lanes)} : index")
            key = lines.let(f"arith.addi {lines.let(f'vector.broadcast {base} : index to {whole}')}, {steps} : {whole}")
            visible = lines.let(f"arith.cmpi ule, {key}, {here} : {whole}")
            if self.window:
                reach = lines.let(f"arith.addi {key}, {self._all(lines, self.window)} : {whole}")
                near = lines.let(f"arith.cmpi ugt, {reach}, {here} : {whole}")
                if self.sinks:
                    sink = lines.let(f"arith.cmpi ult, {key}, {self._all(lines, self.sinks)} : {whole}")
                    near = lines.let(f"arith.ori {near}, {sink} : {bits}")
                visible = lines.let(f"arith.andi {visible}, {near} : {bits}")
            score = lines.let(f"arith.mulf {score}, {scale} : {kind}")
            if self.softcap:
                score = self._capped(lines, score)
            hidden.append(visible)
            seen.append(lines.let(f"arith.select {visible}, {score}, {none} : {bits}, {kind}"))
        highest = seen[0]
        for score in seen[1:]:
            highest = lines.let(f"arith.maximumf {highest}, {score} : {kind}")
        highest = lines.let(f"vector.reduction <maximumf>, {highest} : {kind} into f32")
        before = lines.let(f"memref.load %peaks[{slot}] : {t['peaks']}")
        peak = lines.let(f"arith.maximumf {before}, {highest} : f32")
        lines.say(f"memref.store {peak}, %peaks[{slot}] : {t['peaks']}")
        peaks, total = lines.splat(peak, lanes), zero
        weights = []
        for score, visible in zip(seen, hidden, strict=True):
            weight = lines.let(f"arith.subf {score}, {peaks} : {kind}")
            weight = lines.let(f"func.call @exp({weight}) : ({kind}) -> {kind}")
            weight = lines.let(f"arith.select {visible}, {weight}, {zero} : {bits}, {kind}")
            total = lines.let(f"arith.addf {total}, {weight} : {kind}")
            weights.append(weight)
        element = "bf16" if self.pairs else "f32"
        for j, weight in enumerate(weights):
            rounded = lines.narrow(weight, lanes, element)
            at = lines.index(j * lanes)
            lines.say(f"vector.store {rounded}, %weights[{place}, {at}] : {t['weights']}, vector<{lanes}x{element}>")
        fallen = lines.let(f"arith.subf {lines.splat(before, lanes)}, {peaks} : {kind}")
        factors = lines.let(f"func.call @exp({fallen}) : ({kind}) -> {kind}")
        factor = lines.let(f"vector.extract {factors}[0] : f32 from {kind}")
        kept = lines.let(f"memref.load %totals[{slot}] : {t['peaks']}")
        kept = lines.let(f"arith.mulf {kept}, {factor} : f32")
        kept = lines.let(f"arith.addf {kept}, {lines.total(total, lanes)} : f32")
        lines.say(f"memref.store {kept}, %totals[{slot}] : {t['peaks']}")
        for at in range(0, self.dim, self.columns):
            column, run = lines.index(at), f"vector<{self.columns}xf32>"
            sums = lines.load("%sums", f"{slot}, {column}", t["sums"], self.columns, "f32")
            sums = lines.let(f"arith.mulf {sums}, {lines.splat(factor, self.columns)} : {run}")
            lines.say(f"vector.store {sums}, %sums[{slot}, {column}] : {t['sums']}, {run}")

    def _all(self, lines: Lines, value: int) -> str:
        return lines.let(f"arith.constant dense<{value}> : vector<{self.lanes}xindex>")

    def _capped(self, lines: Lines, score: str) -> str:
        """c tanh(score / c), with tanh x = 1 - 2 / (exp(2x) + 1)."""
        kind = f"vector<{self.lanes}xf32>"
        double, one, two, cap = (
            lines.let(f"arith.constant dense<{number(v)}> : {kind}") for v in (2 / self.softcap, 1.0, 2.0, self.softcap)
        )
        power = lines.let(f"func.call @exp({lines.let(f'arith.mulf {score}, {double} : {kind}')}) : ({kind}) -> {kind}")
        part = lines.let(f"arith.divf {two}, {lines.let(f'arith.addf {power}, {one} : {kind}')} : {kind}")
        return lines.let(f"arith.mulf {cap}, {lines.let(f'arith.subf {one}, {part} : {kind}')} : {kind}")

    def _mix(self, lines: Lines, places: list[str], slots: list[str]) -> None:
        """sums += weights · values."""
        t, lanes = self.types, self.columns
        columns = list(range(0, self.dim, lanes))
        most = max(1, 16 // ROWS)
        for first in range(0, len(columns), most):
            run = [lines.index(at) for at in columns[first : first + most]]
            kind, count = f"vector<{lanes}xf32>", ROWS * len(run)
            sums = [
                lines.load("%sums", f"{slot}, {column}", t["sums"], lanes, "f32") for slot in slots for column in run
            ]
            names = [f"%m{first}_{i}" for i in range(count)]
            kinds, ends = ", ".join([kind] * count), lines.index(BLOCK // self.each)
            initial = ", ".join(f"{name} = {start}" for name, start in zip(names, sums, strict=True))
            lines.say(
                f"%mixed{first}:{count} = scf.for %d = %zero to {ends} step %one iter_args({initial}) -> ({kinds}) {{"
            )
            value = [lines.load("%values", f"%at, %d, {column}", t["values"], lanes, self.packed) for column in run]
            if self.pairs:
                value = [
                    lines.let(f"vector.bitcast {v} : vector<{lanes}xi32> to vector<{2 * lanes}xbf16>") for v in value
                ]
            key = lines.let(f"arith.muli %d, {lines.index(self.each)} : index")
            new = []
            for i, place in enumerate(places):
                if self.pairs:
                    weight = self._spread(lines, lines.load("%weights", f"{place}, {key}", t["weights"], 2, "bf16"))
                    new += [lines.dot_pairs(names[i * len(run) + j], v, weight) for j, v in enumerate(value)]
                else:
                    weight = lines.splat(lines.let(f"memref.load %weights[{place}, {key}] : {t['weights']}"), lanes)
                    new += [lines.fma(v, weight, names[i * len(run) + j], lanes) for j, v in enumerate(value)]
            lines.say(f"scf.yield {', '.join(new)} : {kinds}")
            lines.say("}")
            for i, slot in enumerate(slots):
                for j, column in enumerate(run):
                    result = f"%mixed{first}#{i * len(run) + j}"
                    lines.say(f"vector.store {result}, %sums[{slot}, {column}] : {t['sums']}, {kind}")

    def _finish(self) -> str:
        """@finish: a tile's sums over their totals, put where they belong."""
        t, lanes, lines = self.types, self.columns, Lines()
        run = f"vector<{self.lanes}xf32>"
        total = lines.let(f"memref.load %totals[%slot] : {t['peaks']}")
        if self.sink_logits:
            sink = lines.let(f"memref.load %sinks[%head] : {t['sinks']}")
            peak = lines.let(f"memref.load %peaks[%slot] : {t['peaks']}")
            highest = lines.let(f"arith.maximumf {sink}, {peak} : f32")
            powers = []
            for each in (peak, sink):
                away = lines.splat(lines.let(f"arith.subf {each}, {highest} : f32"), self.lanes)
                power = lines.let(f"func.call @exp({away}) : ({run}) -> {run}")
                powers.append(lines.let(f"vector.extract {power}[0] : f32 from {run}"))
            total = lines.let(f"arith.mulf {total}, {powers[0]} : f32")
            total = lines.let(f"arith.addf {total}, {powers[1]} : f32")
            share = lines.let(f"arith.divf {powers[0]}, {total} : f32")
        else:
            share = lines.let(f"arith.divf {lines.let('arith.constant 1.0 : f32')}, {total} : f32")
        for at in range(0, self.dim, lanes):
            column, kind = lines.index(at), f"vector<{lanes}xf32>"
            sums = lines.load("%sums", f"%slot, {column}", t["sums"], lanes, "f32")
            sums = lines.let(f"arith.mulf {sums}, {lines.splat(share, lanes)} : {kind}")
            rounded = lines.narrow(sums, lanes, self.kind)
            lines.say(f"vector.store {rounded}, %out[%row, %head, {column}] : {t['q']}, vector<{lanes}x{self.kind}>")
        sinks = f"%sinks: {t['sinks']}, " if self.sink_logits else ""
        return f"""func.func private @finish({sinks}%sums: {t["sums"]}, %peaks: {t["peaks"]}, %totals: {t["peaks"]}, %out: {t["q"]},
    %group: index, %token: index, %queries: index) {{
%zero = arith.constant 0 : index
%one = arith.constant 1 : index
%share = arith.constant {self.share} : index
%first = arith.muli %group, %share : index
scf.for %slot = %zero to %queries step %one {{
  %behind = arith.divui %slot, %share : index
  %row = arith.addi %token, %behind : index
  %which = arith.remui %slot, %share : index
  %head = arith.addi %first, %which : index
  {lines.text()}
}}
return
}}"""

    def _entry(self) -> str:
        t = self.types
        sinks, sunk, sunk_type = (
            (f"%sinks: {t['sinks']}, ", "%sinks, ", f"{t['sinks']}, ") if self.sink_logits else ("", "", "")
        )
        window = f"""
    %earliest = arith.addi %before, %token : index
    %reach = arith.constant {self.window} : index
    %up_to = arith.addi %earliest, %one : index
    %long = arith.cmpi ugt, %up_to, %reach : index
    %past = arith.subi %up_to, %reach : index
    %nearest = arith.select %long, %past, %zero : index
    %ends = arith.addi %start, %length : index
    %near = arith.cmpi ugt, %ends, %nearest : index
    %sink_end = arith.constant {self.sinks} : index
    %sink = arith.cmpi ult, %start, %sink_end : index
    %needed = arith.ori %near, %sink : i1""" if self.window else "\n    %needed = arith.constant true"  # fmt: skip
        return f"""func.func @paged_attention(%q: {t["q"]}, %k: {t["pages"]}, %v: {t["pages"]}, %table: {t["table"]}, %sizes: {t["sizes"]},
    %keys: {t["keys"]}, %values: {t["values"]}, {sinks}%out: {t["q"]}) {{
%thread, %threads = call @thread() : () -> (index, index)
%zero = arith.constant 0 : index
%one = arith.constant 1 : index
%length = arith.constant {BLOCK} : index
%groups = arith.constant {self.groups} : index
%share = arith.constant {self.share} : index
%tile = arith.constant {self.tokens} : index
%step = arith.constant {ROWS} : index
%dim = arith.constant {self.dim} : index
%slots = arith.constant {self.slots} : index
%none = arith.constant 0xFF800000 : f32
%nothing = arith.constant 0.0 : f32
%tokens64 = memref.load %sizes[%zero] : {t["sizes"]}
%context64 = memref.load %sizes[%one] : {t["sizes"]}
%tokens = arith.index_cast %tokens64 : i64 to index
%context = arith.index_cast %context64 : i64 to index
%before = arith.subi %context, %tokens : index
%blocks = arith.ceildivui %context, %length : index
%packs = arith.muli %blocks, %groups : index
scf.for %item = %thread to %packs step %threads {{
  %group = arith.divui %item, %blocks : index
  %block = arith.remui %item, %blocks : index
  func.call @pack(%k, %v, %table, %keys, %values, %group, %block, %blocks, %context)
    : ({t["pages"]}, {t["pages"]}, {t["table"]}, {t["keys"]}, {t["values"]}, index, index, index, index) -> ()
}}
call @GOMP_barrier() : () -> ()
%sums = memref.alloca() {{alignment = 64 : i64}} : {t["sums"]}
%peaks = memref.alloca() {{alignment = 64 : i64}} : {t["peaks"]}
%totals = memref.alloca() {{alignment = 64 : i64}} : {t["peaks"]}
%weights = memref.alloca() {{alignment = 64 : i64}} : {t["weights"]}
%tiles = arith.ceildivui %tokens, %tile : index
%items = arith.muli %tiles, %groups : index
scf.for %item = %thread to %items step %threads {{
  %number = arith.divui %item, %groups : index
  %group = arith.remui %item, %groups : index
  %token = arith.muli %number, %tile : index
  %left = arith.subi %tokens, %token : index
  %mine = arith.minui %left, %tile : index
  %queries = arith.muli %mine, %share : index
  scf.for %slot = %zero to %slots step %one {{
    memref.store %none, %peaks[%slot] : {t["peaks"]}
    memref.store %nothing, %totals[%slot] : {t["peaks"]}
    scf.for %d = %zero to %dim step %one {{
      memref.store %nothing, %sums[%slot, %d] : {t["sums"]}
    }}
  }}
  %end = arith.addi %token, %mine : index
  %seen = arith.addi %before, %end : index
  %last = arith.ceildivui %seen, %length : index
  scf.for %block = %zero to %last step %one {{
    %start = arith.muli %block, %length : index
    %from = arith.muli %group, %blocks : index
    %at = arith.addi %from, %block : index{window}
    scf.if %needed {{
      scf.for %slot = %zero to %queries step %step {{
        func.call @rows(%q, %keys, %values, %at, %start, %group, %token, %slot, %queries, %before, %sums, %peaks, %totals, %weights)
          : ({t["q"]}, {t["keys"]}, {t["values"]}, index, index, index, index, index, index, index, {t["sums"]}, {t["peaks"]}, {t["peaks"]}, {t["weights"]}) -> ()
      }}
    }}
  }}
  func.call @finish({sunk}%sums, %peaks, %totals, %out, %group, %token, %queries)
    : ({sunk_type}{t["sums"]}, {t["peaks"]}, {t["peaks"]}, {t["q"]}, index, index, index) -> ()
}}
return
}}"""
