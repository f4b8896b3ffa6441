"""Attention of single queries over paged keys and values as MLIR text, with a running softmax page by page.

Work is cut into items: one sequence, one group, one chunk of its pages. All query heads of a group read each key and
value while it lies in the nearest cache. What an item finds, unscaled sums with their peak and their total, goes to
`partial`; `merge` puts the chunks of a head together (FlashDecoding, Dao et al. 2023).
"""

from __future__ import annotations

from dataclasses import dataclass

from compiled_kernels.mlir_text import Lines, Target, divisor, memref, number

HEADS = 4  # query heads whose sums are kept in registers at once
PAGES = 1 << 24  # a bound for the type only: kernels do not depend on the size of the pool


@dataclass(frozen=True)
class Attention:
    """`rows` queries, each at the last position of its own context; `kind` is the type of queries and cache."""

    rows: int
    heads: int
    groups: int
    dim: int
    size: int
    held: int
    kind: str
    scale: float
    target: Target
    chunks: int = 1
    window: int = 0
    sinks: int = 0
    softcap: float = 0.0
    sink_logits: bool = False

    @property
    def share(self) -> int:
        return self.heads // self.groups

    @property
    def lanes(self) -> int:
        return divisor(self.dim, self.target.lanes)

    @property
    def pairs(self) -> bool:
        return self.target.bf16_dots and self.kind == "bf16" and self.dim % 32 == 0

    @property
    def run(self) -> int:
        """Scores are handled in runs of one vector."""
        return self.target.lanes

    @property
    def scored(self) -> int:
        return -(-self.size // self.run) * self.run

    @property
    def types(self) -> dict[str, str]:
        return {
            "pages": memref((PAGES, self.groups, self.size, self.dim), self.kind),
            "table": memref((self.rows, self.held), "i32"),
            "lengths": memref((self.rows,), "i32"),
            "queries": memref((self.share, self.dim), self.kind),
            "scores": memref((HEADS, self.scored), "f32"),
            "weights": memref((HEADS, self.scored), "bf16"),
            "partial": memref((self.rows, self.heads, self.chunks, self.dim + 2), "f32"),
            "mixed": memref((self.rows, self.heads * self.dim), self.kind),
            "sinks": memref((self.heads,), "f32"),
        }

    def text(self, name: str) -> str:
        """@{name}_item(queries, keys, values, table, lengths, partial, row, group, chunk) and
        @{name}_merge(partial[, sink logits], mixed)."""
        return "\n".join((self._tile(name), self._item(name), self._merge(name)))

    def _tile(self, name: str) -> str:
        """Offsets [from, to) of one page, for all query heads of the group."""
        t, lines = self.types, Lines()
        for first in range(0, self.share, HEADS):
            self._heads(lines, range(first, min(first + HEADS, self.share)))
        return f"""func.func private @{name}_tile(%q: {t["queries"]}, %k: {t["pages"]}, %v: {t["pages"]}, %page: index,
    %group: index, %from: index, %to: index, %partial: {t["partial"]}, %row: index, %chunk: index,
    %scores: {t["scores"]}, %weights: {t["weights"]}) {{
%one = arith.constant 1 : index
{lines.text()}
return
}}"""

    def _heads(self, lines: Lines, heads: range) -> None:
        rows = [lines.index(i) for i in range(len(heads))]
        share = lines.let(f"arith.muli %group, {lines.index(self.share)} : index")
        owners = [lines.let(f"arith.addi {share}, {lines.index(head)} : index") for head in heads]
        self._score(lines, heads, rows)
        scales = [self._soften(lines, row, owner) for row, owner in zip(rows, owners, strict=True)]
        self._mix(lines, rows, owners, scales)

    def _score(self, lines: Lines, heads: range, rows: list[str]) -> None:
        """scores[head, offset] = q · k."""
        if self.pairs and self.size % 16 == 0:
            self._score_runs(lines, heads, rows)
            return
        lanes, held = (32, 16) if self.pairs else (self.lanes, self.lanes)
        columns = [lines.index(at) for at in range(0, self.dim, lanes)]

        def vector(memory: str, at: str, kind: str) -> str:
            loaded = lines.load(memory, at, kind, lanes, self.kind)
            return loaded if self.pairs else lines.wide(loaded, lanes, self.kind)

        queries = [
            [vector("%q", f"{lines.index(head)}, {column}", self.types["queries"]) for column in columns]
            for head in heads
        ]
        zero = lines.let(f"arith.constant dense<0.0> : vector<{held}xf32>")
        lines.say("scf.for %o = %from to %to step %one {")
        key = [vector("%k", f"%page, %group, %o, {column}", self.types["pages"]) for column in columns]
        for row, query in zip(rows, queries, strict=True):
            total = zero
            for a, b in zip(query, key, strict=True):
                total = lines.dot_pairs(total, a, b) if self.pairs else lines.fma(a, b, total, lanes)
            lines.say(f"memref.store {lines.total(total, held)}, %scores[{row}, %o] : {self.types['scores']}")
        lines.say("}")

    def _score_runs(self, lines: Lines, heads: range, rows: list[str]) -> None:
        """As `_score`, 16 keys at a time, whose sums across lanes are taken together. A run may reach beyond the
        offsets in use; what stands there is scored and then ignored."""
        columns = [lines.index(at) for at in range(0, self.dim, 32)]
        queries = [
            [
                lines.load("%q", f"{lines.index(head)}, {column}", self.types["queries"], 32, "bf16")
                for column in columns
            ]
            for head in heads
        ]
        zero = lines.let("arith.constant dense<0.0> : vector<16xf32>")
        run = lines.index(16)
        start = lines.let(f"arith.muli {lines.let(f'arith.divui %from, {run} : index')}, {run} : index")
        lines.say(f"scf.for %o = {start} to %to step {run} {{")
        keys = [lines.let(f"arith.addi %o, {lines.index(i)} : index") for i in range(16)]
        for row, query in zip(rows, queries, strict=True):
            sums = []
            for key in keys:
                total = zero
                for column, part in zip(columns, query, strict=True):
                    loaded = lines.load("%k", f"%page, %group, {key}, {column}", self.types["pages"], 32, "bf16")
                    total = lines.dot_pairs(total, part, loaded)
                sums.append(total)
            folded = lines.totals(sums, 16)
            lines.say(f"vector.store {folded}, %scores[{row}, %o] : {self.types['scores']}, vector<16xf32>")
        lines.say("}")

    def _soften(self, lines: Lines, row: str, owner: str) -> str:
        """Scores of a head become weights; peak and total of its partial move on. The factor for earlier sums."""
        kind, partial = f"vector<{self.run}xf32>", self.types["partial"]
        scale = lines.let(f"arith.constant dense<{number(self.scale)}> : {kind}")
        none = lines.let(f"arith.constant dense<0xFF800000> : {kind}")
        zero = lines.let(f"arith.constant dense<0.0> : {kind}")
        at = [lines.index(i) for i in range(0, self.scored, self.run)]
        scores, inside = [], []
        steps = lines.let(f"vector.step : vector<{self.run}xindex>")
        ends = [lines.let(f"vector.broadcast {end} : index to vector<{self.run}xindex>") for end in ("%from", "%to")]
        for start in at:
            place = lines.let(f"vector.broadcast {start} : index to vector<{self.run}xindex>")
            place = lines.let(f"arith.addi {place}, {steps} : vector<{self.run}xindex>")
            after = lines.let(f"arith.cmpi uge, {place}, {ends[0]} : vector<{self.run}xindex>")
            before = lines.let(f"arith.cmpi ult, {place}, {ends[1]} : vector<{self.run}xindex>")
            inside.append(lines.let(f"arith.andi {after}, {before} : vector<{self.run}xi1>"))
            score = lines.load("%scores", f"{row}, {start}", self.types["scores"], self.run, "f32")
            score = lines.let(f"arith.mulf {score}, {scale} : {kind}")
            if self.softcap:
                score = self._capped(lines, score)
            scores.append(lines.let(f"arith.select {inside[-1]}, {score}, {none} : vector<{self.run}xi1>, {kind}"))
        highest = scores[0]
        for score in scores[1:]:
            highest = lines.let(f"arith.maximumf {highest}, {score} : {kind}")
        here = lines.let(f"vector.reduction <maximumf>, {highest} : {kind} into f32")
        peak_at, total_at = lines.index(self.dim), lines.index(self.dim + 1)
        before = lines.let(f"memref.load %partial[%row, {owner}, %chunk, {peak_at}] : {partial}")
        peak = lines.let(f"arith.maximumf {before}, {here} : f32")
        lines.say(f"memref.store {peak}, %partial[%row, {owner}, %chunk, {peak_at}] : {partial}")
        peaks = lines.splat(peak, self.run)
        sums = zero
        for start, score, ours in zip(at, scores, inside, strict=True):
            weight = lines.let(f"arith.subf {score}, {peaks} : {kind}")
            weight = lines.let(f"func.call @exp({weight}) : ({kind}) -> {kind}")
            weight = lines.let(f"arith.select {ours}, {weight}, {zero} : vector<{self.run}xi1>, {kind}")
            lines.say(f"vector.store {weight}, %scores[{row}, {start}] : {self.types['scores']}, {kind}")
            if self.pairs:
                rounded = lines.narrow(weight, self.run, "bf16")
                at_ = f"%weights[{row}, {start}] : {self.types['weights']}, vector<{self.run}xbf16>"
                lines.say(f"vector.store {rounded}, {at_}")
            sums = lines.let(f"arith.addf {sums}, {weight} : {kind}")
        fallen = lines.let(f"arith.subf {lines.splat(before, self.run)}, {peaks} : {kind}")
        factors = lines.let(f"func.call @exp({fallen}) : ({kind}) -> {kind}")
        factor = lines.let(f"vector.extract {factors}[0] : f32 from {kind}")
        total = lines.let(f"memref.load %partial[%row, {owner}, %chunk, {total_at}] : {partial}")
        total = lines.let(f"arith.mulf {total}, {factor} : f32")
        total = lines.let(f"arith.addf {total}, {lines.total(sums, self.run)} : f32")
        lines.say(f"memref.store {total}, %partial[%row, {owner}, %chunk, {total_at}] : {partial}")
        return factor

    def _capped(self, lines: Lines, score: str) -> str:
        """c tanh(score / c), with tanh x = 1 - 2 / (exp(2x) + 1)."""
        kind = f"vector<{self.run}xf32>"
        double, one, two, cap = (
            lines.let(f"arith.constant dense<{number(value)}> : {kind}")
            for value in (2 / self.softcap, 1.0, 2.0, self.softcap)
        )
        power = lines.let(f"func.call @exp({lines.let(f'arith.mulf {score}, {double} : {kind}')}) : ({kind}) -> {kind}")
        part = lines.let(f"arith.divf {two}, {lines.let(f'arith.addf {power}, {one} : {kind}')} : {kind}")
        return lines.let(f"arith.mulf {cap}, {lines.let(f'arith.subf {one}, {part} : {kind}')} : {kind}")

    def _mix(self, lines: Lines, rows: list[str], owners: list[str], scales: list[str]) -> None:
        """partial = partial * factor + weights · values."""
        lanes, partial = self.lanes, self.types["partial"]
        kind = f"vector<{lanes}xf32>"
        columns = [lines.index(at) for at in range(0, self.dim, lanes)]
        # As many registers as sums: wide heads are walked in runs of columns.
        most = max(1, SUMS // len(rows))
        for first in range(0, len(columns), most):
            run = columns[first : first + most]
            sums = []
            for owner, scale in zip(owners, scales, strict=True):
                factor = lines.splat(scale, lanes)
                for column in run:
                    before = lines.load("%partial", f"%row, {owner}, %chunk, {column}", partial, lanes, "f32")
                    sums.append(lines.let(f"arith.mulf {before}, {factor} : {kind}"))
            single = "%from"
            if self.pairs and len(run) % 2 == 0:
                sums, single = self._mix_pairs(lines, rows, run, sums)
            mark = len(lines.lines)
            names = [f"%a{mark}_{i}" for i in range(len(sums))]
            heads = ", ".join(f"{name} = {start}" for name, start in zip(names, sums, strict=True))
            kinds = ", ".join([kind] * len(sums))
            lines.say(
                f"%r{mark}:{len(sums)} = scf.for %o = {single} to %to step %one iter_args({heads}) -> ({kinds}) {{"
            )
            value = [
                lines.wide(
                    lines.load("%v", f"%page, %group, %o, {c}", self.types["pages"], lanes, self.kind), lanes, self.kind
                )
                for c in run
            ]
            new = []
            for i, row in enumerate(rows):
                weight = lines.splat(lines.let(f"memref.load %scores[{row}, %o] : {self.types['scores']}"), lanes)
                new += [lines.fma(weight, v, names[i * len(run) + j], lanes) for j, v in enumerate(value)]
            lines.say(f"scf.yield {', '.join(new)} : {kinds}")
            lines.say("}")
            for i, owner in enumerate(owners):
                for j, column in enumerate(run):
                    result = f"%r{mark}#{i * len(run) + j}"
                    lines.say(f"vector.store {result}, %partial[%row, {owner}, %chunk, {column}] : {partial}, {kind}")

    def _mix_pairs(self, lines: Lines, rows: list[str], run: list[str], sums: list[str]) -> tuple[list[str], str]:
        """Pairs of keys from %from on, as dot products; the sums, and the offset of a last key that has no partner."""
        two = lines.index(2)
        count = lines.let("arith.subi %to, %from : index")
        odd = lines.let(f"arith.remui {count}, {two} : index")
        last = lines.let(f"arith.subi %to, {odd} : index")
        mark = len(lines.lines)
        names = [f"%p{mark}_{i}" for i in range(len(sums))]
        heads = ", ".join(f"{name} = {start}" for name, start in zip(names, sums, strict=True))
        kinds = ", ".join(["vector<16xf32>"] * len(sums))
        lines.say(f"%b{mark}:{len(sums)} = scf.for %o = %from to {last} step {two} iter_args({heads}) -> ({kinds}) {{")
        partner = lines.let("arith.addi %o, %one : index")
        values = []
        for column in run[::2]:
            both = [
                lines.load("%v", f"%page, %group, {o}, {column}", self.types["pages"], 32, "bf16")
                for o in ("%o", partner)
            ]
            woven = lines.let(f"vector.interleave {both[0]}, {both[1]} : vector<32xbf16> -> vector<64xbf16>")
            for at in (0, 32):
                values.append(
                    lines.let(
                        f"vector.extract_strided_slice {woven} {{offsets = [{at}], sizes = [32], strides = [1]}} : "
                        "vector<64xbf16> to vector<32xbf16>"
                    )
                )
        new = []
        for i, row in enumerate(rows):
            pair = lines.load("%weights", f"{row}, %o", self.types["weights"], 2, "bf16")
            bits = lines.let(f"vector.bitcast {pair} : vector<2xbf16> to vector<1xi32>")
            single = lines.let(f"vector.extract {bits}[0] : i32 from vector<1xi32>")
            spread = lines.let(f"vector.broadcast {single} : i32 to vector<16xi32>")
            weight = lines.let(f"vector.bitcast {spread} : vector<16xi32> to vector<32xbf16>")
            new += [lines.dot_pairs(names[i * len(run) + j], v, weight) for j, v in enumerate(values)]
        lines.say(f"scf.yield {', '.join(new)} : {kinds}")
        lines.say("}")
        return [f"%b{mark}#{i}" for i in range(len(sums))], last

    def _item(self, name: str) -> str:
        t = self.types
        window = f"""
%window = arith.constant {self.window} : index
%long = arith.cmpi ugt, %length, %window : index
%past = arith.subi %length, %window : index
%first = arith.select %long, %past, %zero : index""" if self.window else "\n%first = arith.addi %zero, %zero : index"  # fmt: skip
        sinks = f"""
%sinks = arith.constant {self.sinks} : index
%kept = arith.minui %sinks, %first : index
%mine = arith.cmpi eq, %chunk, %zero : index
%sink_end = arith.select %mine, %kept, %zero : index
%sink_pages = arith.ceildivui %sink_end, %size : index
func.call @{name}_pages(%q, %k, %v, %table, %partial, %row, %group, %chunk, %scores, %weights, %zero, %sink_pages, %zero, %sink_end)
  : ({self._walked}) -> ()""" if self.sinks else ""  # fmt: skip
        return f"""func.func private @{name}_pages(%q: {t["queries"]}, %k: {t["pages"]}, %v: {t["pages"]},
    %table: {t["table"]}, %partial: {t["partial"]}, %row: index, %group: index, %chunk: index, %scores: {t["scores"]},
    %weights: {t["weights"]}, %begin: index, %end: index, %first: index, %last: index) {{
%zero = arith.constant 0 : index
%one = arith.constant 1 : index
%size = arith.constant {self.size} : index
scf.for %p = %begin to %end step %one {{
  %base = arith.muli %p, %size : index
  %started = arith.cmpi ugt, %first, %base : index
  %skipped = arith.subi %first, %base : index
  %from = arith.select %started, %skipped, %zero : index
  %left = arith.subi %last, %base : index
  %to = arith.minui %left, %size : index
  %number = memref.load %table[%row, %p] : {t["table"]}
  %page = arith.index_cast %number : i32 to index
  func.call @{name}_tile(%q, %k, %v, %page, %group, %from, %to, %partial, %row, %chunk, %scores, %weights)
    : ({t["queries"]}, {t["pages"]}, {t["pages"]}, index, index, index, index, {t["partial"]}, index, index, {t["scores"]},
       {t["weights"]}) -> ()
}}
return
}}
func.func private @{name}_item(%q: {t["queries"]}, %k: {t["pages"]}, %v: {t["pages"]}, %table: {t["table"]},
    %lengths: {t["lengths"]}, %partial: {t["partial"]}, %row: index, %group: index, %chunk: index) {{
%scores = memref.alloca() {{alignment = 64 : i64}} : {t["scores"]}
%weights = memref.alloca() {{alignment = 64 : i64}} : {t["weights"]}
%zero = arith.constant 0 : index
%one = arith.constant 1 : index
%share = arith.constant {self.share} : index
%size = arith.constant {self.size} : index
%dim = arith.constant {self.dim} : index
%total_at = arith.constant {self.dim + 1} : index
%none = arith.constant 0xFF800000 : f32
%nothing = arith.constant 0.0 : f32
%base = arith.muli %group, %share : index
%last_head = arith.addi %base, %share : index
scf.for %h = %base to %last_head step %one {{
  scf.for %d = %zero to %dim step %one {{
    memref.store %nothing, %partial[%row, %h, %chunk, %d] : {t["partial"]}
  }}
  memref.store %none, %partial[%row, %h, %chunk, %dim] : {t["partial"]}
  memref.store %nothing, %partial[%row, %h, %chunk, %total_at] : {t["partial"]}
}}
%length32 = memref.load %lengths[%row] : {t["lengths"]}
%length = arith.index_cast %length32 : i32 to index{window}
%start = arith.divui %first, %size : index
%stop = arith.ceildivui %length, %size : index
%pages = arith.subi %stop, %start : index
%chunks = arith.constant {self.chunks} : index
%each = arith.ceildivui %pages, %chunks : index
%after = arith.subi %chunks, %chunk : index
%after_me = arith.subi %after, %one : index
%back = arith.muli %each, %after : index
%back_end = arith.muli %each, %after_me : index
%reach = arith.minui %back, %pages : index
%reach_end = arith.minui %back_end, %pages : index
%begin = arith.subi %stop, %reach : index
%end = arith.subi %stop, %reach_end : index{sinks}
func.call @{name}_pages(%q, %k, %v, %table, %partial, %row, %group, %chunk, %scores, %weights, %begin, %end, %first, %length)
  : ({self._walked}) -> ()
return
}}"""

    @property
    def _walked(self) -> str:
        t = self.types
        return (
            f"{t['queries']}, {t['pages']}, {t['pages']}, {t['table']}, {t['partial']}, index, index, index, {t['scores']}, "
            f"{t['weights']}, index, index, index, index"
        )

    def _merge(self, name: str) -> str:
        """Every head's chunks, weighed by their peaks, over their common total; a row without a context is zero."""
        t, lanes, lines = self.types, self.lanes, Lines()
        kind, partial = f"vector<{lanes}xf32>", t["partial"]
        run = f"vector<{self.run}xf32>"
        peak_at, total_at = lines.index(self.dim), lines.index(self.dim + 1)
        chunks = [lines.index(chunk) for chunk in range(self.chunks)]
        lowest = lines.let("arith.constant -3.0e38 : f32")  # below every score: a peak of nothing is no number
        peaks = [lines.let(f"memref.load %partial[%row, %head, {c}, {peak_at}] : {partial}") for c in chunks]
        if self.sink_logits:
            peaks.append(lines.let(f"memref.load %sinks[%head] : {t['sinks']}"))
        peak = lowest
        for each in peaks:
            peak = lines.let(f"arith.maximumf {peak}, {each} : f32")
        factors = []
        for each in peaks:
            fallen = lines.splat(lines.let(f"arith.subf {each}, {peak} : f32"), self.run)
            power = lines.let(f"func.call @exp({fallen}) : ({run}) -> {run}")
            factors.append(lines.let(f"vector.extract {power}[0] : f32 from {run}"))
        total = lines.let("arith.constant 0.0 : f32")
        for c, factor in zip(chunks, factors, strict=False):
            found = lines.let(f"memref.load %partial[%row, %head, {c}, {total_at}] : {partial}")
            total = lines.let(f"arith.addf {total}, {lines.let(f'arith.mulf {found}, {factor} : f32')} : f32")
        if self.sink_logits:
            total = lines.let(f"arith.addf {total}, {factors[-1]} : f32")
        nothing, one = lines.let("arith.constant 0.0 : f32"), lines.let("arith.constant 1.0 : f32")
        empty = lines.let(f"arith.cmpf oeq, {total}, {nothing} : f32")
        divisor_ = lines.let(f"arith.select {empty}, {one}, {total} : f32")
        shares = [lines.splat(lines.let(f"arith.divf {f}, {divisor_} : f32"), lanes) for f in factors[: self.chunks]]
        base = lines.let(f"arith.muli %head, {lines.index(self.dim)} : index")
        for at in range(0, self.dim, lanes):
            column = lines.index(at)
            mixed = lines.let(f"arith.constant dense<0.0> : {kind}")
            for c, factor in zip(chunks, shares, strict=True):
                part = lines.load("%partial", f"%row, %head, {c}, {column}", partial, lanes, "f32")
                mixed = lines.fma(part, factor, mixed, lanes)
            place = lines.let(f"arith.addi {base}, {column} : index")
            rounded = lines.narrow(mixed, lanes, self.kind)
            lines.say(f"vector.store {rounded}, %mixed[%row, {place}] : {t['mixed']}, vector<{lanes}x{self.kind}>")
        sinks = f", %sinks: {t['sinks']}" if self.sink_logits else ""
        return f"""func.func private @{name}_merge(%partial: {partial}{sinks}, %mixed: {t["mixed"]},
    %begin: index, %end: index) {{
%zero = arith.constant 0 : index
%one = arith.constant 1 : index
%heads = arith.constant {self.heads} : index
scf.for %row = %begin to %end step %one {{
scf.for %head = %zero to %heads step %one {{
{lines.text()}
}}
}}
return
}}"""


SUMS = 16  # vectors kept in registers, of the 32 there are
