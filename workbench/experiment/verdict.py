"""Define verdicts on claims, which a rule written before the run derives from measured numbers."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from workbench.custom import resolve_path, user_code
from workbench.errors import WorkbenchError, nearest
from workbench.request import CustomPart

Outcome = Literal["holds", "holds-with-limits", "refuted", "not-testable-here"]
VariantRows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class RuleChange:
    """A change of a rule, or of its experiment, after a result was seen.

    States `what` was changed, on which day (`when`), `after` which record, and `why`. Every verdict of the rule shows
    this change."""

    what: str
    when: str
    after: str
    why: str

    def __str__(self) -> str:
        return f"{self.when}, after {self.after}: {self.what}. Why: {self.why}"


@dataclass(frozen=True)
class Verdict:
    """The outcome of a rule on one claim.

    `claim` is the claim's name in the ledger, `says` its text, `rule` the decision rule, `reason` the numbers. `limits`
    states where a claim holds if it does not hold everywhere. `figures` are measured numbers by name, to compare with
    the numbers of the claim's sources. `changed` lists changes of the rule after a result was seen.
    """

    claim: str
    says: str
    rule: str
    outcome: Outcome
    reason: str
    limits: str = ""
    figures: Mapping[str, float | str] = field(default_factory=dict)
    changed: tuple[RuleChange, ...] = ()

    def __post_init__(self) -> None:
        if self.outcome not in (known := get_args(Outcome)):
            hint = nearest(self.outcome, known) or f"; known: {', '.join(known)}"
            raise ValueError(f"outcome {self.outcome!r} is unknown{hint}")

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.claim}: {self.outcome} ({self.reason})"


def require_judge(judge: CustomPart) -> None:
    """Raise WorkbenchError if the function of `judge` does not exist, or does not take rows and the arguments."""
    function = resolve_path(judge.path)
    must = f"judge {judge.path}: must take the rows and its arguments"
    with user_code(must), contextlib.suppress(ValueError):  # some built-in callables have no signature
        inspect.signature(function).bind((), **judge.arguments)


def verdicts(judge: CustomPart | None, rows: VariantRows) -> list[Verdict]:
    """Apply `judge` to the rows. Without a judge there are no verdicts. Raises WorkbenchError if the judge raises an
    exception, or returns other values than verdicts."""
    if judge is None:
        return []
    with user_code(f"judge {judge.path}: must return a list of Verdict"):
        found = list(resolve_path(judge.path)(rows, **judge.arguments))
    if wrong := [each for each in found if not isinstance(each, Verdict)]:
        raise WorkbenchError(f"judge {judge.path}: returned {type(wrong[0]).__name__}, must return Verdict values")
    return found


def variant_row(rows: VariantRows, variant: str) -> Mapping[str, Any]:
    """Return the row of one variant. Raises WorkbenchError if the run has no variant of that name."""
    for row in rows:
        if row["variant"] == variant:
            return row
    raise WorkbenchError(
        f"the verdict needs a variant {variant!r}; this run has {', '.join(row['variant'] for row in rows)}"
    )
