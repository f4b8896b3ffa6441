"""Two columns of a Playground by the keyboard: a preset, the mark, the history, an experiment to its verdict."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.browser import assert_no_errors
from tests.helpers.widgets import notebook
from tests.patience import until
from tools.notebooks.page import LabSession

CELLS = (
    "import torch\ntorch.set_num_threads(1)\nfrom workbench import widgets\n"
    "pair = widgets.Playground(prompt='def f(x):\\n', beside={})\npair",
    "a = 1",
)
PLACES = """root => [...root.querySelectorAll("button, input, select, textarea")].map(
  (each) => each.getBoundingClientRect().top)"""
NAMELESS = """root => [...root.querySelectorAll("button, input, select, textarea, svg")].filter((each) => {
  const title = each.querySelector("title")?.textContent ?? "";
  const labels = [...(each.labels ?? [])].map((label) => label.textContent).join("") + (each.ariaLabel ?? "");
  return each.offsetParent !== null && !(each.textContent + title + labels + each.title).trim();
}).map((each) => each.outerHTML.slice(0, 120))"""


@pytest.fixture
def narrow(lab: LabSession) -> Iterator[LabSession]:
    """A window of 1,000 pixels."""
    page, size = lab.tab.page, lab.tab.page.viewport_size
    page.set_viewport_size({"width": 1000, "height": 2200})
    yield lab
    if size is not None:
        page.set_viewport_size(size)


def test_a_preset_is_played_restored_and_judged_by_the_keyboard(narrow: LabSession) -> None:
    lab = narrow
    page = lab.open(lab.write("pair.ipynb", notebook(CELLS)))
    page.run_all()
    view = page.widget("wb-playground")
    view.get_by_label("pair", exact=True).focus()
    page.tab.keyboard.type("greedy and")
    page.tab.keyboard.press("Tab")
    until(lambda: page.evaluate("pair.preset") == "'greedy and temperature 0.7'")
    for side in (0, 1):
        field = view.get_by_label("max_tokens", exact=True).nth(side)
        page.settle()  # ipywidgets writes a number's field anew, and what is typed in it is lost, when its mark changes
        field.fill("12")
        field.press("Tab")
    seed = view.get_by_label("seed", exact=True)
    seed.fill("5")
    seed.press("Tab")
    page.evaluate("setattr(pair, 'new_seed', False)")
    page.settle()
    assert view.locator(".wb-differs").count() == 2 and "sampling.temperature" in view.inner_text()
    assert view.evaluate(NAMELESS) == []

    before = view.evaluate(PLACES)
    view.get_by_title("Run", exact=True).press("Enter")
    until(lambda: page.evaluate("len(pair.history)") == "1")
    page.settle()
    assert view.evaluate(PLACES) == before, "output pushed a control"
    position = page.evaluate("pair.difference.position")
    assert position.isdigit()
    assert view.locator(".wb-tokens b.m").evaluate_all("all => all.map((e) => e.dataset.key)") == [f"0.{position}"] * 2
    assert f"first difference: token {int(position) + 1}" in view.inner_text()
    assert view.evaluate("root => root.scrollWidth <= root.clientWidth + 1"), "both sides fit at 1,000 pixels"

    view.get_by_role("button", name="Copy the left to the right").press("Enter")
    until(lambda: page.evaluate("pair.experiments[0] == pair.experiments[1]") == "True")
    view.get_by_role("button", name="restore play 1").press("Enter")
    until(lambda: page.evaluate("pair.experiments[1].sampling.temperature") == "0.7")
    page.settle()
    assert seed.input_value() == "5" and page.evaluate("a") == "1"

    for label, value in (("prompts", "1"), ("prompt tokens", "16"), ("output tokens", "4"), ("rounds", "2")):
        field = view.get_by_label(label, exact=True)
        field.fill(value)
        field.press("Tab")
    rule = view.get_by_label("rule", exact=True)
    rule.fill("speed > 1")
    rule.press("Tab")
    view.get_by_text("there is no figure").wait_for()
    rule.fill("first_divergence >= 0")
    rule.press("Tab")
    page.settle()
    view.get_by_role("button", name="Write and run the experiment").press("Enter")
    until(lambda: page.evaluate("pair.panel.run_shown is not None and not pair.panel.running") == "True")
    page.settle()
    assert page.evaluate("pair.panel.run_shown.problem") == "''"
    assert "holds" in view.locator(".wb-experiment").inner_text()
    (file,) = (lab.server.root / "playground").glob("*.yaml")
    assert file.name == "greedy-and-temperature-0-7-001.yaml" and "first_divergence >= 0" in file.read_text()
    assert_no_errors(page)

    page.save()
    lab.close()
    again = lab.open("pair.ipynb")
    again.settle()
    kept = again.root.inner_text()
    assert again.widget("wb-playground").count() == 0
    assert again.errors() == []
    assert "first difference: token" in kept and "first_divergence >= 0" in kept and "restore" in kept
    assert again.root.locator(".wb-tokens b.m").count() == 2
