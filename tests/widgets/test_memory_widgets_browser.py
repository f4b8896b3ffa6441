"""In a real JupyterLab: the memory calculator's slider and bars, and a roofline that is hovered and listens."""

from __future__ import annotations

from tests.browser import assert_no_errors, pressed
from tools.notebooks.page import LabSession

CELLS = """# %%
import workbench
from workbench.widgets import MemoryCalculator, RooflinePoint, Roofline

view = MemoryCalculator("shape:llama-3.1-8b", context=1024)
view

# %%
runner = workbench.load("demo", backend="eager")
roofline = Roofline(runner, RooflinePoint("mine", 1e9, 1e8, 0.5, dtype="bfloat16"), ceilings="h100")
roofline

# %%
_ = list(runner.stream("def f(x):", max_tokens=4))
"""


def test_a_slider_a_bar_and_a_point(lab: LabSession) -> None:
    page = lab.open(lab.write("memory.py", CELLS))
    page.run_all()
    assert_no_errors(page)
    calculator = page.widget("wb-memorycalculator")
    before = page.evaluate("view.found['cache_bytes']")
    handle = calculator.locator(".widget-slider .noUi-handle").first
    assert int(pressed(page, handle, "ArrowRight", "view.context")) > 1024
    assert int(page.evaluate("view.found['cache_bytes']")) > int(before)
    exact = calculator.locator("input[type=number]").first
    exact.fill("5000")
    exact.press("Enter")
    page.settle()
    assert page.evaluate("view.context") == "5000" and exact.input_value() == "5000"
    bar = calculator.locator("[data-key=int4]")
    bar.click()
    page.settle()
    assert page.evaluate("view.cache") == "'int4'" and "settled as int4" in calculator.inner_text()
    field = calculator.locator("input[type=text]").first
    calculator.locator("select").first.select_option("a config.json or a folder with one")
    field.fill("no-such-model")
    field.press("Enter")
    page.settle()
    assert "no model " in calculator.locator("[role=alert]").inner_text()

    roofline = page.widget("wb-roofline")
    assert "decode × 1" in roofline.inner_text() and "h100 memory" in roofline.inner_text()
    roofline.locator("[data-key='0']").focus()
    assert "mine: 1G" in page.tab.locator(".wb-tip:visible").inner_text()
    page.tab.keyboard.press("Enter")
    page.settle()
    assert page.evaluate("roofline.chosen") == "0"
    assert_no_errors(page)
