"""The view of a fleet in JupyterLab: a moment by the slider, a sample by mouse and keyboard, in both themes."""

from __future__ import annotations

import pytest

from tests.browser import assert_no_errors
from tests.patience import until
from tools.notebooks.page import LabSession

NOTEBOOK = r"""
# %%
import workbench
from workbench import widgets
from workbench.measure.simulated import fleet_for
from workbench.measure.simulation import simulation_experiment
recorder = workbench.Recorder()
executor = {"kind": "simulated", "instances": 2, "decode": {"instances": 1}}
traffic = {"kind": "traffic", "lengths": {"kind": "azure"}, "arrivals": {"kind": "poisson", "rate": 30}, "requests": 20}
question = simulation_experiment("shape:llama-3.1-8b", executor, traffic, {"ttft": 1, "tpot": 0.05})
fleet_for(question, recorder.record).run()
first = next(event for event in recorder.events if event.kind == "handed_over")
view = widgets.FleetView(recorder)
view.show_at(first.time - first.seconds / 2 - recorder.events[0].time)
view
"""
COLOUR = "getComputedStyle(document.querySelector('.wb-fleetview .wb-pic')).color"


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_sample_in_flight_is_chosen(lab: LabSession, theme: str) -> None:
    page = lab.open(lab.write(f"fleet-{theme}.py", NOTEBOOK))
    lab.theme(theme)
    try:
        page.run_all()
        shown = page.widget("wb-fleetview").first
        until(lambda: "in flight" in shown.inner_text())
        flying = shown.locator("[aria-label='pages in flight'] [data-key]")
        assert flying.count() == 1
        flying.click()
        until(lambda: "its pages are on their way" in shown.inner_text())
        assert page.evaluate("view.chosen == first.request_id") == "True"
        shown.locator("[data-key]").first.focus()
        page.tab.keyboard.press("ArrowDown")
        assert page.executed() == (1, 1), "the keys were not the notebook's"
        page.evaluate("view.show_at(recorder.events[-1].time)")
        until(lambda: "20 length" in shown.inner_text())
        bright = [float(each) for each in page.tab.evaluate(COLOUR).removeprefix("rgb(").rstrip(")").split(",")[:3]]
        assert (sum(bright) < 384) == (theme == "light")
        assert_no_errors(page)
    finally:
        lab.theme("light")
