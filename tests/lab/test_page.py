"""A notebook in a real JupyterLab in a real Chromium, touched as a person would."""

from __future__ import annotations

import sys

from tests.browser import ROOT, browser
from workbench.lab.page import Lab

pytestmark = browser

SLIDER = """# %% [markdown]
# A slider and its kernel.

# %%
import ipywidgets as widgets
slider, answer = widgets.IntSlider(value=3, description="n"), widgets.Label()
slider.observe(lambda change: setattr(answer, "value", f"twice is {2 * change.new}"), "value")
widgets.VBox([slider, answer])

# %%
import os, sys, workbench
"""


def test_a_slider_moves_and_the_kernel_answers(lab: Lab) -> None:
    page = lab.open(lab.write("slider.py", SLIDER))
    page.run_all()
    assert page.executed() == (2, 2) and page.errors() == []
    assert page.console_errors == [] and page.outside_requests == [] and [str(shown) for shown in page.widgets()] == ["cell 1 (widget)"]
    handle = page.views().first.locator(".noUi-handle")
    handle.focus()
    handle.press("ArrowRight")
    page.views().first.get_by_text("twice is 8").wait_for()
    assert page.ask("slider.value") == "4"
    assert page.ask("sys.executable") == repr(sys.executable)
    assert page.ask("workbench.__file__") == repr(str(ROOT / "workbench" / "__init__.py"))


def test_errors_are_named_with_their_cell(lab: Lab) -> None:
    source = "# %%\nx = 1\n\n# %%\n# a comment\nx / 0\n\n# %%\nx = 2\n"
    page = lab.open(lab.write("fails.py", source))
    page.run_all()
    assert [str(error) for error in page.errors()] == ["cell 2 (# a comment): ZeroDivisionError: division by zero"]
    assert page.executed() == (2, 3)


def test_an_error_in_a_widgets_callback_is_an_error(lab: Lab) -> None:
    source = "# %%\nimport ipywidgets\nslider = ipywidgets.IntSlider()\nslider.observe(lambda _: 1 / 0)\nslider\n"
    page = lab.open(lab.write("calls_back.py", source))
    page.run_all()
    assert page.errors() == []
    handle = page.views().first.locator(".noUi-handle")
    handle.focus()
    handle.press("ArrowRight")
    page.settle()
    assert {error.name for error in page.errors()} == {"ZeroDivisionError"}
