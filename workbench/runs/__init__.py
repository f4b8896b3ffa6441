"""Treat folders of runs as a database: list runs with SQL, and compare them with confidence intervals.

>>> from workbench.runs import compare, open_runs
>>> open_runs("runs").query("SELECT run, ttft_s.p50 FROM runs WHERE cache.format = 'int8'")  # doctest: +SKIP
>>> compare(["runs/a", "runs/b"], baseline="runs/a")  # doctest: +SKIP
"""

from workbench.lazy import attach

# ruff: noqa: F401
TYPE_CHECKING = False
if TYPE_CHECKING:
    from workbench.runs.comparison import Comparison, compare
    from workbench.runs.runs import Runs, open_runs

__getattr__, __dir__ = attach(__name__)
