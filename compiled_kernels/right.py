"""The first backend that carries out an operator correctly on this machine, found without timing any, and cached."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch

from compiled_kernels.agreement import disagreement
from compiled_kernels.cases import Case, Work, suite_of
from compiled_kernels.check import device_of, moved
from compiled_kernels.lanes import Lane, LaneError, lane_problems
from compiled_kernels.remembered import Remembered, cpu_model, directory, machine

FILE = "right_lanes.json"
PASSING = (MemoryError, OSError)  # raised for want of memory or of disk: not a reason to cache


class RightLane(NamedTuple):
    """A backend and the `reason` for it: when it was checked, and why those before it were not taken."""

    lane: Lane
    reason: str


def right_lane(
    operator: str, arguments: Mapping[str, Any], lanes: Iterable[Lane], folder: Path | None = None
) -> RightLane:
    """Return the first of several backends, in order of preference, that agrees with the specification in float64.

    Each is run once, as a kernel by hand and not in a compiled graph: that takes a fraction of a second where timing
    them takes seconds to a minute.

    Args:
        operator: the operator's name.
        arguments: those of the operator's cases (`Case.arguments`).
        lanes: the backends in order of preference.
        folder: where results are kept, by default `$WORKBENCH_CACHE_DIR` or the user's cache; not where a backend
            failed for a transient reason (`TRANSIENT_ERRORS`).

    Raises:
        LaneError: for an unknown operator and where no backend is right.
    """
    lanes, kept = tuple(lanes), Remembered((folder or directory()) / FILE)
    key = _key(operator, arguments, lanes)
    if (known := _sound(kept.load().get(key), lanes)) is not None:
        return known
    suite, case, refused, passing = suite_of(operator), Case("chosen", arguments, Work(0, 0)), {}, False
    for lane in lanes:
        try:
            problem = lane_problems()[lane] or disagreement(
                suite, case, moved(suite.make(case), device_of(lane)), lane
            )
        except Exception as error:  # any exception is a reason not to take this backend
            problem = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            passing = passing or isinstance(error, PASSING)
        if problem:
            refused[str(lane)] = problem
            continue
        checked = f"on {cpu_model()}, {datetime.now(UTC):%Y-%m-%d}"
        entry = {"operator": operator, "arguments": _plain(arguments), "lane": str(lane), "refused": refused}
        entry |= {"checked": checked}
        if not passing:
            kept.add(key, entry)
        return RightLane(lane, _reason(lane, checked, refused))
    reasons = "; ".join(f"{lane}: {reason}" for lane, reason in refused.items()) or "no lane was given"
    raise LaneError(f"{operator}: no lane works for {_plain(arguments)}: {reasons}")


def _reason(lane: Lane, checked: str, refused: Mapping[str, str]) -> str:
    return "; ".join((f"on {lane}, checked {checked}", *(f"{other}: {why}" for other, why in refused.items())))


def _sound(entry: Any, lanes: tuple[Lane, ...]) -> RightLane | None:
    """Read a remembered entry; None for one that makes no sense."""
    try:
        lane = Lane(entry["lane"])
        reason = _reason(lane, entry["checked"], dict(entry["refused"]))
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
    return RightLane(lane, reason) if lane in lanes else None


def _key(operator: str, arguments: Mapping[str, Any], lanes: tuple[Lane, ...]) -> str:
    parts = [machine(), torch.get_num_threads(), operator, _plain(arguments), lanes]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _plain(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments as JSON has them: masks and types by what they print."""
    return {
        name: value if isinstance(value, (int, float, str, bool, type(None))) else repr(value)
        for name, value in arguments.items()
    }
