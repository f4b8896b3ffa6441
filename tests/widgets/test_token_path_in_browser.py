"""The path of a token in a real JupyterLab: stepped by keys, played to its end, a head switched off."""

from __future__ import annotations

from typing import Any

from tests.browser import assert_no_errors
from tests.patience import limit
from tools.notebooks.page import LabSession

CELLS = """# %%
import workbench
from workbench.widgets import TokenPath

runner = workbench.load("demo", backend="eager")
w = TokenPath(runner, "def add(a, b):\\n    return a +", max_tokens=8)
w
"""


def wait_for_heading(view: Any, text: str) -> None:
    view.locator("[role=status] b").filter(has_text=text).wait_for(timeout=limit(60) * 1000)


def test_it_is_stepped_played_and_a_head_is_switched_off(lab: LabSession) -> None:
    page = lab.open(lab.write("path.py", CELLS))
    page.run_all(limit(120))
    assert_no_errors(page)
    view = page.widget("wb-tokenpath")
    wait_for_heading(view, "Step 1 of 96")

    slider = view.get_by_label("step", exact=True)
    slider.press("ArrowRight")
    wait_for_heading(view, "Step 2 of 96")
    view.get_by_label("next step").click()
    wait_for_heading(view, "Step 3 of 96")
    view.get_by_label("step back").click()
    wait_for_heading(view, "Step 2 of 96")
    view.locator("[data-key='s2.projected']").click()
    view.get_by_text("dot product of the row before it").wait_for(timeout=limit(60) * 1000)
    cell = view.locator("[data-key^='b']:focus, [data-key^='b'][tabindex='0']").first
    cell.focus()
    page.tab.keyboard.press("ArrowRight")  # to the next cell of the matrix, not to the next cell of the notebook
    page.tab.keyboard.press("Enter")
    page.settle()
    assert int(page.evaluate("w.column")) >= 0

    page.evaluate("setattr(w, 'step', 93)")
    view.get_by_label("play", exact=True).click()
    view.get_by_text("the token drawn").wait_for(timeout=limit(60) * 1000)
    view.get_by_label("play", exact=True).wait_for(timeout=limit(60) * 1000)  # it has stopped at the end
    assert page.evaluate("w.step") == "95" and view.get_by_label("last step").is_disabled()

    view.get_by_role("button", name="switch off").click()
    page.settle()
    view.locator("[data-key='y2']").click()
    view.get_by_text("first difference").wait_for(timeout=limit(120) * 1000)
    assert page.evaluate("w.layers_off") == "(2,)"
    assert view.get_by_role("switch", name="layer 2", exact=True).get_attribute("aria-checked") == "false"
    assert_no_errors(page)


def test_nothing_plays_where_motion_is_to_be_reduced(lab: LabSession) -> None:
    page = lab.open(lab.write("path.py", CELLS))
    page.tab.emulate_media(reduced_motion="reduce")
    page.run_all(limit(120))
    view = page.widget("wb-tokenpath")
    assert view.get_by_label("play", exact=True).is_disabled()
    view.get_by_label("next step").click()
    wait_for_heading(view, "Step 2 of 96")
    page.tab.emulate_media(reduced_motion="no-preference")
    page.settle()
    assert view.get_by_label("play", exact=True).is_enabled()
