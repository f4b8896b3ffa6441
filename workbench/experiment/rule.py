"""Parse the rule of a claim: comparisons of named figures with numbers, joined by `and` and `or`.

    kl <= 0.02 and decode_time_ratio <= 0.8                 with limits where one of the two holds
    0.9 <= copying <= 1.1 or bytes_ratio < 0.25
    same_tokens and times >= 2 else times >= 1.1            with limits where what follows `else` holds
    same_bits and steps <= 1 else refuted                   holds or is refuted

A figure alone is true from 1 on. A rule is parsed, never evaluated as Python.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from workbench.errors import WorkbenchError, nearest
from workbench.experiment.verdict import Outcome

COMPARISONS: dict[type[ast.cmpop], tuple[str, Callable[[float, float], bool]]] = {
    ast.LtE: ("<=", operator.le),
    ast.Lt: ("<", operator.lt),
    ast.GtE: (">=", operator.ge),
    ast.Gt: (">", operator.gt),
}
_MIRRORED = {"<=": ">=", "<": ">", ">=": "<=", ">": "<"}
_BY_SIGN = dict(COMPARISONS.values())
BEST_FIRST: tuple[Outcome, ...] = ("holds", "holds-with-limits", "refuted")
EXAMPLE = "for example `kl <= 0.02 and decode_time_ratio <= 0.8`"
FIXED_BY_SETTINGS = ("bytes_ratio",)  # known before a run, so no evidence for a claim
MAX_CHARACTERS = 500  # limit for a rule, since Python's parser recurses


@dataclass(frozen=True)
class FigureBound:
    """One figure compared with a number."""

    figure: str
    sign: str
    number: float

    def outcome(self, figures: Mapping[str, float]) -> Outcome:
        return "holds" if _BY_SIGN[self.sign](figures[self.figure], self.number) else "refuted"

    def has_evidence(self, figures: Mapping[str, float]) -> bool:
        """Return whether the bound holds and could have failed: its figure is not fixed by settings."""
        return self.figure not in FIXED_BY_SETTINGS and self.outcome(figures) == "holds"

    def comparisons(self) -> Iterator[FigureBound]:
        yield self

    def __str__(self) -> str:
        return f"{self.figure} {self.sign} {self.number:g}"


@dataclass(frozen=True)
class AllOf:
    """Parts joined by `and`: holds if all parts hold, with limits if only some do, and is refuted if none does.

    A figure fixed by settings (`FIXED_BY_SETTINGS`) limits a claim if its bound fails; alone it cannot make a claim
    hold in part.
    """

    parts: tuple[RulePart, ...]

    def outcome(self, figures: Mapping[str, float]) -> Outcome:
        if all(part.outcome(figures) == "holds" for part in self.parts):
            return "holds"
        return "holds-with-limits" if self.has_evidence(figures) else "refuted"

    def has_evidence(self, figures: Mapping[str, float]) -> bool:
        return any(part.has_evidence(figures) for part in self.parts)

    def comparisons(self) -> Iterator[FigureBound]:
        for part in self.parts:
            yield from part.comparisons()

    def __str__(self) -> str:
        return " and ".join(f"({part})" if isinstance(part, AnyOf) else str(part) for part in self.parts)


@dataclass(frozen=True)
class Chain(AllOf):
    """Comparisons in a chain, as an interval has: one condition, since one side of an interval holds anywhere."""

    text: str

    def outcome(self, figures: Mapping[str, float]) -> Outcome:
        return "holds" if all(part.outcome(figures) == "holds" for part in self.parts) else "refuted"

    def has_evidence(self, figures: Mapping[str, float]) -> bool:
        return self.outcome(figures) == "holds" and super().has_evidence(figures)

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class AnyOf:
    """Parts joined by `or`: the best outcome of any part."""

    parts: tuple[RulePart, ...]

    def outcome(self, figures: Mapping[str, float]) -> Outcome:
        found: set[Outcome] = {part.outcome(figures) for part in self.parts}
        return next(each for each in BEST_FIRST if each in found)

    def has_evidence(self, figures: Mapping[str, float]) -> bool:
        return any(part.has_evidence(figures) for part in self.parts)

    def comparisons(self) -> Iterator[FigureBound]:
        for part in self.parts:
            yield from part.comparisons()

    def __str__(self) -> str:
        return " or ".join(map(str, self.parts))


RulePart = FigureBound | AllOf | AnyOf


@dataclass(frozen=True)
class FigureRule:
    """A parsed rule. `figures` are the names in it, in order of appearance.

    `limits` is the part after `else`: None for `else refuted`, `part` itself for a rule without `else`."""

    text: str
    part: RulePart
    limits: RulePart | None

    @classmethod
    def parse(cls, text: str, known: Iterable[str] | None = None) -> FigureRule:
        """Parse a rule over the figures `known`; over any figures if None.

        Raises:
            WorkbenchError: for anything but comparisons of known figures with numbers, `and`, `or`, parentheses and
                one `else`.
        """
        words = " ".join(text.split())
        if not words:
            raise WorkbenchError(f"rule: is empty; write a condition on measured figures, {EXAMPLE}")
        if len(words) > MAX_CHARACTERS:
            raise WorkbenchError(f"rule: {len(words)} characters; write at most {MAX_CHARACTERS}")
        first, *rest = re.split(r"\belse\b", words)
        if len(rest) > 1:
            raise WorkbenchError(f"rule {words!r}: has `else` {len(rest)} times; write it once")
        part = _parsed(first, words)
        limits = part if not rest else None if rest[0].strip() == "refuted" else _parsed(rest[0], words)
        rule = cls(words, part, limits)
        if known is not None:
            rule.check_names(known)
        return rule

    def check_names(self, known: Iterable[str]) -> None:
        """Raise WorkbenchError for the first figure of the rule that is not in `known`."""
        names = tuple(known)
        for wrong in (name for name in self.figures if name not in names):
            hint = nearest(wrong, names) or f"; known: {', '.join(names)}"
            raise WorkbenchError(f"rule {self.text!r}: there is no figure {wrong!r}{hint}")

    def comparisons(self) -> Iterator[FigureBound]:
        """Yield the comparisons of the rule, each once."""
        parts = (self.part,) if self.limits is None else (self.part, self.limits)
        yield from dict.fromkeys(bound for part in parts for bound in part.comparisons())

    @property
    def figures(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(each.figure for each in self.comparisons()))

    def missing(self, figures: Mapping[str, float | None]) -> list[str]:
        """Return the names in the rule without a finite number in `figures`."""
        return [name for name in self.figures if (value := figures.get(name)) is None or not math.isfinite(value)]

    def outcome(self, figures: Mapping[str, float | None]) -> Outcome:
        """Return the outcome for measured figures; `not-testable-here` if a figure of the rule is missing."""
        if self.missing(figures):
            return "not-testable-here"
        present = {name: value for name in self.figures if (value := figures[name]) is not None}
        outcome = self.part.outcome(present)
        if outcome == "holds" or self.limits is self.part:
            return outcome
        limited = self.limits is not None and self.limits.outcome(present) == "holds"
        return "holds-with-limits" if limited else "refuted"

    def reason(self, figures: Mapping[str, float | None]) -> str:
        """Return the rule's figures with their limits, and the missing figures, in words."""
        if missing := self.missing(figures):
            return f"not measured: {', '.join(missing)}"
        lines = []
        for each in self.comparisons():
            value = figures[each.figure]
            assert value is not None
            verb = "" if each.outcome({each.figure: value}) == "holds" else "not "
            lines.append(f"{each.figure} {value:.4g}, {verb}{each.sign} {each.number:g}")
        return "; ".join(lines)


