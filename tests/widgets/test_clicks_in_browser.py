"""In a real JupyterLab every picture is hovered, clicked and gone through by keys, and every slider moves its setting.

What a picture's stop, once picked, does to its view is held beside each view; `test_pressed_in_browser.py` holds what
becomes of a click while a picture is drawn anew.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.browser import assert_no_errors, opened, pressed, says
from tools.notebooks.page import LabSession, NotebookPage

NOTEBOOK = r"""# %%
import torch
torch.set_num_threads(1)
import workbench
from workbench import widgets
from workbench.request import Request, SamplingParameters

runner = workbench.load("demo", backend="eager", page_size=16, pages=40, max_num_seqs=4, prefix="radix")
pages, timeline, roofline = widgets.PageMap(runner), widgets.Timeline(runner), widgets.Roofline(runner, ceilings="h100")
few = SamplingParameters(max_tokens=24, ignore_eos=True)
asked = widgets.RunnerThread.attach(runner).submit([Request(f"r{n}", tuple(range(40 + n)), few) for n in range(4)])
asked.wait()
pages
# %%
timeline
# %%
roofline
# %%
explorer = widgets.SamplingExplorer(runner, "def f(x):\n    return", max_tokens=6, top_k=40).wait()
explorer
# %%
PROMPT = "def read(path):\n    with open(path) as f:\n        return f.read()\n\ndef write(path):\n"
checks = widgets.SpeculationView(runner, PROMPT, speculate="prompt_lookup", max_tokens=24, rounds=0).wait()
checks
# %%
path = widgets.TokenPath(runner, "def add(a, b):\n    return a +", max_tokens=8)
path
# %%
graph = widgets.ModelGraph(workbench.load("shape:tiny", backend="eager", dtype="float32"), tokens=32, ceilings="h100")
graph
# %%
memory = widgets.MemoryCalculator("shape:llama-3.1-8b", context=1024)
memory
# %%
kernels = widgets.KernelView("add_rms_norm", backends=("eager", "mlir"))
kernels
# %%
talk = workbench.Conversation(system="Be brief.", turns=["one <|end|> two"])
prompt = widgets.PromptView(runner, talk)
prompt
# %%
from workbench.trace.events import Submitted, Routed

fleet = widgets.FleetView([Submitted(0.0, "a"), Routed(0.0, "a", replica=1), Submitted(1.0, "b")])
fleet
# %%
import json, urllib.request

server = workbench.serve(workbench.load("demo-chat", backend="eager"))
watched = widgets.ServerView(server)
body = {"model": "demo-chat", "prompt": list(range(5, 45)), "max_tokens": 8, "ignore_eos": True}
headers = {"content-type": "application/json"}
sent = urllib.request.Request(f"{server.url}/v1/completions", json.dumps(body).encode(), headers)
name = json.load(urllib.request.urlopen(sent))["id"]
watched
"""
# A view, one of the stops of its picture, and what is true when it was picked.
STOPS = (
    ("wb-pagemap", "rect[data-key^='0.']:not(.fr)", "pages.chosen != ''"),
    ("wb-timeline", "[data-key='@0']", "timeline.chosen == 0"),
    ("wb-roofline", "[data-key='0']", "roofline.chosen == 0"),
    ("wb-samplingexplorer", "[data-key='t3']", "explorer.position == 3"),
    ("wb-samplingexplorer", "[data-key^='c']", "explorer.token >= 0"),
    ("wb-speculationview", "[data-key='k1']", "checks.check == 1"),
    ("wb-tokenpath", "[data-key='s2.projected']", "path.data.steps[path.step].name == 'projected'"),
    ("wb-modelgraph", "[data-key^='fold:']", "graph.unfolded == (0,)"),
    ("wb-memorycalculator", "[data-key=int4]", "memory.cache == 'int4'"),
    ("wb-kernelview", "[data-key='eager/api']", "kernels.stage == 'api'"),
    ("wb-promptview", "[data-key='band:1']", "prompt.chosen == 1"),
    ("wb-fleetview", "[data-key='@a']", "fleet.chosen == 'a'"),
    ("wb-serverview", "rect[data-key^='@']", "watched.chosen != ''"),
)
SLIDERS = (
    ("wb-pagemap", 0, "ArrowLeft", "pages.step == pages.snapshots[-1].step - 1"),
    ("wb-timeline", 0, "ArrowRight", "timeline.window[0] > 0"),
    ("wb-samplingexplorer", 2, "ArrowLeft", "explorer.top_k == 39"),
    ("wb-speculationview", 0, "ArrowRight", "checks.check == 2"),
    ("wb-memorycalculator", 0, "ArrowRight", "memory.context > 1024"),
)
BUTTONS = (
    ("wb-samplingexplorer", "Draw again", "explorer.seed == 1000"),
    ("wb-modelgraph", "Time the operators", "bool(graph.graph.timers) and not graph.measuring"),
    ("wb-modelgraph", "prefill", "graph.kind == 'prefill'"),
    ("wb-promptview", "text", "prompt.layout_name == 'text'"),
)
# Controls and drawings in sight that no name is read for.
NAMELESS = """root => [...root.querySelectorAll(".wb :is(button, input, select, textarea, svg)")].filter((each) => {
  const title = each.querySelector("title")?.textContent ?? "";
  const labels = [...(each.labels ?? [])].map((label) => label.textContent).join("") + (each.ariaLabel ?? "");
  return each.offsetParent !== null && !(each.textContent + title + labels + each.title).trim();
}).map((each) => each.outerHTML.slice(0, 120))"""


@pytest.fixture(scope="module")
def page(lab: LabSession) -> Iterator[NotebookPage]:
    page = opened(lab, "clicks.py", NOTEBOOK)
    yield page
    assert_no_errors(page)
    page.evaluate("server.stop()")


@pytest.mark.parametrize(("view", "stop", "picked"), STOPS)
def test_a_stop_tells_its_tip_and_is_picked(page: NotebookPage, view: str, stop: str, picked: str) -> None:
    cells, executed = page.tab.locator(".jp-Cell").count(), page.executed()
    place = page.widget(view).locator(stop).first
    place.hover()
    assert not place.get_attribute("data-tip") or page.tab.locator(".wb-tip:visible").first.inner_text()
    place.click()
    says(page, picked)
    page.widget(view).locator(stop).first.focus()
    for key in ("ArrowDown", "ArrowUp", "Enter"):
        page.tab.keyboard.press(key)
    page.settle()
    assert page.tab.locator(".jp-Cell").count() == cells and page.executed() == executed, "the keys were the notebook's"


@pytest.mark.parametrize(("view", "number", "key", "true"), SLIDERS)
def test_a_slider_moves_its_setting(page: NotebookPage, view: str, number: int, key: str, true: str) -> None:
    handle = page.widget(view).locator(".noUi-handle").nth(number)
    assert pressed(page, handle, key, true) == "True"


@pytest.mark.parametrize(("view", "button", "true"), BUTTONS)
def test_a_button_does_what_it_says(page: NotebookPage, view: str, button: str, true: str) -> None:
    page.widget(view).get_by_role("button", name=button, exact=True).click()
    says(page, true)


def test_every_control_has_a_name(page: NotebookPage) -> None:
    assert page.root.evaluate(NAMELESS) == []
