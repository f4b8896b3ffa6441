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

OPEN: Any = widget._instances  # by model id
PROMPT = "def f(x):\n"


def played(view: Any, *forms: Any) -> Any:
    """Play with other settings too: a view makes runners of its own for them, and controls that errors hide."""
    for form in forms:
        form.write({"sampling": {"beams": 3, "stop": ["x"], "max_tokens": 3}, "cache": {"prefix": {"kind": "radix"}}})
        form.write({"sampling": {"beams": 0, "stop": []}, "cache": {"page_size": 32, "prefix": {"kind": "off"}}})
    getattr(view, "play" if len(forms) > 1 else "run")()
    assert view.wait()
    return view


def playground(runner: Runner) -> widgets.Playground:
    view = widgets.Playground(runner, PROMPT)
    return played(view, view.settings)


def side_by_side(runner: Runner) -> widgets.SideBySide:
    view = widgets.SideBySide(runner, PROMPT)
    return played(view, *view.forms.sides)


def ablated(runner: Runner) -> widgets.TokenPath:
    """Follow a token, with a long text under way of the engine's and one without a head."""
    view = widgets.TokenPath(runner, PROMPT, section="ablation", max_tokens=500, ignore_eos=True)
    view.heads_off = ((0, 1),)
    return view


VIEWS: dict[str, Callable[[Runner], Any]] = {
    "graph": lambda runner: widgets.ModelGraph(runner, tokens=9, ceilings="h100").measure(),
    "playground": playground,
    "side by side": side_by_side,
    "path": ablated,
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_closed_view_leaves_nothing_behind(name: str) -> None:
    shown, threads = set(OPEN), set(threading.enumerate())
    runner = load("demo", backend="eager")
    gone = weakref.ref(runner)
    made = VIEWS[name](runner)
    (view,) = (OPEN[each] for each in set(OPEN) - shown if type(OPEN[each]).__name__ in dir(widgets))
    assert view is not None
    view.close()
    view.close()  # a second time does nothing
    del runner, made
    for each in set(threading.enumerate()) - threads:
        each.join(limit(60))
    gc.collect()
    assert [type(OPEN[each]).__name__ for each in set(OPEN) - shown] == []
    assert gone() is None and set(threading.enumerate()) <= threads
