"""Every widget's picture is whole XML, its keys are its own and reached by the keyboard, its letters can be read."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.engine.tiny import layer, model_of, runner_of, spec_of
from tests.helpers.widgets import marks, root_of
from tests.measure.runs import small_recorder
from tests.widgets.canned import is_golden
from workbench import svg, widgets
from workbench.engine.runner import Runner
from workbench.reports.comparison_charts import ratio_figure
from workbench.runs.comparison import Comparison, ComparisonRow
from workbench.trace.events import ExpertsUsed, Finished, Routed, Submitted
from workbench.widgets.speculation.picture import draw_charts

SCRIPT = "<script>"
IDS = (3, 1, 4, 1, 5, 9, 2, 6)
CHARTS = {"chance": 0.8, "acceptance_histogram": [1, 0, 3], "acceptance_by_position": [0.75, 0.7512]}
FLEET = [Submitted(0.0, SCRIPT), Routed(0.0, SCRIPT, replica=1, reason=SCRIPT), Submitted(1.0, "b"),
         Finished(2.0, "b", reason="length", replica=1)]  # fmt: skip


EXPERTS = [ExpertsUsed(0.0, layers=((1, (1200, 0)), (4, (1, 0, 1))))]


class Evil:
    """A tokenizer whose every token is markup."""

    vocab_size = 10**6

    def token_bytes(self, id: int) -> bytes:
        return SCRIPT.encode()


def compared(number: int, ratio: float | None, verdict: Any = None) -> ComparisonRow:
    return ComparisonRow("s", f"{SCRIPT}{number}", 1, 1, 0, None, None, ratio, None, None, 0.95, 5, 5, True, verdict)


ROWS = (compared(0, 0.5, "better"), compared(1, 2.0, "worse"), compared(2, None), compared(3, 1.1, "same"),
        compared(4, 0.5), compared(5, 2.0))  # fmt: skip


def path(runner: Runner, section: str, room: int) -> str:
    view = widgets.TokenPath(runner, IDS, temperature=1.0, top_k=5, max_tokens=2, ignore_eos=True, section=section)
    view.wait()
    view.shown.room = room
    markup = view.picture()
    assert f'viewBox="0 0 {room} ' in markup, "it is drawn for the width there is"
    assert max(float(each) for each in re.findall(r'<text[^>]* x="([\d.]+)"', markup)) <= room
    return markup


PICTURES: dict[str, Callable[[Runner], str]] = {
    "attention": lambda runner: widgets.AttentionView(runner, IDS, max_tokens=0).picture(),
    "experts": lambda _: widgets.ModelGraph(EXPERTS).picture(),
    "fleet": lambda _: widgets.FleetView(FLEET).picture(),
    "graph": lambda runner: widgets.ModelGraph(runner, tokens=9, ceilings="h100").picture(),
    "memory": lambda _: widgets.MemoryCalculator().picture(),
    "ratios": lambda _: svg.html(ratio_figure(Comparison(SCRIPT, (), ROWS)).svg(in_page=True)),
    "roofline": lambda _: widgets.ModelGraph(widgets.RooflinePoint(SCRIPT, 1e9, 1e8, 1.0), ceilings="h100").picture(),
    "sampling": lambda _: widgets.SamplingExplorer(torch.zeros(40), prompt=[0], texts=[SCRIPT] * 40).picture(),
    "speculation": lambda _: widgets.SpeculationView(small_recorder().events, tokenizer=Evil()).picture(),
    "drafts": lambda _: draw_charts(CHARTS),
    "timeline": lambda _: widgets.Timeline(small_recorder().events).picture(),
    "tokens": lambda _: widgets.TokenView(SCRIPT, beside="bytes").picture(),
} | {
    f"path, {section}, {room}": lambda runner, section=section, room=room: path(runner, section, room)
    for section in ("path", "lens", "heads", "ablation") for room in (560, 1600)
}  # fmt: skip

# Which hang on no model's numbers.
GOLDEN = {"experts", "fleet", "graph", "memory", "speculation", "timeline", "tokens"}


@pytest.fixture(scope="module")
def runner() -> Any:
    return runner_of(model_of(spec_of(layer(4, 2), layer(4, 4), tied=False)))


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_can_be_read_and_reached(name: str, runner: Runner) -> None:
    markup = PICTURES[name](runner)
    assert not list(root_of(markup).iter("script")) and SCRIPT not in markup, "a name is not markup"
    keys = [each["data-key"] for each in marks(markup)]
    stops = [each for each in marks(markup) if each["tabindex"] == "0"]
    assert len(set(keys)) == len(keys) and bool(stops) == bool(keys), "arrows go on from where the tabulator stops"
    assert name not in GOLDEN or is_golden(f"picture-{name}", markup)
    assert min((float(each) for each in re.findall(r'font-size="([\d.]+)"', markup)), default=9.0) >= 9
