"""Find the first lane that carries out an operator rightly on this machine, without timing any; remembered."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from compiled_kernels.agreement import disagreement
from compiled_kernels.cases import Case, Work, suite_of
from compiled_kernels.check import device_of, moved
from compiled_kernels.choice import Choice, key_of_choice, plain
from compiled_kernels.lanes import Lane, LaneError, lane_problems
from compiled_kernels.remembered import Remembered, cpu_model, directory

FILE = "right_lanes.json"


def right_lane(
    operator: str, arguments: Mapping[str, Any], lanes: Iterable[Lane], folder: Path | None = None
) -> Choice:
    """Return the first of `lanes`, in order of preference, that agrees with the specification in float64.

    `arguments` are those of the operator's cases (`Case.arguments`). Each lane is run once, as a kernel by hand and
    not in a compiled graph: that takes a fraction of a second where timing them takes seconds to a minute. What was
    found is remembered in `folder`, by default `$WORKBENCH_CACHE_DIR` or the user's cache.
    Raises LaneError for an unknown operator and where none of `lanes` is right.
    """
    lanes, kept = tuple(lanes), Remembered((folder or directory()) / FILE)
    key = key_of_choice(operator, arguments, lanes)
    entry = kept.load().get(key)
    if (choice := _choice(entry, lanes)) is not None:
        return choice
    suite, case, refused = suite_of(operator), Case("chosen", arguments, Work(0, 0)), {}
    for lane in lanes:
        if problem := lane_problems()[lane] or _wrong(suite, case, lane):
            refused[str(lane)] = problem
            continue
        day = f"{datetime.now(UTC):%Y-%m-%d}"
        entry = {"operator": operator, "arguments": plain(arguments), "lane": str(lane), "refused": refused}
        entry |= {"checked": f"on {cpu_model()}, {day}"}
        kept.add(key, entry)
        choice = _choice(entry, lanes)
        assert choice is not None
        return choice
    reasons = "; ".join(f"{lane}: {reason}" for lane, reason in refused.items()) or "no lane was given"
    raise LaneError(f"{operator}: no lane works for {plain(arguments)}: {reasons}")


def _wrong(suite: Any, case: Case, lane: Lane) -> str | None:
    try:
        return disagreement(suite, case, moved(suite.make(case), device_of(lane)), lane)
    except Exception as error:  # whatever a lane throws is a reason not to take it
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _choice(entry: Any, lanes: tuple[Lane, ...]) -> Choice | None:
    """What follows from `entry`; None where it makes no sense."""
    try:
        lane, refused = Lane(entry["lane"]), dict(entry["refused"])
        told = [f"on {lane}, checked {entry['checked']}", *(f"{other}: {why}" for other, why in refused.items())]
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
    return Choice(lane, "; ".join(told)) if lane in lanes else None
