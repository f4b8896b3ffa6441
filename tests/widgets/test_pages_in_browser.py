"""The page map and the timeline as a person meets them in JupyterLab: while requests run, and afterwards."""

from __future__ import annotations

from tests.browser import assert_no_errors, pressed
from tools.notebooks.page import LabSession

NOTEBOOK = """# %%
import workbench
from workbench import widgets
from workbench.request import Request, SamplingParameters

runner = workbench.load("demo", backend="eager", page_size=16, pages=12, max_num_seqs=4)
pages = widgets.PageMap(runner)
pages
# %%
timeline = widgets.Timeline(runner)
timeline
# %%
few = SamplingParameters(max_tokens=24, ignore_eos=True)
asked = widgets.RunnerThread.attach(runner).submit([Request(f"r{n}", tuple(range(40 + n)), few) for n in range(4)])
"""


def test_pages_are_scrubbed_and_bars_tell_their_reasons(lab: LabSession) -> None:
    page = lab.open(lab.write("pages.py", NOTEBOOK))
    page.run_all()
    assert page.evaluate("asked.wait()") == "True"
    page.settle()
    assert_no_errors(page)
    assert page.evaluate("pages.step == pages.snapshots[-1].step and pages.steps.follow") == "True", "it followed"

    shown = page.widget("wb-pagemap")
    handle = shown.locator("input[type=range]")
    for _ in range(3):
        pressed(page, handle, "ArrowLeft", "pages.step")
    assert page.evaluate("pages.step == pages.snapshots[-1].step - 3, pages.steps.follow") == "(True, False)"
    step = page.evaluate("pages.step")
    assert f"what step {step} is computed on" in (shown.locator("svg").first.text_content() or "")

    cell = shown.locator("rect[data-key^='0.']:not(.fr)").first
    cell.hover()
    tip = page.tab.locator(".wb-tip:visible")
    assert "page " in tip.inner_text() and "of 16 tokens" in tip.inner_text() and "reference" in tip.inner_text()
    cell.click()
    page.settle()
    assert page.evaluate("pages.chosen").startswith("'r")

    chart = page.widget("wb-timeline")
    back = chart.locator("rect.sb[data-tip]").first
    back.hover()
    assert "is preempted" in tip.inner_text()
    chart.get_by_text("r0", exact=True).click()
    chart.locator(".wb-reading").focus()
    page.tab.keyboard.press("+")
    page.settle()
    state = page.evaluate("timeline.chosen, timeline.window[0] > 0, timeline.follow")
    assert state == "(0, True, False)", "who looks closer is not carried off"
    assert "step" in (chart.locator(".wb-reading").text_content() or "")
    assert "Decisions on r0" in (chart.locator("svg").first.text_content() or "")
    assert_no_errors(page)
