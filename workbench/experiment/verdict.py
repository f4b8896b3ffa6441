"""Verdicts on claims from measured numbers, by a rule written down before the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, cast

from workbench.custom import resolve_path
from workbench.errors import WorkbenchError
from workbench.request import CustomPart

Outcome = Literal["holds", "holds-with-limits", "refuted", "not-testable-here"]
VariantRows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class RuleChange:
    """A change of a rule, or of its experiment, made after a result was seen.

    States `what` was changed, on which day (`when`), `after` which record or look, and `why`. It is shown with every
    verdict of the rule."""

    what: str
    when: str
    after: str
    why: str

    def __str__(self) -> str:
        return f"{self.when}, after {self.after}: {self.what}. Why: {self.why}"


@dataclass(frozen=True)
class Verdict:
    """The outcome of a rule on one claim.

    `claim` is its name in the ledger, `says` its text, `rule` the decision rule, `reason` the numbers. `limits` bounds
    a claim that holds with limits. `figures` are measured numbers to compare with those of the claim's sources, by
    name. `changed` lists changes of the rule after a look."""

    claim: str
    says: str
    rule: str
    outcome: Outcome
    reason: str
    limits: str = ""
    figures: Mapping[str, float | str] = field(default_factory=dict)
    changed: tuple[RuleChange, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.claim}: {self.outcome} ({self.reason})"


Judge = Callable[[VariantRows], Sequence[Verdict]]


def verdicts(judge: CustomPart | None, rows: VariantRows) -> list[Verdict]:
    """Apply `judge` to the rows; no judge gives no verdicts. Raises WorkbenchError for a judge that returns other
    values."""
    if judge is None:
        return []
    found = list(cast(Judge, resolve_path(judge.path))(rows, **judge.arguments))
    if wrong := [each for each in found if not isinstance(each, Verdict)]:
        raise WorkbenchError(f"judge {judge.path}: gives {type(wrong[0]).__name__}, must give Verdict values")
    return found


def variant_row(rows: VariantRows, variant: str) -> Mapping[str, Any]:
    """Return the row of one variant. Raises WorkbenchError where the run has none of that name."""
    for row in rows:
        if row["variant"] == variant:
            return row
    raise WorkbenchError(
        f"the verdict needs a variant {variant!r}; this run has {', '.join(row['variant'] for row in rows)}"
    )
