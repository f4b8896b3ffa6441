"""A load in a real JupyterLab: its sliders while it runs, one cursor, zoom, selection, keys."""

from __future__ import annotations

import re
from typing import Any

from tests.browser import assert_no_errors
from tests.patience import limit, until
from tools.notebooks.page import LabSession, NotebookPage

CELLS = """# %%
from workbench.widgets import LiveBench

w = LiveBench(rate=3.0, seed=1)
w
# %%
after = 1
"""


def number(page: NotebookPage, expression: str) -> float:
    return float(page.evaluate(f"float({expression})"))


def at(view: Any, share: float, down: float = 0.5) -> tuple[float, float]:
    """Return the place of the page at a share of the axis of time."""
    place = view.locator(".wb-time-overlay").bounding_box()
    return place["x"] + share * place["width"], place["y"] + down * place["height"]


def test_it_is_driven_while_it_runs(lab: LabSession) -> None:
    page = lab.open(lab.write("bench.py", CELLS))
    page.tab.set_viewport_size({"width": 1400, "height": 1400})
    page.run_all(limit(120))
    view = page.widget("wb-livebench")
    button = view.locator("button").first
    slider = view.get_by_role("slider", name="cursor on the axis of time")
    until(lambda: slider.get_attribute("aria-valuemin") == "0")
    button.click()
    until(lambda: button.inner_text().strip() == "Stop")
    until(lambda: number(page, "w.log.num_ended") > 1)

    # Controls, while requests are in progress; each is marked on the axis.
    load = view.locator(".widget-slider .noUi-handle").first
    load.focus()
    page.tab.keyboard.press("ArrowRight")
    until(lambda: number(page, "w.rate") == 3.5)
    chunk = view.locator(".widget-slider .noUi-handle").nth(2)
    chunk.focus()
    for _ in range(5):
        page.tab.keyboard.press("ArrowLeft")
    view.get_by_label("policy").select_option("shortest_prompt")
    until(lambda: page.evaluate("w._runner.schedule.policy.kind") == "'shortest_prompt'")
    until(lambda: number(page, "w._runner.scheduler.limits.chunk_tokens") == 16)
    # Steps between the presses divide the change into marks of their own.
    chunked = view.locator("svg text").filter(has_text=re.compile(r"chunk \d+ → 16$"))
    chunked.first.wait_for(timeout=limit(60) * 1000)
    changed = view.locator("svg text").filter(has_text="policy interleaved → shortest_prompt")
    changed.first.wait_for(timeout=limit(60) * 1000)
    until(lambda: number(page, "w.log.num_ended") > 4)
    assert (
        number(page, "w.log.num_arrived - w.log.num_refused - w.log.num_waiting - w.log.num_running - w.log.num_ended")
        == 0
    )

    # The pointer, then keys: one cursor, its values as text.
    page.tab.mouse.move(*at(view, 0.5))
    until(lambda: page.evaluate("w.cursor is not None") == "True")
    until(lambda: page.evaluate("w.axis.reading") == repr(slider.inner_text()))
    assert "queue" in slider.inner_text() and "p50 / p95 / p99" in slider.inner_text()

    # It goes with the pointer; where a click has put it, it stays until the newest is asked for.
    slider.hover()
    until(lambda: page.evaluate("w.cursor") == "None")
    page.tab.mouse.click(*at(view, 0.4))
    until(lambda: page.evaluate("w.cursor is not None") == "True")
    page.settle()
    clicked = number(page, "w.cursor")
    page.tab.mouse.move(*at(view, 0.7))
    until(lambda: number(page, "w.cursor") != clicked)
    slider.hover()
    until(lambda: number(page, "w.cursor") == clicked)
    view.get_by_role("button", name="newest").click()
    until(lambda: page.evaluate("w.cursor") == "None")
    page.tab.mouse.move(*at(view, 0.5))
    until(lambda: page.evaluate("w.cursor is not None") == "True")
    page.tab.evaluate("bench.panel.content.activeCellIndex = 0")
    slider.focus()
    before = number(page, "w.cursor")
    page.tab.keyboard.press("ArrowLeft")
    until(lambda: number(page, "w.cursor") < before)
    for key in ("Shift+ArrowLeft", "Shift+ArrowLeft"):
        page.tab.keyboard.press(key)
    until(lambda: number(page, "len(w.selected)") == 2)
    assert slider.get_attribute("aria-valuetext")
    page.tab.keyboard.press("Delete")
    until(lambda: number(page, "len(w.selected)") == 0)
    for key in ("d", "d", "b"):
        page.tab.keyboard.press(key)
    page.settle()
    assert page.tab.evaluate("bench.panel.content.activeCellIndex") == 0 and page.executed()[1] == 2

    # The wheel moves the page unless the axis has the focus, and then zooms around the pointer. With more in the log
    # than is in sight, the zoomed window can be moved either way.
    until(lambda: number(page, "w.log.end - w.log.begin") > 14)
    view.get_by_label("follow").focus()
    page.tab.mouse.move(*at(view, 0.5))
    page.tab.mouse.wheel(0, -240)
    page.settle()
    assert page.evaluate("w.follow") == "True"
    slider.focus()
    slider.scroll_into_view_if_needed()
    page.tab.mouse.move(*at(view, 0.5))
    page.tab.mouse.wheel(0, -240)
    until(lambda: page.evaluate("w.follow") == "False")
    until(lambda: number(page, "w.window[1] - w.window[0]") < 7)
    low = number(page, "w.window[0]")

    # A drag moves the axis, one with Shift selects; a double click shows all.
    page.tab.mouse.move(*at(view, 0.3))
    page.tab.mouse.down()
    page.tab.mouse.move(*at(view, 0.6), steps=4)
    page.tab.mouse.up()
    until(lambda: number(page, "w.window[0]") != low)
    page.tab.mouse.dblclick(*at(view, 0.5))
    until(lambda: page.evaluate("w.follow") == "True")
    button.click()
    until(lambda: button.inner_text().strip() == "Run")
    page.settle()
    page.tab.keyboard.down("Shift")
    page.tab.mouse.move(*at(view, 0.2))
    page.tab.mouse.down()
    page.tab.mouse.move(*at(view, 0.7), steps=4)
    page.tab.mouse.up()
    page.tab.keyboard.up("Shift")
    until(lambda: number(page, "len(w.selected)") == 2)
    view.get_by_text("output tokens per second").wait_for(timeout=limit(60) * 1000)
    with page.tab.expect_download() as saved:
        view.get_by_role("button", name="Save as CSV").click()
    assert saved.value.path().read_text().startswith("figure,value,unit\nduration,")
    assert page.evaluate("w._runner.scheduler.running") == "[]"
    assert_no_errors(page)
    lab.tab.page.set_viewport_size({"width": 1280, "height": 900})
