"""Every widget is controls and a picture that is a function of its state."""

from __future__ import annotations

import gc
import importlib
import pkgutil
import sys
import threading
import tomllib
import weakref
import xml.etree.ElementTree as ET
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import anywidget
import ipywidgets
import pytest
import traitlets
from anywidget._file_contents import FileContents
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.tiny import model_of, request, runner_of, spec_of
from tests.patience import limit
from workbench import svg, widgets
from workbench.engine.runner import Runner
from workbench.engine.runner_thread import RunnerThread
from workbench.trace.events import Event
from workbench.widgets import cell_views
from workbench.widgets import throttle as throttle_module
from workbench.widgets import view as view_module
from workbench.widgets.throttle import Throttle
from workbench.widgets.view import PictureWidget

ROOT = Path(__file__).resolve().parents[2]
WORDS = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs")), max_size=20)


class Count(PictureWidget):
    number = traitlets.Int(0)

    def __init__(self) -> None:
        super().__init__()
        self.watch("number")
        self.show()

    def picture(self) -> str:
        return svg.document(100, 20, svg.text(2, 15, str(self.number)), title="a number")


def test_a_view_offers_its_picture_beside_the_live_view() -> None:
    view = Count()
    bundle = view._repr_mimebundle_()
    assert bundle["application/vnd.jupyter.widget-view+json"]["model_id"] == view.model_id
    assert bundle["image/svg+xml"] == view.picture() == view.shown.content
    assert "wb-count" in view._dom_classes


class Cells:
    """Stands for IPython: runs a cell that shows some views."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.ends: list[Callable[[], None]] = []
        events = SimpleNamespace(register=lambda _, callback: self.ends.append(callback))
        self.shell = SimpleNamespace(parent_header={}, kernel=None, events=events)
        monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: self.shell))
        monkeypatch.setattr(view_module, "_publish", lambda *_, **__: None)
        monkeypatch.setattr(cell_views, "_RUNS", {})
        monkeypatch.setattr(cell_views, "_WATCHED", set())
        self.runs = 0

    def run(self, cell: str, *views: Count) -> None:
        self.runs += 1
        self.shell.parent_header = {"metadata": {"cellId": cell}, "header": {"msg_id": str(self.runs)}}
        for view in views:
            view._ipython_display_()
        for end in self.ends:
            end()


def test_a_view_that_two_cells_show_is_closed_with_the_last_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = Cells(monkeypatch)
    view, second, third = Count(), Count(), Count()
    cells.run("a", view)
    cells.run("b", view)
    cells.run("a", second)
    assert view.comm is not None  # cell b shows it
    cells.run("b", third)
    assert view.comm is None and second.comm is not None and third.comm is not None


def test_views_that_a_cell_shows_again_stay_open(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = Cells(monkeypatch)
    first, second = Count(), Count()
    cells.run("a", first, second)
    cells.run("a", second, first)  # made in another cell
    assert first.comm is not None and second.comm is not None
    cells.run("a", second)
    assert first.comm is None and second.comm is not None
    cells.run("a")  # shows nothing any more
    assert second.comm is None


def test_a_view_closed_by_hand_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = Cells(monkeypatch)
    view = Count()
    cells.run("a", view)
    cells.run("b", view)
    view.close()
    assert not any(run.views or run.earlier for run in cell_views._RUNS.values())


def test_a_view_that_cannot_be_closed_keeps_no_other_open(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Stuck(Count):
        def close(self) -> None:
            raise OSError("its process does not end")

    cells = Cells(monkeypatch)
    stuck, other = Stuck(), Count()
    cells.run("a", stuck, other)
    cells.run("a")
    assert other.comm is None and "its process does not end" in caplog.text
    Count.close(stuck)


def test_views_in_a_readers_own_boxes_are_found() -> None:
    first, second = Count(), Count()
    box = ipywidgets.HBox([first, ipywidgets.VBox([ipywidgets.Label(), second])])
    assert view_module.views_in(box) == [first, second]
    for each in (first, second):
        each.close()
    box.close()


@pytest.mark.parametrize("made", [widgets.PageMap, partial(widgets.ModelGraph, ceilings="h100")])
def test_a_view_that_hears_a_runner_can_be_drawn(
    made: Callable[[Runner], PictureWidget], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step may end, and its redraw begin in another thread, as soon as the view listens."""
    listen, errors = RunnerThread.listen, list[str]()

    def listen_to_a_step(live: RunnerThread, listener: Callable[[Event], None]) -> Callable[[], None]:
        leave, handle = listen(live, listener), live.submit([request("a", 5, 2)])
        handle.wait()
        errors.append(handle.error)
        return leave

    monkeypatch.setattr(RunnerThread, "listen", listen_to_a_step)
    monkeypatch.setattr(Throttle, "mark", Throttle.flush)
    view = made(runner_of(model_of(spec_of())))
    assert errors == [""]
    view.close()


