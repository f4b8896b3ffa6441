"""Test the kernel view in a browser: pointer and keyboard choose stages, and a chosen backend is compiled."""

from __future__ import annotations

from tests.browser import assert_no_errors
from tools.notebooks.page import LabSession

CELLS = """# %%
from workbench import widgets

v = widgets.KernelView("add_rms_norm", backends=("eager", "mlir"))
v
"""


def test_stages_are_gone_through(lab: LabSession) -> None:
    page = lab.open(lab.write("kernels.py", CELLS))
    page.run_all()
    view = page.widget("wb-kernelview")
    assert "def add_rms_norm" in view.locator(".wb-code").inner_text()
    view.locator("select").last.select_option("mlir")
    page.settle()
    assert page.evaluate("v.wait()") == "True"
    page.settle()
    assert "linalg" in view.locator(".wb-code").inner_text()
    view.locator("[data-key='mlir/llvm']").click()
    page.settle()
    assert page.evaluate("v.stage") == "'llvm'" and "llvm.func" in view.locator(".wb-code").inner_text()
    view.locator("[data-key='mlir/llvm']").focus()
    page.tab.keyboard.press("ArrowRight")
    page.tab.keyboard.press("Enter")
    page.settle()
    assert page.evaluate("v.stage") == "'asm'" and "asm" in view.locator(".now").inner_text()
    assert_no_errors(page)
