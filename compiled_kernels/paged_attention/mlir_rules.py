"""A user's mask and score function inside an attention kernel, as MLIR text: which keys of a page a query sees, what
its scores become, and which pages none of its keys are seen in, so that they are passed over and never read."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

from compiled_kernels.mlir_text import Lines, vector
from compiled_kernels.paged_attention.mlir_shape import DecodeAttention, PagedHeads
from compiled_kernels.scalar_code.intervals import reach
from compiled_kernels.scalar_code.mlir import ScalarCode
from compiled_kernels.scalar_code.program import Program


@dataclass(frozen=True)
class KeyRun:
    """The keys of one vector for one query, as MLIR names: the position of the query, those of the keys (a vector of
    indices), and the number of the query's head."""

    query: str
    keys: str
    head: str


@dataclass(frozen=True)
class Rules:
    """The rules of a shape, for the functions named `name`; `declarations` are what the module needs for them."""

    shape: PagedHeads
    name: str
    declarations: dict[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.shape.mask or self.shape.score)

    def visible(self, lines: Lines, run: KeyRun, visible: str) -> str:
        """Emit which of the `visible` keys the mask shows too."""
        if not self.shape.mask:
            return visible
        seen = self._emit(lines, self.shape.mask, {"query": run.query, "key": run.keys, "head": run.head})
        return lines.let(f"arith.andi {visible}, {seen} : {vector(self.shape.lanes, 'i1')}")

    def scored(self, lines: Lines, run: KeyRun, scores: str) -> str:
        """Emit what the score function makes of scores."""
        if not self.shape.score:
            return scores
        inputs = {"score": scores, "head": run.head, "query": run.query, "key": run.keys}
        return self._emit(lines, self.shape.score, inputs)

    def _emit(self, lines: Lines, text: str, inputs: dict[str, str]) -> str:
        code = ScalarCode(lines, self.name, self.shape.lanes)
        found = code.emit(Program.parse(text), inputs, single=("query", "head"))
        self.declarations.update(code.declarations)
        return found

    def needed(self, lines: Lines, queries: tuple[str, str], keys: tuple[str, str]) -> str:
        """Emit whether any query of an interval (first, last) may see any key of another, as the mask has it for the
        heads of %group."""
        code = ScalarCode(lines, self.name)
        share = lines.index(self.shape.queries_per_kv)
        low = lines.let(f"arith.muli %group, {share} : index")
        high = lines.let(f"arith.subi {lines.let(f'arith.addi {low}, {share} : index')}, {lines.index(1)} : index")
        ends = {"query": queries, "key": keys, "head": (low, high)}
        inputs = {f"{name}_{end}": pair[at] for name, pair in ends.items() for at, end in enumerate(("low", "high"))}
        found = code.emit(reach(Program.parse(self.shape.mask)), inputs)
        self.declarations.update(code.declarations)
        return found

    @property
    def text(self) -> str:
        """Return the declarations, to stand before the functions."""
        return "\n".join(self.declarations.values())


def seek_text(shape: DecodeAttention, name: str) -> str:
    """Emit @{name}_seek(page, end, position, group[, chosen]): the first page of a table from `page` on that is chosen
    and in which the query at `position` may see a key with a head of the group, or `end` where there is none."""
    lines, rules, needed = Lines(), Rules(shape, f"{name}_seek"), []
    if shape.selected:
        given = lines.let(f"memref.load %chosen[%at] : {shape.types['chosen']}")
        needed.append(lines.let(f"arith.cmpi ne, {given}, {lines.let('arith.constant 0 : i8')} : i8"))
    if shape.mask:
        low = lines.let("arith.muli %at, %size : index")
        last = lines.let(f"arith.subi {lines.let(f'arith.addi {low}, %size : index')}, %one : index")
        needed.append(rules.needed(lines, ("%position", "%position"), (low, last)))
    found = functools.reduce(lambda a, b: lines.let(f"arith.andi {a}, {b} : i1"), needed)
    hidden = lines.let(f"arith.xori {found}, %true : i1")
    chosen = f", %chosen: {shape.types['chosen']}" if shape.selected else ""
    return f"""{rules.text}
func.func private @{name}_seek(%page: index, %end: index, %position: index, %group: index{chosen}) -> index {{
%one = arith.constant 1 : index
%true = arith.constant true
%false = arith.constant false
%size = arith.constant {shape.page_size} : index
%found = scf.while (%at = %page) : (index) -> index {{
  %more = arith.cmpi ult, %at, %end : index
  %go = scf.if %more -> (i1) {{
{lines.text()}
    scf.yield {hidden} : i1
  }} else {{
    scf.yield %false : i1
  }}
  scf.condition(%go) %at : index
}} do {{
^bb0(%at: index):
  %next = arith.addi %at, %one : index
  scf.yield %next : index
}}
return %found : index
}}"""