def _parsed(text: str, words: str) -> RulePart:
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        reason = getattr(error, "msg", None) or str(error)
        raise WorkbenchError(f"rule {words!r}: cannot be read ({reason}); {EXAMPLE}") from None
    return _part(tree, words)


def _part(node: ast.expr, words: str) -> RulePart:
    if isinstance(node, ast.BoolOp):
        parts = tuple(_part(each, words) for each in node.values)
        return AllOf(parts) if isinstance(node.op, ast.And) else AnyOf(parts)
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        found = [_comparison(*pair, words) for pair in zip(sides, node.ops, sides[1:], strict=False)]
        return found[0] if len(found) == 1 else Chain(tuple(found), ast.unparse(node))
    if name := _name(node):
        return FigureBound(name, ">=", 1.0)
    raise _refused(node, words)


def _name(node: ast.expr) -> str:
    """Return the name of a figure, which may have dots; empty for another expression."""
    match node:
        case ast.Name(id):
            return id
        case ast.Attribute(value, attr) if before := _name(value):
            return f"{before}.{attr}"
    return ""


def _comparison(left: ast.expr, sign: ast.cmpop, right: ast.expr, words: str) -> FigureBound:
    if type(sign) not in COMPARISONS:
        raise WorkbenchError(f"rule {words!r}: compare by <=, <, >= or >; equal floats are chance")
    text = COMPARISONS[type(sign)][0]
    if name := _name(left):
        return FigureBound(name, text, _number(right, words))
    if name := _name(right):
        return FigureBound(name, _MIRRORED[text], _number(left, words))
    raise _refused(left, words)


def _number(node: ast.expr, words: str) -> float:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_number(node.operand, words)
    value = node.value if isinstance(node, ast.Constant) else None
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if math.isfinite(number):
            return number
    raise _refused(node, words)


def _refused(node: ast.expr, words: str) -> WorkbenchError:
    what = ast.unparse(node)
    return WorkbenchError(
        f"rule {words!r}: {what!r} is no comparison of a figure with a number; join them by `and` and `or`, {EXAMPLE}"
    )
