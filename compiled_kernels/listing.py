"""List the operators, each with its formula, source file and backends."""

from __future__ import annotations

import inspect
from collections import Counter
from pathlib import Path
from typing import Any

import torch

import compiled_kernels
from compiled_kernels.backends import Backend
from compiled_kernels.capabilities import GAPS
from compiled_kernels.cases import Suite, suites

ROOT = Path(__file__).resolve().parents[1]


def list_operators() -> list[dict[str, Any]]:
    """Return an entry for each operator: name, formula, source of the idea, place in the code, backends, number of
    cases and of timed cases, and gaps (backend, cases, reason)."""
    return [_entry(suite) for suite in suites()]


def _entry(suite: Suite) -> dict[str, Any]:
    call = inspect.unwrap(getattr(compiled_kernels, suite.operator))
    module = inspect.getmodule(call)
    place = Path(inspect.getsourcefile(call) or "").resolve()
    return {
        "operator": suite.operator,
        "formula": _first_line(call.__doc__),
        "source": _first_line(module.__doc__ if module else ""),
        "place": f"{place.relative_to(ROOT).as_posix()}:{inspect.getsourcelines(call)[1]}",
        "backends": [str(backend) for backend in Backend if _has(suite.operator, backend)],
        "cases": len(suite.cases),
        "timed": sum(case.timed for case in suite.cases),
        "gaps": _gaps(suite),
    }


def _has(operator: str, backend: Backend) -> bool:
    return backend in (Backend.EAGER, Backend.INDUCTOR) or hasattr(torch.ops.compiled_kernels, f"{operator}_{backend}")


def _gaps(suite: Suite) -> list[dict[str, Any]]:
    found = Counter(
        (str(gap.backend), gap.reason)
        for gap in GAPS
        for case in suite.cases
        if gap.covers(suite.operator, gap.backend, case.name)
    )
    return [{"backend": backend, "cases": count, "reason": reason} for (backend, reason), count in found.items()]


def _first_line(text: str | None) -> str:
    """Return the first sentence or line of a docstring, unbroken."""
    return " ".join(inspect.cleandoc(text or "").split("\n\n")[0].split())
