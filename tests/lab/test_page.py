"""A notebook in a real JupyterLab in a real Chromium, touched as a person would."""

from __future__ import annotations

import sys

import pytest

from tests.browser import ROOT, browser, pressed
from tests.patience import until
from tools.notebooks.browser import Browser
from tools.notebooks.page import LabSession
from workbench.errors import WorkbenchError

pytestmark = browser

SLIDER = """# %% [markdown]
# A slider and its kernel.

# %%
import ipywidgets as widgets
slider, answer = widgets.IntSlider(value=3, description="n"), widgets.Label()
slider.observe(lambda change: setattr(answer, "value", f"twice is {2 * change.new}"), "value")
widgets.VBox([slider, answer])

# %%
import sys, workbench
wrong = widgets.IntSlider()
wrong.observe(lambda change: 1 / 0, "value")
wrong
"""


def test_a_slider_moves_and_the_kernel_answers(lab: LabSession) -> None:
    page = lab.open(lab.write("slider.py", SLIDER))
    page.run_all()
    assert page.executed() == (2, 2) and page.errors() == []
    assert page.console_errors == [] and page.outside_requests == []
    assert [str(shown) for shown in page.widgets()] == ["cell 1 (widget)", "cell 2 (widget)"]
    handle = page.views().first.locator(".noUi-handle")
    assert pressed(page, handle, "ArrowRight", "slider.value") == "4"
    page.views().first.get_by_text("twice is 8").wait_for()
    assert page.evaluate("sys.executable") == repr(sys.executable)
    assert page.evaluate("workbench.__file__") == repr(str(ROOT / "workbench" / "__init__.py"))
    assert page.errors() == []
    page.views().nth(1).locator(".noUi-handle").press("ArrowRight")
    page.settle()
    assert {str(error) for error in page.errors()} == {"in a widget's callback: ZeroDivisionError: division by zero"}


ENDLESS = """# %%
x = 1

# %%
import time
print("begun")
time.sleep(600)

# %%
x = 2
"""


def test_a_cell_that_does_not_end_is_named_and_stopped(lab: LabSession) -> None:
    page = lab.open(lab.write("long.py", ENDLESS))
    with pytest.raises(WorkbenchError, match=r"long.py: cell 2 still runs after 0.1 s"):
        page.begin_all()
        until(lambda: page.document()["cells"][1]["outputs"])  # it says that it has begun
        page.finish(timeout_s=0.1)
    until(page.errors)  # the page hears of the error some time after the kernel was interrupted
    page.tab.wait_for_function("bench.kernel().status === 'idle'")
    assert [(error.cell, error.name) for error in page.errors()] == [(2, "KeyboardInterrupt")]
    page.run_cell(3)
    assert page.evaluate("x") == "2"


def test_another_browser_opens_beside_the_one_of_the_session(lab: LabSession) -> None:
    """And closes without ending it."""
    with Browser() as another:
        another.tab(None).page.set_content("<p>here</p>")
    assert lab.tab.page.evaluate("1 + 1") == 2
