"""While a cell waits for a widget's work, buttons, sliders and errors of widgets work, in a real JupyterLab."""

from __future__ import annotations

from tests.browser import assert_no_errors
from tools.notebooks.page import LabSession

NOTEBOOK = r"""
# %%
import torch, ipywidgets
torch.set_num_threads(1)
from workbench import widgets
play = widgets.Playground(prompt="def f(x):\n")
play.settings.write({"sampling": {"max_tokens": 900, "ignore_eos": True}})
slider = ipywidgets.IntSlider(description="moved")
label = ipywidgets.Label()
slider.observe(lambda change: setattr(label, "value", f"at {change['new']}"), "value")
ipywidgets.VBox([play, slider, label])

# %%
play.run()
play.wait()
order = [play.played.finish_reasons]

# %%
order.append("second")

# %%
order.append("third")
"""


def test_stop_ends_what_a_cell_waits_for(lab: LabSession) -> None:
    page = lab.open(lab.write("waiting.py", NOTEBOOK))
    page.begin_all()
    view = page.widget("wb-playground")
    view.wait_for()
    page.tab.wait_for_function("document.querySelectorAll('.wb-playground .wb-tokens b').length >= 5")
    handle = page.root.locator(".noUi-handle").last
    handle.focus()
    for number in (1, 2, 3):
        handle.press("ArrowRight")
        page.root.get_by_text(f"at {number}", exact=True).wait_for()
    view.get_by_role("button", name="Stop").click()
    page.finish()
    assert page.evaluate("order") == "[{0: 'cancelled'}, 'second', 'third']"
    assert_no_errors(page)
