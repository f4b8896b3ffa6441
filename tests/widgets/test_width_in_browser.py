"""Pictures are drawn for the width there is: letters stay large, and nothing is cut off or shared between pictures."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser import assert_no_errors
from tools.notebooks.page import LabSession, NotebookPage

NOTEBOOK = """# %%
import numpy as np
import workbench
from workbench import widgets
from workbench.request import Request, SamplingParameters

runner = workbench.load("demo", backend="eager", page_size=16, pages=12, max_num_seqs=4)
maps = [widgets.PageMap(runner), widgets.PageMap(runner)]
charts = [widgets.Timeline(runner), widgets.Timeline(runner)]
few = SamplingParameters(max_tokens=24, ignore_eos=True)
asked = widgets.RunnerThread.attach(runner).submit([Request(f"r{n}", tuple(range(40 + n)), few) for n in range(4)])
asked.wait()
charts[0]
# %%
charts[1]
# %%
maps[0]
# %%
maps[1]
# %%
widgets.ModelGraph(runner, ceilings="h100", tab="roofline")
# %%
server = workbench.serve(workbench.load("demo", backend="eager"), port=0)
widgets.ServerView(server)
# %%
weights = [np.tril(np.ones((2, 40, 40))) / np.arange(1, 41)[:, None]] * 2
widgets.AttentionView(weights)
# %%
widgets.AttentionView(weights)
# %%
explorers = [widgets.SamplingExplorer(runner, "def f(x):", draws=20, top_k=4).wait() for _ in range(2)]
explorers[0]
# %%
explorers[1]
# %%
widgets.MemoryCalculator()
# %%
import tempfile
from workbench.experiment.experiment import Experiment
from workbench.measure.run import run

lengths = {"kind": "fixed", "prompt": 4, "output": 2}
traffic = {"kind": "traffic", "requests": 2, "arrivals": {"kind": "poisson", "rate": 3000}, "lengths": lengths}
asked = {"question": "Which?", "model": {"name": "shape:tiny", "dtype": "float32"}, "backend": "eager",
         "workload": traffic, "measure": {"warmup": 0, "ceilings": False}}
folder = tempfile.mkdtemp()
for seqs in (1, 2):
    run(Experiment.from_values(asked | {"schedule": {"max_num_seqs": seqs}}), folder, f"run{seqs}", progress=False)
comparisons = {name: widgets.Compare(folder, force=True) for name in ("ratios", "table", "lines", "two measures")}
for name, each in comparisons.items():
    each.shown_as = name
comparisons["ratios"]
# %%
comparisons["table"]
# %%
comparisons["lines"]
# %%
comparisons["two measures"]
# %%
widgets.SpeculationView(runner, "def f(x):", speculate="prompt_lookup", max_tokens=8, rounds=1).wait()
# %%
from workbench.trace.events import ExpertsUsed

