"""Every lane held to the specification, over every case, with its gaps listed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from compiled_kernels.cases import Case, Suite, disagreement, suites
from compiled_kernels.gaps import known_gap
from compiled_kernels.lanes import Lane, LaneError, lane_problems


@dataclass(frozen=True)
class Row:
    """One case on one lane: `status` is `ok`, `gap` or `failed`, and `reason` says why it is not ok."""

    operator: str
    lane: str
    case: str
    status: str
    reason: str = ""


def check(lanes: Iterable[Lane] = tuple(Lane), operator: str | None = None) -> Iterator[Row]:
    """A row for each operator, lane and case, as they are found; a lane that does not work here is a gap."""
    for suite in suites():
        if operator not in (None, suite.operator):
            continue
        for lane in lanes:
            for case in suite.cases:
                status, reason = verdict(suite, case, lane)
                yield Row(suite.operator, str(lane), case.name, status, reason)


def verdict(suite: Suite, case: Case, lane: Lane) -> tuple[str, str]:
    """(status, reason) of one case."""
    gap = known_gap(suite.operator, lane, case.name)
    if problem := lane_problems()[lane]:
        return "gap", gap.reason if gap else problem
    try:
        wrong = disagreement(suite, case, suite.make(case), lane)
    except LaneError as error:
        wrong = str(error)
    except Exception as error:  # whatever a kernel throws is its failure, and the rest goes on
        wrong = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    if wrong and gap:
        return "gap", gap.reason
    if wrong:
        return "failed", wrong
    return ("failed", f"this gap has closed; take it out of the table: {gap.reason}") if gap else ("ok", "")
