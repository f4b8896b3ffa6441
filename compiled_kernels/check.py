"""A check of every backend against the specification, over every case, with its gaps listed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from compiled_kernels.cases import Case, Suite, disagreement, suite_of, suites
from compiled_kernels.compiled import one_call
from compiled_kernels.gaps import known_gap
from compiled_kernels.interpreted import interpreting, needs_interpreter
from compiled_kernels.lanes import Lane, LaneError, interpreted, lane_problems
from compiled_kernels.level import held_to, level_here, levels_here

ON_CUDA = (Lane.TRITON,)  # lanes whose kernels are for a GPU, and take tensors that lie there


@dataclass(frozen=True)
class Row:
    """The outcome of one case on one backend: `status` is `ok`, `gap` or `failed`, and `reason` says why it is not ok.

    `execution` is how it ran: `as written`, `compiled` (in one graph), `by hand` (a kernel), `interpreted` (a kernel
    in Triton's interpreter), or nothing. `level` is that of the instruction set (see level.py), or nothing where the
    machine has none.
    """

    operator: str
    lane: str
    case: str
    status: str
    reason: str = ""
    form: str = ""
    level: str = ""


def check(
    lanes: Iterable[Lane] = tuple(Lane), operator: str | None = None, compiled: bool = False, interpret: bool = False
) -> Iterator[Row]:
    """Yield one result for each operator, backend and case, as they are found.

    A backend that does not work here is a gap. Kernels of the backend mlir are made for, and run at, every level that
    this machine executes: a result each.

    Args:
        lanes: the backends to check.
        operator: one operator; all unless given.
        compiled: compile for the backend inductor (minutes the first time); otherwise its traced form runs as written.
        interpret: run Triton's kernels in its interpreter where no GPU is at hand, in a process of its own meanwhile;
            their results come last.

    Raises:
        LaneError: for an unknown operator.
    """
    chosen = suites() if operator is None else (suite_of(operator),)
    asked = tuple(lanes)
    apart = interpret and Lane.TRITON in asked and needs_interpreter()
    with interpreting([suite.operator for suite in chosen]) if apart else nullcontext(()) as interpreted_rows:
        for suite in chosen:
            for lane in asked:
                if not (apart and lane is Lane.TRITON):
                    yield from _at_levels(suite, lane, compiled and lane is Lane.INDUCTOR)
        yield from (Row(**row) for row in interpreted_rows)


def _at_levels(suite: Suite, lane: Lane, compiled: bool) -> Iterator[Row]:
    if lane is not Lane.MLIR or lane_problems()[lane]:
        yield from _rows(suite, lane, compiled)
        return
    for level in levels_here():
        with held_to(level):
            rows = list(_rows(suite, lane, compiled))  # not a generator: the caller would run at this level meanwhile
        yield from rows


def _rows(suite: Suite, lane: Lane, compiled: bool) -> Iterator[Row]:
    form = one_call(suite, lane) if compiled else None
    for case in suite.cases:
        status, reason = verdict(suite, case, lane, form)
        yield Row(suite.operator, str(lane), case.name, status, reason, _form(lane, compiled), str(level_here() or ""))


def _form(lane: Lane, compiled: bool) -> str:
    if lane_problems()[lane]:
        return ""
    if lane in (Lane.EAGER, Lane.INDUCTOR):
        return "compiled" if compiled else "as written"
    return "interpreted" if lane is Lane.TRITON and interpreted() else "by hand"


def verdict(suite: Suite, case: Case, lane: Lane, form: Callable[..., Any] | None = None) -> tuple[str, str]:
    """Return (status, reason) of one case; `execution(*inputs)` is the lane's call, compiled."""
    gap = known_gap(suite.operator, lane, case.name)
    if problem := lane_problems()[lane]:
        return "gap", gap.reason if gap else problem
    wrong = _wrong(suite, case, lane, form)
    if gap and not wrong:
        return "failed", f"this gap has closed; take it out of the table: {gap.reason}"
    if gap:
        return "gap", gap.reason
    return ("failed", wrong) if wrong else ("ok", "")


def _wrong(suite: Suite, case: Case, lane: Lane, form: Callable[..., Any] | None) -> str | None:
    try:
        return disagreement(suite, case, moved(suite.make(case), device_of(lane)), lane, form)
    except LaneError as error:
        return str(error)
    except Exception as error:  # any exception is the failure of this kernel; the rest goes on
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def device_of(lane: Lane) -> str:
    """Return the device on which a backend's tensors lie on this machine."""
    return "cuda" if lane in ON_CUDA and not interpreted() and torch.cuda.is_available() else "cpu"


def moved(inputs: tuple, device: str) -> tuple:
    """Return the inputs on `device`, laid out there as they are here."""
    return tuple(
        copied(each, device) if isinstance(each, torch.Tensor) and each.device.type != device else each
        for each in inputs
    )


def copied(tensor: torch.Tensor, device: str | torch.device | None = None) -> torch.Tensor:
    """Return a copy with the same strides, with what lies between its numbers: a slice of wider rows stays one."""
    extents = zip(tensor.shape, tensor.stride(), strict=True)
    reach = 1 + sum((extent - 1) * stride for extent, stride in extents) if tensor.numel() else 0
    stored = tensor.as_strided((reach,), (1,)).to(device or tensor.device, copy=True)
    return stored.as_strided(tensor.shape, tensor.stride())
