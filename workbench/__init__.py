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
    from compiled_kernels.masks import Causal, SlidingWindow
    from workbench import testing, widgets
    from workbench.agents import demo_tools
    from workbench.agents.agent import Agent, agent
    from workbench.cluster.cluster import Cluster
    from workbench.cluster.pools import PrefillDecodePools
    from workbench.constrained.grammar_trace import trace_grammar
    from workbench.custom import register
    from workbench.engine.beam_search import beam_search
    from workbench.engine.config import EngineConfig
    from workbench.engine.load import load
    from workbench.engine.runner import Runner
    from workbench.errors import WorkbenchError
    from workbench.experiment.build import runner_for
    from workbench.experiment.experiment import Experiment
    from workbench.gateway.gate import Gateway
    from workbench.inspect.mask_picture import draw_mask
    from workbench.measure.quality.teacher_forcing import ForcedText, ReferenceLogits, measure_divergence
    from workbench.measure.run import run
    from workbench.measure.simulated import fleet_for
    from workbench.memory.capacity import break_even_context
    from workbench.memory.measured import compare_memory
    from workbench.model.cost import StepCostModel
    from workbench.model.shapes import named_shape
    from workbench.models.store import default_model
    from workbench.prompt.conversation import Conversation
    from workbench.reports.reproduce import reproduce
    from workbench.request import Request, SamplingParameters
    from workbench.runs.comparison import compare
    from workbench.runs.metrics import summarize
    from workbench.runs.record import Record
    from workbench.runs.runs import open_runs
    from workbench.sampling.filter_trace import entropy_bits, trace_filters
    from workbench.sampling.filters import History
    from workbench.serve.server import serve
    from workbench.sweep.run import run_sweep
    from workbench.trace.recorder import Recorder
    from workbench.zoo.zoo import open_zoo

__version__ = "1.0.0"  # pyproject.toml reads it; tools/lint/release.py holds CITATION.cff and CHANGELOG.md to it
__all__ = [
    "Agent", "Causal", "Cluster", "Conversation", "EngineConfig", "Experiment", "ForcedText", "Gateway", "History",
    "PrefillDecodePools", "Record", "Recorder", "ReferenceLogits", "Request", "Runner", "SamplingParameters",
    "SlidingWindow", "StepCostModel", "WorkbenchError", "__version__", "agent", "beam_search", "break_even_context",
    "compare", "compare_memory", "default_model", "demo_tools", "draw_mask", "entropy_bits", "fleet_for", "load",
    "measure_divergence", "named_shape", "open_runs", "open_zoo", "register", "reproduce", "run", "run_sweep",
    "runner_for", "serve", "summarize", "testing", "trace_filters", "trace_grammar", "widgets",
]  # fmt: skip

_HOMES = {
    "Agent": "workbench.agents.agent",
    "agent": "workbench.agents.agent",
    "beam_search": "workbench.engine.beam_search",
    "break_even_context": "workbench.memory.capacity",
    "Causal": "compiled_kernels.masks",
    "Cluster": "workbench.cluster.cluster",
    "compare": "workbench.runs.comparison",
    "compare_memory": "workbench.memory.measured",
    "Conversation": "workbench.prompt.conversation",
    "demo_tools": "workbench.agents.demo_tools",
    "draw_mask": "workbench.inspect.mask_picture",
    "EngineConfig": "workbench.engine.config",
    "entropy_bits": "workbench.sampling.filter_trace",
    "Experiment": "workbench.experiment.experiment",
    "fleet_for": "workbench.measure.simulated",
    "ForcedText": "workbench.measure.quality.teacher_forcing",
    "Gateway": "workbench.gateway.gate",
    "History": "workbench.sampling.filters",
    "load": "workbench.engine.load",
    "measure_divergence": "workbench.measure.quality.teacher_forcing",
    "default_model": "workbench.models.store",
    "named_shape": "workbench.model.shapes",
    "open_runs": "workbench.runs.runs",
    "open_zoo": "workbench.zoo.zoo",
    "PrefillDecodePools": "workbench.cluster.pools",
    "Record": "workbench.runs.record",
    "Recorder": "workbench.trace.recorder",
    "ReferenceLogits": "workbench.measure.quality.teacher_forcing",
    "register": "workbench.custom",
    "reproduce": "workbench.reports.reproduce",
    "Request": "workbench.request",
    "run": "workbench.measure.run",
    "run_sweep": "workbench.sweep.run",
    "Runner": "workbench.engine.runner",
    "runner_for": "workbench.experiment.build",
    "SamplingParameters": "workbench.request",
    "serve": "workbench.serve",
    "SlidingWindow": "compiled_kernels.masks",
    "StepCostModel": "workbench.model.cost",
    "summarize": "workbench.runs.metrics",
    "testing": "workbench.testing",
    "trace_filters": "workbench.sampling.filter_trace",
    "trace_grammar": "workbench.constrained.grammar_trace",
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
    return home if home.__name__.endswith(f".{name}") and not hasattr(home, name) else getattr(home, name)
