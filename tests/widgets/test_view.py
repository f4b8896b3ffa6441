"""Every widget is controls and a picture that is a function of its state."""

from __future__ import annotations

import threading
import time
import tomllib
import xml.etree.ElementTree as ET
from pathlib import Path
from types import SimpleNamespace

import ipywidgets
import pytest
import traitlets
from hypothesis import given
from hypothesis import strategies as st

from workbench.widgets import kit
from workbench.widgets.pulse import Pulse
from workbench.widgets.view import View

ROOT = Path(__file__).resolve().parents[2]
WORDS = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs")), max_size=20)


class Count(View):
    number = traitlets.Int(0)

    def __init__(self) -> None:
        super().__init__()
        self.watch("number")
        self.show()

    def picture(self) -> str:
        return kit.svg(100, 20, kit.text(2, 15, str(self.number)), title="a number")


def test_a_view_offers_its_picture_beside_the_live_view() -> None:
    view = Count()
    bundle = view._repr_mimebundle_()
    assert bundle["application/vnd.jupyter.widget-view+json"]["model_id"] == view.model_id
    assert bundle["image/svg+xml"] == view.picture() == view.shown.content
    assert "wb-count" in view._dom_classes


def test_a_change_is_drawn_and_the_last_one_last() -> None:
    view = Count()
    for number in range(50):
        view.number = number
    view.pulse.flush()
    assert ">49<" in view.shown.content
    view.close()
    view.number = 50


@given(st.lists(st.integers(0, 3), max_size=20))
def test_a_pulse_draws_the_last_mark(pauses: list[int]) -> None:
    state, drawn = [0], []
    pulse = Pulse(lambda: drawn.append(state[0]), seconds=0.002)
    for pause in pauses:
        state[0] += 1
        pulse.mark()
        time.sleep(pause / 1000)
    pulse.flush()
    assert drawn[-1] == state[0] and len(drawn) <= len(pauses) + 1


def test_a_pulse_is_no_faster_than_it_says_and_never_two_at_once() -> None:
    at, drawing, together = [], threading.Lock(), []

    def draw() -> None:
        together.append(not drawing.acquire(blocking=False))
        at.append(time.monotonic())
        time.sleep(0.003)
        drawing.release()

    pulse = Pulse(draw, seconds=0.02)
    until = time.monotonic() + 0.2
    while time.monotonic() < until:
        pulse.mark()
        time.sleep(0.001)
    pulse.flush()
    assert not any(together) and 2 <= len(at) <= 12
    assert all(later - earlier >= 0.02 for earlier, later in zip(at[:-1], at[1:-1], strict=False))


@given(WORDS, WORDS)
def test_what_comes_from_outside_is_escaped(told: str, tip: str) -> None:
    picture = kit.svg(10, 10, kit.text(0, 0, told, tip=tip, key=tip), title=told)
    root = ET.fromstring(picture)
    (text,) = root.iter("{http://www.w3.org/2000/svg}text")
    assert (text.text or "") == told and text.attrib["data-tip"] == tip and text.attrib["tabindex"] == "0"


@given(st.floats(allow_nan=True, allow_infinity=True))
def test_every_amount_has_a_colour(share: float) -> None:
    assert len(kit.shade(share)) == 7 and int(kit.shade(share)[1:], 16) >= 0


@given(st.floats(-1e6, 1e6))
def test_numbers_are_short_and_near(value: float) -> None:
    assert abs(float(kit.num(value)) - value) <= 0.005 + 1e-9


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


def test_views_of_a_cells_earlier_run_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    shell = SimpleNamespace(parent_header={})
    monkeypatch.setattr("IPython.get_ipython", lambda: shell)
    monkeypatch.setattr("workbench.widgets.view._publish", lambda *_, **__: None)

    def shown(cell: str, run: str, view: Count) -> Count:
        shell.parent_header = {"metadata": {"cellId": cell}, "header": {"msg_id": run}}
        view._ipython_display_()
        return view

    first, beside, other = shown("a", "1", Count()), shown("a", "1", Count()), shown("b", "2", Count())
    again = shown("a", "3", Count())
    assert [view.comm is None for view in (first, beside, other, again)] == [True, True, False, False]
    shown("a", "4", again)
    assert again.comm is not None


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
