"""Widgets: show and control a running model, a record or plain arrays in a notebook.

Each widget is one call on a cell's last line, and is imported when first used.
"""

from workbench.lazy import attach

# ruff: noqa: F401
TYPE_CHECKING = False
if TYPE_CHECKING:
    from workbench.engine.runner_thread import RunnerThread, between_steps
    from workbench.widgets.attention.view import AttentionView
    from workbench.widgets.chat.view import Chat
    from workbench.widgets.claims.view import Claims
    from workbench.widgets.compare.view import Compare
    from workbench.widgets.course.view import Course
    from workbench.widgets.exercise.view import Exercise
    from workbench.widgets.fleet.view import FleetView
    from workbench.widgets.kernels.view import KernelView
    from workbench.widgets.live_bench.view import LiveBench
    from workbench.widgets.memory.view import MemoryCalculator
    from workbench.widgets.model_graph.roofline import RooflinePoint
    from workbench.widgets.model_graph.view import ModelGraph
    from workbench.widgets.pages.view import PageMap
    from workbench.widgets.playground.view import Playground
    from workbench.widgets.prompt.view import PromptView
    from workbench.widgets.sampling.view import SamplingExplorer
    from workbench.widgets.server.view import ServerView
    from workbench.widgets.speculation.view import SpeculationView
    from workbench.widgets.timeline.view import Timeline
    from workbench.widgets.token_path.view import TokenPath
    from workbench.widgets.tokens.view import TokenView

__getattr__, __dir__ = attach(__name__)
