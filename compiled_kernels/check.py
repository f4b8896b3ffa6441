"""Every lane held to the specification, over every case, with its gaps listed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from compiled_kernels.cases import Case, Suite, disagreement, suite_of, suites
from compiled_kernels.compiled import one_call
from compiled_kernels.gaps import known_gap
from compiled_kernels.interpreted import needs_interpreter, rows_of_interpreter
from compiled_kernels.lanes import Lane, LaneError, interpreted, lane_problems

ON_CUDA = (Lane.TRITON,)  # lanes whose kernels are for a GPU, and take tensors that lie there


@dataclass(frozen=True)
class Row:
    """One case on one lane: `status` is `ok`, `gap` or `failed`, and `reason` says why it is not ok.

    `form` is how it ran: `as written`, `compiled` (one graph), `interpreted` (by Triton, on the CPU), or nothing.
    """

    operator: str
    lane: str
    case: str
    status: str
    reason: str = ""
    form: str = ""


def check(
    lanes: Iterable[Lane] = tuple(Lane), operator: str | None = None, compiled: bool = False, interpret: bool = False
) -> Iterator[Row]:
    """A row for each operator, lane and case, as they are found; a lane that does not work here is a gap.

    `compiled` compiles what the lane inductor would (the first time, minutes), else its traced form runs as
    written. `interpret` runs Triton's kernels in its interpreter, in a process of their own, where no GPU is at
    hand. Raises LaneError for an unknown operator.
    """
    for suite in suites() if operator is None else (suite_of(operator),):
        for lane in lanes:
            if lane is Lane.TRITON and interpret and needs_interpreter():
                yield from (Row(**row) for row in rows_of_interpreter(suite.operator))
            else:
                yield from _rows(suite, lane, compiled and lane is Lane.INDUCTOR)


def _rows(suite: Suite, lane: Lane, compiled: bool) -> Iterator[Row]:
    form = one_call(suite, lane) if compiled else None
    how = "compiled" if compiled else "interpreted" if lane is Lane.TRITON and interpreted() else "as written"
    for case in suite.cases:
        status, reason = verdict(suite, case, lane, form)
        yield Row(suite.operator, str(lane), case.name, status, reason, "" if lane_problems()[lane] else how)


def verdict(suite: Suite, case: Case, lane: Lane, form: Callable[..., Any] | None = None) -> tuple[str, str]:
    """(status, reason) of one case; `form(*inputs)` is the lane's call, compiled."""
    gap = known_gap(suite.operator, lane, case.name, compiled=form is not None)
    if problem := lane_problems()[lane]:
        return "gap", gap.reason if gap else problem
    try:
        inputs = moved(suite.make(case), device_of(lane))
        wrong = disagreement(suite, case, inputs, lane, form)
    except LaneError as error:
        wrong = str(error)
    except Exception as error:  # whatever a kernel throws is its failure, and the rest goes on
        wrong = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    if wrong and gap:
        return "gap", gap.reason
    if wrong:
        return "failed", wrong
    return ("failed", f"this gap has closed; take it out of the table: {gap.reason}") if gap else ("ok", "")


def device_of(lane: Lane) -> str:
    """Where the lane's tensors lie on this machine."""
    return "cuda" if lane in ON_CUDA and not interpreted() and torch.cuda.is_available() else "cpu"


def moved(inputs: tuple, device: str) -> tuple:
    return tuple(each.to(device) if isinstance(each, torch.Tensor) else each for each in inputs)

