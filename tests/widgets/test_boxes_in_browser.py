"""Views in a reader's own box are closed when the cell has run again, and those that it shows again are not."""

from __future__ import annotations

from tests.browser import assert_no_errors
from tests.patience import limit
from tools.notebooks.page import LabSession

NOTEBOOK = """# %%
import ipywidgets
from workbench import widgets

kept, made = widgets.TokenView("kept"), []
# %%
made.append(widgets.TokenView("made"))
ipywidgets.HBox([ipywidgets.VBox([made[-1]]), kept])
"""


def test_a_box_is_shown_again(lab: LabSession) -> None:
    page = lab.open(lab.write("boxes.py", NOTEBOOK))
    page.run_all(limit(120))
    page.run_cell(2, limit(120))
    assert page.evaluate("[each.comm is None for each in (*made, kept)]") == "[True, False, False]"
    texts = page.root.locator(".wb-tokenview textarea").evaluate_all("all => all.map(each => each.value)")
    assert texts == ["made", "kept"]
    assert_no_errors(page)
