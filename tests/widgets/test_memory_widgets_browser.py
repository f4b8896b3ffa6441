"""In a real JupyterLab: the memory calculator's form and bars, and a roofline that is hovered and listens."""

from __future__ import annotations

from tests.browser import assert_no_errors
from tests.patience import limit
from tools.notebooks.page import LabSession

CELLS = """# %%
import workbench
from workbench.widgets import MemoryCalculator, ModelGraph, RooflinePoint

view = MemoryCalculator("shape:llama-3.1-8b", context=1024)
view

# %%
runner = workbench.load("demo", backend="eager")
point = RooflinePoint("mine", 1e9, 1e8, 0.5, dtype="bfloat16")
roofline = ModelGraph(runner, point, ceilings="h100", tab="roofline")
roofline

# %%
_ = list(runner.stream("def f(x):", max_tokens=4))
"""


def test_a_number_a_bar_and_a_point(lab: LabSession) -> None:
    page = lab.open(lab.write("memory.py", CELLS))
    page.run_all()
    assert_no_errors(page)
    calculator = page.widget("wb-memorycalculator")
    before = page.evaluate("view.found['cache_bytes']")
    context = calculator.get_by_role("spinbutton", name="context")
    context.fill("5000")
    context.press("Enter")
    page.settle()
    assert page.evaluate("view.context") == "5000" and int(page.evaluate("view.found['cache_bytes']")) > int(before)
    bar = calculator.locator("[data-key=int4]")
    bar.click()
    page.settle()
    assert page.evaluate("view.cache") == "'int4'"
    calculator.get_by_text("settled as int4").first.wait_for(timeout=1000 * limit(30))  # a redraw rests after another
    calculator.locator("select").first.select_option("a text")
    field = calculator.locator("input[type=text]").first
    field.fill("no-such-model")
    field.press("Enter")
    page.settle()
    assert "no model " in calculator.locator("[role=alert]").inner_text()

    roofline = page.widget("wb-modelgraph")
    assert "decode × 1" in roofline.inner_text() and "h100 memory" in roofline.inner_text()
    roofline.locator("[data-key='0']").focus()
    assert "mine: 1 GFLOPs" in page.tab.locator(".wb-tip:visible").inner_text()
    page.tab.keyboard.press("Enter")
    page.settle()
    assert page.evaluate("roofline.chosen") == "0"
    assert_no_errors(page)
