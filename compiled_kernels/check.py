"""Check every backend against the specification on every case, with its known gaps."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch

from compiled_kernels.agreement import disagreement
from compiled_kernels.backends import Backend, BackendError, backend_problems, triton_interpreted
from compiled_kernels.capabilities import known_gap
from compiled_kernels.cases import Case, Suite, map_tensors, suite_of, suites
from compiled_kernels.compiled_calls import compile_call
from compiled_kernels.interpreted import interpreting, needs_interpreter
from compiled_kernels.level import available_levels, current_level, limited_to

GPU_BACKENDS = (Backend.TRITON,)  # backends with GPU kernels, which take tensors on a GPU


@dataclass(frozen=True)
class CheckResult:
    """The outcome of one case on one backend: `status` is `ok`, `gap` or `failed`, and `reason` says why it is not ok.

    `execution` is how it ran: `as written`, `compiled` (in one graph), `by hand` (a kernel), `interpreted` (a kernel in
    Triton's interpreter), or empty. `level` is the instruction set level (see level.py), empty if the machine has none.
    """

    operator: str
    backend: str
    case: str
    status: str
    reason: str = ""
    execution: str = ""
    level: str = ""


def check(
    backends: Iterable[Backend] = tuple(Backend),
    operator: str | None = None,
    compiled: bool = False,
    interpret: bool = False,
) -> Iterator[CheckResult]:
    """Yield one result for each operator, backend and case, as soon as it is known.

    A backend that does not work here is reported as a gap. Kernels of the backend mlir are compiled for and run at
    every level that this machine executes, with one result per level.

    Args:
        backends: the backends to check.
        operator: the operator to check; default: all.
        compiled: compile for the backend inductor (minutes the first time); otherwise run its traced form as written.
        interpret: without a GPU, run Triton's kernels in its interpreter, in a parallel process; their results come
            last.

    Raises:
        BackendError: for an unknown operator.
    """
    chosen = suites() if operator is None else (suite_of(operator),)
    asked = tuple(backends)
    apart = interpret and Backend.TRITON in asked and needs_interpreter()
    with interpreting([suite.operator for suite in chosen]) if apart else nullcontext(()) as interpreted_rows:
        for suite in chosen:
            for backend in asked:
                if not (apart and backend is Backend.TRITON):
                    yield from _at_levels(suite, backend, compiled and backend is Backend.INDUCTOR)
        yield from (CheckResult(**row) for row in interpreted_rows)


def _at_levels(suite: Suite, backend: Backend, compiled: bool) -> Iterator[CheckResult]:
    if backend is not Backend.MLIR or backend_problems()[backend]:
        yield from _rows(suite, backend, compiled)
        return
    for level in available_levels():
        with limited_to(level):
            rows = list(
                _rows(suite, backend, compiled)
            )  # not a generator: the caller would run at this level between results
        yield from rows


def _rows(suite: Suite, backend: Backend, compiled: bool) -> Iterator[CheckResult]:
    form = compile_call(suite, backend) if compiled else None
    for case in suite.cases:
        status, reason = verdict(suite, case, backend, form)
        yield CheckResult(
            suite.operator,
            str(backend),
            case.name,
            status,
            reason,
            _form(backend, compiled),
            str(current_level() or ""),
        )


def _form(backend: Backend, compiled: bool) -> str:
    if backend_problems()[backend]:
        return ""
    if backend in (Backend.EAGER, Backend.INDUCTOR):
        return "compiled" if compiled else "as written"
    return "interpreted" if backend is Backend.TRITON and triton_interpreted() else "by hand"


def verdict(suite: Suite, case: Case, backend: Backend, form: Callable[..., Any] | None = None) -> tuple[str, str]:
    """Return (status, reason) of one case on a backend. `form` is the compiled call, if there is one."""
    gap = known_gap(suite.operator, backend, case.name)
    if problem := backend_problems()[backend]:
        return "gap", gap.reason if gap else problem
    wrong = _wrong(suite, case, backend, form)
    if gap and not wrong:
        return "failed", f"this gap has closed; take it out of the table: {gap.reason}"
    if gap:
        return "gap", gap.reason
    return ("failed", wrong) if wrong else ("ok", "")


def _wrong(suite: Suite, case: Case, backend: Backend, form: Callable[..., Any] | None) -> str | None:
    try:
        return disagreement(suite, case, to_device(suite.make_inputs(case), device_of(backend)), backend, form)
    except BackendError as error:
        return str(error)
    except Exception as error:  # any exception is a failure of this kernel; the check continues
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def device_of(backend: Backend) -> str:
    """Return the device of a backend's tensors on this machine."""
    return "cuda" if backend in GPU_BACKENDS and not triton_interpreted() and torch.cuda.is_available() else "cpu"


def to_device(inputs: tuple, device: str) -> tuple:
    """Copy the inputs to `device` with the same strides."""
    return map_tensors(lambda each: each if each.device.type == device else copy_with_strides(each, device), inputs)


def copy_with_strides(tensor: torch.Tensor, device: str | torch.device | None = None) -> torch.Tensor:
    """Return a copy with the same strides and storage: a slice of wider rows stays a slice."""
    extents = zip(tensor.shape, tensor.stride(), strict=True)
    reach = 1 + sum((extent - 1) * stride for extent, stride in extents) if tensor.numel() else 0
    stored = tensor.as_strided((reach,), (1,)).to(device or tensor.device, copy=True)
    return stored.as_strided(tensor.shape, tensor.stride())


def main(operators: Iterable[str]) -> None:
    """Check the backend triton and print one JSON object for each case: the child process of `interpreting`."""
    rows = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # a kernel's output must not mix with the rows
    for operator in operators:
        for row in check((Backend.TRITON,), operator):
            print(json.dumps(asdict(row)), file=rows)


if __name__ == "__main__":
    main(sys.argv[1:])
