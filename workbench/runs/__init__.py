"""Folders of runs as a database: list them with SQL, compare them with intervals.

>>> from workbench.runs import compare, open_runs
>>> open_runs("runs").query("SELECT run, ttft_s.p50 FROM runs WHERE cache.format = 'int8'")  # doctest: +SKIP
>>> compare(["runs/a", "runs/b"], baseline="runs/a")  # doctest: +SKIP
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workbench.runs.comparison import Comparison, compare
    from workbench.runs.runs import Runs, open_runs

__all__ = ["Comparison", "Runs", "compare", "open_runs"]


def __getattr__(name: str) -> Any:
    """Import a name on first use, so that a listing loads no torch."""
    if name not in __all__:
        raise AttributeError(f"module 'workbench.runs' has no attribute {name!r}")
    import importlib

    home = "runs" if name in ("Runs", "open_runs") else "comparison"
    return getattr(importlib.import_module(f"workbench.runs.{home}"), name)
