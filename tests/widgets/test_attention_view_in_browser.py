"""Attention under a person's hands: tiles come as they come into sight, a cell tells itself to pointer and keyboard."""

from __future__ import annotations

from tests.browser import assert_no_errors
from tools.notebooks.page import LabSession

CELLS = """# %%
import numpy as np
import workbench
from workbench import widgets

attention = {"sliding_window": 12, "num_sink_tokens": 2, "pattern": ["window", "full"]}
runner = workbench.load("demo", backend="eager", attention=attention)
v = widgets.AttentionView(runner, "def f(n):\\n    return", max_tokens=12, temperature=0)
v
# %%
v.wait()
w = widgets.AttentionView(np.tril(np.full((1, 2, 2048, 2048), 1 / 2048, dtype=np.float32)), groups=1)
w
"""


def test_maps_are_moved_pointed_at_and_picked(lab: LabSession) -> None:
    page = lab.open(lab.write("attention.py", CELLS))
    page.run_all()
    assert_no_errors(page)
    short, long = (page.widget("wb-attentionview").nth(n) for n in (0, 1))
    canvas = short.locator("canvas")
    canvas.scroll_into_view_if_needed()
    place = canvas.bounding_box()
    assert place is not None
    page.tab.mouse.move(place["x"] + 100, place["y"] + 90)  # just inside: the first token looks at itself
    page.settle()
    assert page.evaluate("v.map.pointed") == "[0, 0]"
    assert "weight 1.0000" in short.locator("[role=status]").last.inner_text()
    canvas.focus()
    for key in ("ArrowDown", "ArrowDown", "ArrowRight", "+", "0"):
        canvas.press(key)
    page.settle()
    assert page.evaluate("v.map.pointed") == "[2, 1]"
    assert page.evaluate("v.map.caption") == repr(short.locator("[role=status]").last.inner_text())
    short.locator("[data-key='head 3']").click()
    page.settle()
    assert page.evaluate("(v.head, v._last)") == "(3, (0, (3,)))"

    canvas = long.locator("canvas")
    canvas.scroll_into_view_if_needed()
    assert canvas.get_attribute("data-level") == page.evaluate("w.map.top")
    assert canvas.get_attribute("data-tiles") == "1"
    canvas.focus()
    for _ in range(5):
        canvas.press("+")
        page.settle()
    assert canvas.get_attribute("data-level") == "0"
    assert int(canvas.get_attribute("data-tiles") or 0) < 40  # of the 64 that the finest level alone has
    canvas.press("PageDown")
    page.settle()
    assert page.evaluate("w.map.pointed") == "[64, 0]"
    assert_no_errors(page)