def test_a_change_is_drawn_and_the_last_one_last() -> None:
    view = Count()
    for number in range(50):
        view.number = number
    view.throttle.flush()
    assert ">49<" in view.shown.content
    view.close()
    view.number = 50


class Clock:
    """Stands for the modules time and threading: time goes on, and timers ring, when a test says so. In eighths of a
    second, which add up exactly."""

    Lock, RLock = staticmethod(threading.Lock), staticmethod(threading.RLock)

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[SimpleNamespace] = []

    def monotonic(self) -> float:
        return self.now

    def Timer(self, delay: float, ring: Callable[[], None]) -> SimpleNamespace:  # noqa: N802
        timer = SimpleNamespace(at=self.now + delay, ring=ring, daemon=False)
        timer.start, timer.cancel = lambda: self.timers.append(timer), lambda: self.cancel(timer)
        return timer

    def cancel(self, timer: SimpleNamespace) -> None:
        if timer in self.timers:  # one that has rung may be cancelled
            self.timers.remove(timer)

    def pass_by(self, seconds: float) -> None:
        until = self.now + seconds
        while due := [timer for timer in self.timers if timer.at <= until]:
            first = min(due, key=lambda timer: timer.at)
            self.timers.remove(first)
            self.now = max(self.now, first.at)
            first.ring()
        self.now = max(self.now, until)


def test_a_later_mark_replaces_the_one_before_it_and_ends_with_the_throttle(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, at = Clock(), []
    monkeypatch.setattr(throttle_module, "time", clock)
    monkeypatch.setattr(throttle_module, "threading", clock)
    throttle = Throttle(lambda: at.append(clock.now))
    throttle.mark_later(1.0)
    clock.pass_by(0.5)
    throttle.mark_later(1.0)
    clock.pass_by(2.0)
    assert at == [1.5]
    throttle.mark_later(1.0)
    throttle.stop()
    throttle.mark_later(1.0)
    clock.pass_by(2.0)
    assert at == [1.5] and not clock.timers


def test_a_throttle_never_draws_twice_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, drawing, together = Clock(), threading.Lock(), []
    begun, again = threading.Event(), threading.Event()

    def draw() -> None:
        together.append(not drawing.acquire(blocking=False))
        if not begun.is_set():
            begun.set()
            again.wait(limit(0.02))  # the second has its chance
        elif drawing.locked() and together[-1]:
            again.set()
            return
        drawing.release()

    monkeypatch.setattr(throttle_module, "time", clock)
    monkeypatch.setattr(throttle_module, "threading", clock)
    throttle = Throttle(draw)
    threads = []
    for _ in range(2):
        throttle.mark()
        threads.append(threading.Thread(target=clock.timers.pop().ring))
        threads[-1].start()
        begun.wait()
    for thread in threads:
        thread.join()
    assert together == [False, False]


def test_what_is_marked_can_be_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throttle_module, "threading", Clock())
    drawn: list[str] = []
    marked, idle = (Throttle(partial(drawn.append, name)) for name in ("marked", "idle"))
    marked.mark()
    throttle_module.flush_all()
    assert drawn == ["marked"] and idle._timer is None
    throttle_module.flush_all()
    assert drawn == ["marked"]


