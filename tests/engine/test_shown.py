"""Plans, runners and attention as a notebook shows them."""

from __future__ import annotations

import base64
import re

import pytest
import torch

from tests.engine.tiny import layer, model_of, request, runner_of, spec_of
from tests.helpers.pixels import read
from tests.helpers.recorded import Changed
from workbench.engine.runner import Runner
from workbench.inspect.attention import LARGEST, MAX_MAPS, Inspection
from workbench.scheduler.plan import StepPlan

ODD = "<script>alert('&amp;')</script>"


def test_a_plan_says_what_is_computed_and_why() -> None:
    runner, found = runner_of(model_of(spec_of()), max_num_seqs=2, policy="fcfs"), list[StepPlan]()
    Changed(runner, lambda plan, logits: found.append(plan) or logits)
    for each in (request(ODD, 20, 3), request("b", 4, 2)):
        runner.submit(each)
    runner.step()
    text = str(found[0])
    assert "step 0: prefill, 16 tokens (16 of prefill, 0 of decode)" in text and "0 - 15" in text
    assert "prefill cut: 16 of 20 tokens fit" in text
    assert "<script" not in found[0]._repr_html_() and "decisions" in found[0]._repr_html_()
    assert repr(found[0]).startswith("StepPlan(step=0")


def test_a_runner_says_what_it_runs_and_what_it_does() -> None:
    runner = runner_of(model_of(spec_of()))
    expected = r"<Runner tiny: [\d,]+ parameters, backend eager; requests: 0 running, .* 0 of 40 pages used>"
    assert re.fullmatch(expected, repr(runner))
    runner.submit(request(ODD, 3, 3))
    runner.step()
    assert "requests: 1 running, 0 waiting; 1 of 40 pages used" in repr(runner)
    page = runner._repr_html_()
    assert "1 of 40, of 4 tokens each" in page and "<script" not in page and "interleaved" in page


@pytest.fixture(scope="module")
def serving() -> Runner:
    runner = runner_of(model_of(spec_of(layer(), layer(4, 2))))
    runner.submit(request("<a>", 12, 9))
    runner.step()
    return runner


def test_attention_is_a_picture_a_head(serving: Runner) -> None:
    found = serving.inspect("<a>", positions=range(4, 12), hidden_states=(0,))
    page = found._repr_html_()
    pictures = re.findall(r'src="data:image/png;base64,([^"]+)" alt="([^"]+)"', page)
    titles = [words.partition(":")[0] for _, words in pictures]
    assert titles == [f"layer {layer} head {head}" for layer, heads in ((0, 2), (1, 4)) for head in range(heads)]
    image = read(base64.b64decode(pictures[3][0]))
    weights = found.weights[1][1]
    down, across = image.shape[0] // weights.shape[0], image.shape[1] // weights.shape[1]
    assert image.shape == (weights.shape[0] * down, weights.shape[1] * across, 3)
    small = image[::down, ::across].astype(float)
    brightest = divmod(int(small.sum(2).argmax()), weights.shape[1])
    assert brightest == divmod(int(weights.argmax()), weights.shape[1])
    assert "<a>" not in page and "of 12 positions" in page and "hidden states before block 0: [8, 8]" in page


def test_a_head_keeps_its_number_and_a_row_its_position(serving: Runner) -> None:
    found = serving.inspect("<a>", positions=(-1,), layers=(1,), heads=(3, 1))
    assert re.findall(r"layer 1 head (\d): row 11, of 12 positions", found._repr_html_()) == ["3", "3", "1", "1"]
    text = str(found)
    assert text.splitlines()[0] == "request <a>: row 11, of 12 positions" and len(text.splitlines()) == 5
    assert [line.split()[:2] for line in text.splitlines()[3:]] == [["1", "3"], ["1", "1"]]
    assert repr(found).startswith("Inspection(request_id='<a>', positions=(11,)")


def test_the_largest_weight_is_named_where_it_is_however_small_its_picture() -> None:
    """Rows before the last ones drawn and pooled columns count as they are: row 3 of 300, position 1,234 of 5,000."""
    weights = torch.zeros(1, 300, 5000)
    weights[0, 3, 1234] = 0.75
    page = Inspection("a", tuple(range(4700, 5000)), (0,) * 5000, {0: weights})._repr_html_()
    assert "largest weight 0.75 at 1234, from 4703" in page


def test_pictures_are_small_however_much_there_is() -> None:
    weights = dict.fromkeys(range(3), torch.rand(1, 300, 5000).expand(16, -1, -1))
    page = Inspection("a", tuple(range(4700, 5000)), (0,) * 5000, weights)._repr_html_()
    assert page.count("<img") == MAX_MAPS and f"{MAX_MAPS} of 48 heads are drawn" in page
    assert "largest of 20 positions" in page and len(page) < 8_000_000
    tiny = Inspection("a", (0,), (7,), {0: torch.ones(1, 1, 1)})._repr_html_()
    assert read(base64.b64decode(re.findall(r'base64,([^"]+)"', tiny)[0])).shape == (LARGEST, LARGEST, 3)
