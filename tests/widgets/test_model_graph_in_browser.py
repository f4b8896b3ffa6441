"""The model as a graph in a real JupyterLab: equal layers unfold by click and Enter, times come when asked for."""

from __future__ import annotations

from tests.browser import assert_no_errors
from tools.notebooks.page import LabSession

NOTEBOOK = r"""
# %%
import torch
torch.set_num_threads(1)
import workbench
from workbench import widgets
view = widgets.ModelGraph(workbench.load("shape:tiny", backend="eager", dtype="float32"), tokens=32, ceilings="h100")
view
"""


def test_layers_unfold_and_operators_are_timed(lab: LabSession) -> None:
    page = lab.open(lab.write("model_graph.py", NOTEBOOK))
    page.run_all()
    view = page.widget("wb-modelgraph")
    cells = page.tab.locator(".jp-Cell").count()
    heads = view.locator("[data-key^='fold:']")
    operators = view.locator("[data-key^='operator:']")
    assert heads.count() == 1 and heads.first.get_attribute("aria-expanded") == "false"
    folded = operators.count()
    heads.first.click()
    page.settle()
    assert heads.count() == 2 and heads.first.get_attribute("aria-expanded") == "true" and operators.count() > folded
    heads.first.press("Enter")
    page.settle()
    assert heads.count() == 1 and heads.first.evaluate("each => each.matches(':focus')")
    heads.first.press("ArrowDown")
    assert operators.nth(2).evaluate("each => each.matches(':focus')"), "arrows go from a head to its first operator"
    assert page.tab.locator(".wb-tip").last.inner_text().startswith("norm before attention of layer 0")

    view.get_by_role("button", name="Measure").click()
    page.tab.wait_for_function("() => !document.querySelector('.wb-modelgraph').innerText.includes('not measured')")
    page.settle()
    assert page.evaluate("bool(view.graph.timers) and not view.measuring") == "True"
    assert "not counted" in view.inner_text() and "not measured" not in view.inner_text()
    view.get_by_role("button", name="prefill", exact=True).click()
    page.settle()
    assert page.evaluate("view.kind") == "'prefill'" and "not measured" in view.inner_text()
    assert page.tab.locator(".jp-Cell").count() == cells
    assert_no_errors(page)
