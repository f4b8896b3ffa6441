"""A view that is closed leaves no thread, no widget and no runner behind, though a cell's Out keeps the view itself."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from ipywidgets.widgets import widget

from tests.patience import limit
from workbench import widgets
from workbench.engine.load import load
from workbench.engine.runner import Runner
from workbench.widgets.view import PictureWidget

OPEN: Any = widget._instances  # by model id
PROMPT = "def f(x):\n"


def played(view: widgets.Playground) -> widgets.Playground:
    """Play with other settings too: a view makes runners of its own for them, and controls that errors hide."""
    for form in view.settings.forms:
        form.write({"sampling": {"beams": 3, "stop": ["x"], "max_tokens": 3}, "cache": {"prefix": {"kind": "radix"}}})
        form.write({"sampling": {"beams": 0, "stop": []}, "cache": {"page_size": 32, "prefix": {"kind": "off"}}})
    view.run()
    return waited(view)


def ablated(runner: Runner) -> widgets.TokenPath:
    """Follow a token, with a long text under way of the engine's and one without a head."""
    view = widgets.TokenPath(runner, PROMPT, section="ablation", max_tokens=500, ignore_eos=True)
    view.heads_off = ((0, 1),)
    return view


def waited(view: Any) -> Any:
    view.wait()
    return view


def chat(runner: Runner) -> widgets.Chat:
    view = widgets.Chat(runner, max_tokens=3)
    view.send("a")
    return waited(view)


VIEWS: dict[str, Callable[[Runner], Any]] = {
    "AttentionView": lambda runner: waited(widgets.AttentionView(runner, PROMPT, max_tokens=3)),
    "Chat": chat,
    "LiveBench": lambda runner: widgets.LiveBench(runner, rate=1.0),
    "MemoryCalculator": lambda runner: widgets.MemoryCalculator(runner=runner),
    "ModelGraph": lambda runner: widgets.ModelGraph(runner, tokens=9, ceilings="h100").measure(),
    "PageMap": widgets.PageMap,
    "Playground": lambda runner: played(widgets.Playground(runner, PROMPT)),
    "PromptView": lambda runner: widgets.PromptView(runner, "a"),
    "SamplingExplorer": lambda runner: waited(widgets.SamplingExplorer(runner, PROMPT, max_tokens=3)),
    "Playground of two columns": lambda runner: played(widgets.Playground(runner, PROMPT, beside={})),
    "SpeculationView": lambda runner: waited(
        widgets.SpeculationView(runner, PROMPT, speculate="prompt_lookup", rounds=1, max_tokens=3)
    ),
    "Timeline": widgets.Timeline,
    "TokenPath": ablated,
}
NO_RUNNER = {  # these show numbers, files, a server or a fleet
    "Claims", "Compare", "Course", "Exercise", "FleetView", "KernelView", "ServerView", "TokenView",
}  # fmt: skip


def test_every_view_is_among_these() -> None:
    classes = {name: getattr(widgets, name) for name in dir(widgets)}
    views = {name for name, each in classes.items() if isinstance(each, type) and issubclass(each, PictureWidget)}
    assert views == {name.partition(" ")[0] for name in VIEWS} | NO_RUNNER and NO_RUNNER.isdisjoint(VIEWS)


@pytest.mark.parametrize("name", VIEWS)
def test_a_closed_view_leaves_nothing_behind(name: str) -> None:
    shown, threads = set(OPEN), set(threading.enumerate())
    runner = load("demo-chat" if name in ("Chat", "PromptView") else "demo", backend="eager")
    gone = [weakref.ref(runner), weakref.ref(runner.model)]
    made = VIEWS[name](runner)
    (view,) = (OPEN[each] for each in set(OPEN) - shown if type(OPEN[each]).__name__ == name.partition(" ")[0])
    view.close()
    view.close()  # a second time does nothing
    del runner, made
    for each in set(threading.enumerate()) - threads:
        each.join(limit(60))
    gc.collect()
    assert [type(OPEN[each]).__name__ for each in set(OPEN) - shown] == []
    assert [each() for each in gone] == [None, None] and set(threading.enumerate()) <= threads
    view.throttle.flush()  # of a mark that came late
    view.keep()
