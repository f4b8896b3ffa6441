"""A research workbench for LLM inference.

    >>> import workbench
    >>> prompt, text = "def fib(n):", ""
    >>> runner = workbench.load("demo", backend="eager")  # without a backend: `auto`
    >>> for event in runner.stream(prompt, max_tokens=64):
    ...     text += event.text
    >>> print(prompt + text)  # doctest: +ELLIPSIS
    def fib(n):...

An `Experiment` describes a question; `run` answers it, and `run_sweep` answers it at many points. `open_runs`,
`compare` and `reproduce` read the stored results. A notebook needs this package, and `from workbench import widgets`.
"""

import workbench.own_folder as _own_folder  # makes `experiments` importable
from workbench.lazy import attach

# ruff: noqa: F401
TYPE_CHECKING = False
if TYPE_CHECKING:
    from compiled_kernels.masks import Causal, SlidingWindow
    from workbench import testing, widgets
    from workbench.agents import demo_tools
    from workbench.agents.agent import Agent, agent
    from workbench.claims.zoo import open_zoo
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

__version__ = "2.0.0"  # pyproject.toml reads it; tools/lint/release.py holds CITATION.cff and CHANGELOG.md to it
__getattr__, __dir__ = attach(__name__)
