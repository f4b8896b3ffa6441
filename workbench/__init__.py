"""A research workbench for LLM inference.

    >>> import workbench
    >>> prompt, text = "def fib(n):", ""
    >>> runner = workbench.load("demo", backend="eager")  # without a backend: `auto`
    >>> for event in runner.stream(prompt, max_tokens=64):
    ...     text += event.text
    >>> print(prompt + text)  # doctest: +ELLIPSIS
    def fib(n):...

A question is an `Experiment`; `run` answers it, `run_sweep` at many points, and `open_runs`, `compare` and `reproduce`
read what they left. Cells of a notebook need this package, and `from workbench import widgets`.
"""

import typing as _typing  # private, like every name here that is not public

if _typing.TYPE_CHECKING:
    from workbench import widgets
    from workbench.custom import register
    from workbench.engine.beam_search import beam_search
    from workbench.engine.load import load
    from workbench.errors import WorkbenchError
    from workbench.experiment.experiment import Experiment
    from workbench.measure.run import run
    from workbench.reports.reproduce import reproduce
    from workbench.request import Request, SamplingParameters
    from workbench.runs.comparison import compare
    from workbench.runs.record import Record
    from workbench.runs.runs import open_runs
    from workbench.sweep.run import run_sweep

__version__ = "0.1.0"
__all__ = [
    "Experiment", "Record", "Request", "SamplingParameters", "WorkbenchError", "__version__", "beam_search", "compare",
    "load", "open_runs", "register", "reproduce", "run", "run_sweep", "widgets",
]  # fmt: skip

_HOMES = {
    "beam_search": "workbench.engine.beam_search",
    "compare": "workbench.runs.comparison",
    "Experiment": "workbench.experiment.experiment",
    "load": "workbench.engine.load",
    "open_runs": "workbench.runs.runs",
    "Record": "workbench.runs.record",
    "register": "workbench.custom",
    "reproduce": "workbench.reports.reproduce",
    "Request": "workbench.request",
    "run": "workbench.measure.run",
    "run_sweep": "workbench.sweep.run",
    "SamplingParameters": "workbench.request",
    "widgets": "workbench.widgets",
    "WorkbenchError": "workbench.errors",
}


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> object:
    """Names are fetched when first used: `import workbench` alone loads no torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'workbench' has no attribute {name!r}")
    import importlib

    home = importlib.import_module(_HOMES[name])
    return home if home.__name__ == f"workbench.{name}" else getattr(home, name)