@given(WORDS, WORDS)
def test_what_comes_from_outside_is_escaped(words: str, tip: str) -> None:
    picture = svg.document(10, 10, svg.text(0, 0, words, tip=tip, key=tip), title=words)
    root = ET.fromstring(picture)
    (text,) = root.iter("{http://www.w3.org/2000/svg}text")
    assert (text.text or "") == words and text.attrib["data-tip"] == tip and text.attrib["tabindex"] == "0"


@given(st.floats(allow_nan=True, allow_infinity=True))
def test_every_amount_has_a_colour(share: float) -> None:
    assert len(svg.cividis_colour(share)) == 7 and int(svg.cividis_colour(share)[1:], 16) >= 0


@given(st.floats(-1e6, 1e6))
def test_numbers_are_short_and_near(value: float) -> None:
    assert abs(float(svg.format_coordinate(value)) - value) <= 0.005 + 1e-9


class Boxed(Count):
    def __init__(self) -> None:
        super().__init__()
        self.inner = ipywidgets.Text()
        self.show(ipywidgets.HBox([self.inner]))


def test_what_is_closed_leaves_nothing_open() -> None:
    def seen() -> set[str]:
        return {name for name, each in ipywidgets.Widget.widgets.items() if isinstance(each, ipywidgets.DOMWidget)}

    before = seen()
    view = Boxed()
    assert len(seen() - before) >= 4
    view.close()
    assert seen() <= before


def test_what_is_kept_waits_for_who_types(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[bool] = []
    monkeypatch.setattr("workbench.widgets.view._publish", lambda *_, update: kept.append(update))
    view = Count()
    view._ipython_display_()
    view.shown.typing = True
    view.keep()
    assert kept == [False]
    view.shown.typing = False
    assert kept == [False, True]
    view.keep()
    assert kept == [False, True, True]


def test_what_a_browser_needs_is_part_of_the_package() -> None:
    named = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["workbench"]
    room = ROOT / "workbench"
    listed = {path for pattern in named for path in room.glob(pattern)}
    there = {path for kind in ("*.js", "*.css", "*.j2", "*.json") for path in room.rglob(kind)}
    assert there and there <= listed


def test_a_closed_view_is_freed() -> None:
    closed = []

    class Counted(widgets.TokenView):
        def close(self) -> None:
            closed.append(1)
            super().close()

    view = Counted("def f(x):")
    parts = [weakref.ref(each) for each in (view, view.shown)]
    view.close()
    del view
    gc.collect()
    assert [each() for each in parts] == [None, None]
    assert closed == [1], "it is not closed again by the thread that frees it"


def test_code_for_the_browser_is_text() -> None:
    """anywidget keeps a listener for the changes of a file, and with it every widget that was made."""
    for module in pkgutil.walk_packages(widgets.__path__, "workbench.widgets."):
        importlib.import_module(module.name)
    pending, seen = [anywidget.AnyWidget], []
    while pending:
        subclasses = [each for each in pending.pop().__subclasses__() if each.__module__.startswith("workbench.")]
        pending += subclasses
        seen += subclasses
    assert len(seen) > 4
    for each in seen:
        assert not {FileContents} & {type(vars(each).get(name)) for name in ("_esm", "_css")}, each.__name__


@given(st.lists(st.integers(0, 12), max_size=40), st.integers(0, 8))
def test_a_throttle_is_no_faster_than_it_says_and_draws_the_last_mark(pauses: list[int], long: int) -> None:
    clock, at, state, drawn = Clock(), [], [0], [0]

    def draw() -> None:
        at.append(clock.now)
        drawn.append(state[0])
        clock.now += long / 8

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(throttle_module, "time", clock)
        patch.setattr(throttle_module, "threading", clock)
        throttle = Throttle(draw, seconds=1.0)
        for pause in pauses:
            state[0] += 1
            throttle.mark()
            clock.pass_by(pause / 8)
        marked = bool(clock.timers)
        throttle.flush_pending()
    assert drawn[-1] == len(pauses) and len(at) <= len(pauses) and not clock.timers
    between = [later - earlier for earlier, later in pairwise(at)]
    assert all(each >= 1.0 + long / 8 for each in (between[:-1] if marked else between))
