"""The lane `auto`: for an operator and its shapes the fastest correct one, measured on this machine and remembered."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from compiled_kernels.cases import Case, Work, suite_of
from compiled_kernels.lanes import Lane, LaneError, lane_problems
from compiled_kernels.measure import Measurement, measure
from compiled_kernels.remembered import Remembered, cpu_model, directory, machine

FILE = "lanes.json"
TIE = 0.97  # a lane must take less than this share of the time of one that stands before it: a tie changes nothing
CLEARLY = 0.8  # and the lane eager, so that no noise leaves a machine without its compiled code, less than this
TRIALS = 3  # at most
NOISY = 1.3  # a median this much above the 10th percentile: others were at work, the lanes are timed again


@dataclass(frozen=True)
class Choice:
    """`seconds` of one call by lane, the least 10th percentile of the trials, which other processes disturb least;
    `reason` says what was measured, and why the others were not."""

    lane: Lane
    reason: str
    seconds: Mapping[Lane, float] = field(default_factory=dict)


def best_lane(
    operator: str, arguments: Mapping[str, Any], lanes: Iterable[Lane] = tuple(Lane), folder: Path | None = None
) -> Choice:
    """The fastest of `lanes`, which stand in order of preference, on inputs of these shapes, types and flags.

    `arguments` are those of the operator's cases (`Case.arguments`), the threads torch's present ones. It is
    measured once (that takes seconds: lanes are compiled for it), then remembered in `folder`, by default
    `$WORKBENCH_CACHE_DIR` or the user's cache. A lane whose result is wrong here is never chosen. Raises LaneError
    for an unknown operator and where none of `lanes` works.
    """
    lanes, kept = tuple(lanes), Remembered((folder or directory()) / FILE)
    key = key_of_choice(operator, arguments, lanes)
    choice = _choice(kept.load().get(key), lanes)
    if choice is not None:
        return choice
    found = _measured(operator, arguments, lanes)
    entry = {
        "operator": operator,
        "arguments": plain(arguments),
        "seconds": {str(lane): timing.p10 for lane, timing in found.timings.items()},
        "refused": {str(lane): reason for lane, reason in found.refused.items()},
        "measured": f"with {torch.get_num_threads()} threads on {cpu_model()}, {datetime.now(UTC):%Y-%m-%d}",
    }
    choice = _choice(entry, lanes)
    if choice is None:
        reasons = "; ".join(f"{lane}: {reason}" for lane, reason in found.refused.items()) or "no lane was given"
        raise LaneError(f"{operator}: no lane works for {plain(arguments)}: {reasons}")
    kept.add(key, entry)
    return choice


def _measured(operator: str, arguments: Mapping[str, Any], lanes: tuple[Lane, ...]) -> Measurement:
    idle = {lane: problem for lane in lanes if (problem := lane_problems()[lane])}
    working = [lane for lane in lanes if lane not in idle]
    suite, case = suite_of(operator), Case("chosen", arguments, Work(0, 0))
    found = measure(suite, case, working, budget_seconds=0.2)
    for _ in range(TRIALS - 1):
        if len(found.timings) < 2 or not any(each.seconds > NOISY * each.p10 for each in found.timings.values()):
            break
        again = measure(suite, case, found.timings, budget_seconds=0.2)
        least = {
            lane: min(each, found.timings[lane], key=lambda timing: timing.p10) for lane, each in again.timings.items()
        }
        found = replace(found, timings={**found.timings, **least})
    return replace(found, refused={**found.refused, **idle})


def _choice(entry: Any, lanes: tuple[Lane, ...]) -> Choice | None:
    """What follows from the figures of `entry`; None where it holds none, or nothing that makes sense."""
    try:
        seconds = {Lane(lane): float(entry["seconds"][lane]) for lane in lanes if lane in entry["seconds"]}
        order = sorted(seconds, key=lambda lane: seconds[lane])
        told = [f"{lane}: {1e6 * seconds[lane]:,.1f} us" for lane in order]
        told += [f"{lane} not timed: {reason}" for lane, reason in entry["refused"].items()]
        reason = f"{', '.join(told)}, measured {entry['measured']}"
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
    if not seconds or not all(0 < value < float("inf") for value in seconds.values()):
        return None
    chosen, *others = seconds
    for lane in others:
        if seconds[lane] < (CLEARLY if lane is Lane.EAGER else TIE) * seconds[chosen]:
            chosen = lane
    return Choice(chosen, reason, seconds)


def key_of_choice(operator: str, arguments: Mapping[str, Any], lanes: tuple[Lane, ...]) -> str:
    parts = [machine(), torch.get_num_threads(), operator, plain(arguments), lanes]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def plain(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments as JSON has them: masks and types by what they print."""
    return {
        name: value if isinstance(value, (int, float, str, bool, type(None))) else repr(value)
        for name, value in arguments.items()
    }