busy = tuple((layer, tuple((7 * layer + 5 * expert) % 13 for expert in range(48))) for layer in range(6))
widgets.ModelGraph([ExpertsUsed(0.0, step=step, layers=busy) for step in range(3)])
# %%
last = widgets.TokenView()
last
"""
# Every letter in sight of a picture: its size on the screen, whose it is and what it says.
LETTERS = """root => [...root.querySelectorAll(".wb-picture text, .wb-picture td, .wb-picture p")]
    .filter(each => each.textContent.trim() && each.getClientRects().length)
    .map(each => [parseFloat(getComputedStyle(each).fontSize) * (each.getScreenCTM?.()
        ? Math.hypot(each.getScreenCTM().a, each.getScreenCTM().b) : 1), each.textContent.slice(0, 40)])"""
IDS = """root => [...root.querySelectorAll(".wb-picture [id]")].map(each => each.id)"""
# Letters that stand out of their drawing on the right.
CUT = """root => [...root.querySelectorAll(".wb-picture svg")].flatMap(svg => [...svg.querySelectorAll("text")]
    .filter(each => each.getBoundingClientRect().right > svg.getBoundingClientRect().right + 2)
    .map(each => each.textContent))"""
FILLED = """root => [...root.querySelectorAll('.wb-picture svg [class~="wb-pic"], .wb-picture svg rect')]
    .map(each => getComputedStyle(each).fill).filter(fill => fill.startsWith('url'))
    .filter(fill => !root.ownerDocument.getElementById(fill.match(/#([^"')]+)/)[1])).length"""
# Controls that stand out of their output on the right, or have shrunk to nothing.
LOST = """root => [...root.querySelectorAll(".jp-OutputArea-output .wb")].flatMap(view =>
    [...view.querySelectorAll("select, input, button, .noUi-target")].filter(each => each.getClientRects().length)
    .map(each => [each.getBoundingClientRect(), each])
    .filter(([box, each]) => box.right > view.getBoundingClientRect().right + 2
        || (each.matches(".noUi-target") && box.width < 40))
    .map(([box, each]) => [view.className, each.textContent.slice(0, 30)]))"""
# What is drawn white, or on black.
PALE = """root => [...root.querySelectorAll(".wb-pic")].filter(each => each.getClientRects().length).map(each =>
    [getComputedStyle(each).color, getComputedStyle(each).backgroundColor])"""
SHOTS = os.environ.get("WORKBENCH_SHOTS")


@pytest.fixture(scope="module")
def page(lab: LabSession) -> Iterator[NotebookPage]:
    page = lab.open(lab.write("widths.py", NOTEBOOK))
    page.run_all()
    assert_no_errors(page)
    size = page.tab.viewport_size
    assert size is not None
    yield page
    lab.theme("light")
    page.tab.set_viewport_size(size)


@pytest.mark.parametrize("width", [1000, 1900])
def test_letters_are_large_and_whole(page: NotebookPage, lab: LabSession, width: int) -> None:
    page.tab.set_viewport_size({"width": width, "height": 1400})
    page.settle(1.0)
    small = [each for each in page.root.evaluate(LETTERS) if each[0] < 8.99]
    cut = page.root.evaluate(CUT)
    for theme in ("light", "dark") if SHOTS else ():
        lab.theme(theme)
        page.settle()
        for place, view in enumerate(page.views().all()):
            view.screenshot(path=Path(SHOTS or "") / f"{place:02}-{width}-{theme}.png")
    lab.theme("light")
    assert small == [] and cut == []


def test_two_pictures_have_no_id_in_common(page: NotebookPage) -> None:
    ids = page.root.evaluate(IDS)
    assert len(ids) > 8 and len(set(ids)) == len(ids) and page.root.evaluate(FILLED) == 0


def test_a_wide_window_is_used(page: NotebookPage) -> None:
    page.tab.set_viewport_size({"width": 1900, "height": 1400})
    page.settle(1.0)
    for name in ("wb-timeline", "wb-pagemap", "wb-modelgraph", "wb-serverview"):
        shown = page.widget(name)
        room, drawn = (shown.locator(each).first.bounding_box() for each in (".wb-picture", ".wb-picture svg"))
        assert room is not None and drawn is not None and drawn["width"] > 0.95 * min(room["width"], 1600)


def test_nothing_is_lost_at_a_zoom_of_150_percent(page: NotebookPage) -> None:
    """A window of 1,000 pixels has 667 then."""
    page.tab.evaluate("window.jupyterapp.commands.execute('application:toggle-left-area')")
    page.tab.set_viewport_size({"width": 667, "height": 900})
    page.settle(1.0)
    try:
        assert page.root.evaluate(CUT) == [] and page.root.evaluate(LOST) == []
        assert [each for each in page.root.evaluate(LETTERS) if each[0] < 8.7] == []
        label = page.root.locator(".wb-figure-table th[scope=row]").first.bounding_box()
        assert label is not None and label["height"] < 60, "a run's name is not one letter a line"
    finally:
        page.tab.evaluate("window.jupyterapp.commands.execute('application:toggle-left-area')")


def test_a_dark_page_is_printed_dark_on_white(page: NotebookPage, lab: LabSession) -> None:
    lab.theme("dark")
    page.tab.emulate_media(media="print")
    try:
        page.settle()
        found = page.root.evaluate(PALE)
    finally:
        page.tab.emulate_media(media="screen")
        lab.theme("light")
    assert len(found) > 10 and {tuple(each) for each in found} == {("rgb(27, 27, 27)", "rgb(255, 255, 255)")}
