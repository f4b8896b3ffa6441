"""The explorer shows what the engine's own sampling gives, at every position, for what its sliders say."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import traitlets
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.engine.load import load
from workbench.engine.runner import Runner
from workbench.errors import WorkbenchError
from workbench.request import SamplingParameters
from workbench.sampling.filters import History, build_filters
from workbench.trace.events import Decoded
from workbench.widgets import RunnerThread, SamplingExplorer
from workbench.widgets.sampling.data import TextLogits, position_figures

VOCAB = 40
VALUES = st.one_of(st.sampled_from([-math.inf, 0.0, 1.0]), st.floats(-20, 20, width=32))
ROWS = st.lists(VALUES, min_size=VOCAB, max_size=VOCAB).filter(lambda row: max(row) > -math.inf)
WAYS = st.builds(
    SamplingParameters,
    temperature=st.sampled_from([0.0, 0.7, 1.0, 1.6]),
    top_k=st.integers(0, 20),
    top_p=st.sampled_from([0.3, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.05]),
    presence_penalty=st.sampled_from([0.0, 0.4]),
)
PROMPT = "def read_file(path):\n    with open("


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    runner = load("demo", backend="eager")
    yield runner
    RunnerThread.attach(runner).stop()
    runner.set_owner(None)
    runner.set_listener(None)


@pytest.fixture(scope="module")
def explorer(runner: Runner) -> Iterator[SamplingExplorer]:
    explorer = SamplingExplorer(runner, PROMPT, max_tokens=8, seed=3).wait()
    yield explorer
    explorer.close()


@settings(deadline=None)
@given(ROWS, WAYS, st.lists(st.integers(0, VOCAB - 1), max_size=5), st.integers(1, 30), st.integers(-1, VOCAB - 1))
def test_what_is_shown_is_what_the_engine_draws_from(
    row: list[float], way: SamplingParameters, output: list[int], bars: int, picked: int
) -> None:
    text, left = TextLogits.from_array(np.array(row), [1, 2], output), torch.tensor(row)
    seen = position_figures(text, 2 + len(output), way, 50, bars, picked, str)
    for rule in build_filters(way):
        left = rule(left[None].float(), [History((1, 2), output)])[0]
    wanted = left.double().softmax(-1)
    if way.temperature == 0:
        wanted = torch.nn.functional.one_hot(left.argmax(), VOCAB).double()
    single = [each for each in seen.candidates if each.token >= 0]
    assert all(each.after == float(wanted[each.token]) for each in single)
    assert picked < 0 or [each.token for each in single if each.picked] == [picked]
    assert math.isclose(sum(each.before for each in seen.candidates), 1, abs_tol=1e-9)
    assert math.isclose(sum(each.after for each in seen.candidates), 1, abs_tol=1e-9)
    assert sum(each.drawn for each in seen.candidates) == 50 == sum(seen.draws.values())
    assert {token for token, count in seen.draws.items() if count} <= {*(wanted > 0).nonzero()[:, 0].tolist()}


def test_the_filters_stand_in_the_engines_order() -> None:
    given = {"min_p": 0.01, "top_p": 0.9, "top_k": 9, "temperature": 0.5, "presence_penalty": 1.0}
    given |= {"logit_bias": {3: 1.0}, "frequency_penalty": 1.0, "repetition_penalty": 1.2}
    shown = [each.name for each in SamplingExplorer(torch.zeros(VOCAB), **given).figures().sieves]
    order = "repetition penalty 1.2, frequency penalty 1, presence penalty 1, logit bias, temperature 0.5, top k 9"
    assert shown == [*order.split(", "), "top p 0.9", "min p 0.01"]


def test_penalties_see_what_stands_before_the_position_and_no_more() -> None:
    explorer = SamplingExplorer(torch.zeros(3, 8), [1, 2], output=[3, 4], bars=8)
    for position, seen in ((2, {1, 2}), (3, {1, 2, 3}), (4, {1, 2, 3, 4})):
        explorer.position = position
        explorer.presence_penalty, explorer.repetition_penalty = 1.0, 1.0
        less = {each.token for each in explorer.figures().candidates if each.after < 1 / 8}
        assert less == seen - {1, 2}  # the prompt does not count
    rows = SamplingExplorer(torch.ones(3, 8), [1, 2], output=[3, 4], bars=8, repetition_penalty=1.5, position=3)
    assert {each.token for each in rows.figures().candidates if each.after < 1 / 8} == {1, 2, 3}


def test_every_position_of_a_generation_can_be_looked_at(runner: Runner, explorer: SamplingExplorer) -> None:
    asked = [e.token_id for e in runner.stream(PROMPT, max_tokens=8, seed=3) if isinstance(e, Decoded)]
    prompt = runner.make_requests(PROMPT, {})[0].prompt_ids
    logits = runner.model.logits([*prompt, *asked])
    for place, token in enumerate(asked):
        explorer.position = len(prompt) + place
        seen = explorer.figures()
        assert seen.chosen is not None and seen.chosen.token == token
        assert seen.chosen.before == float(logits[len(prompt) + place - 1].double().softmax(-1)[token])
    explorer.position = len(prompt) + len(asked)
    assert explorer.figures().chosen is None and "what comes next" in explorer.picture()
    with pytest.raises(WorkbenchError, match="this text has 1 to"):
        explorer.position += 1


def test_the_first_draw_is_the_engines_own(explorer: SamplingExplorer) -> None:
    explorer.draws = 1
    try:
        for place in range(8):
            explorer.position = len(explorer._text.prompt_ids) + place  # type: ignore[union-attr]
            seen = explorer.figures()
            assert seen.chosen is not None and seen.draws == {seen.chosen.token: 1}
    finally:
        explorer.draws = 1000


def test_a_slider_moves_the_trait_and_the_picture(explorer: SamplingExplorer) -> None:
    sliders = {each.description: each for each in explorer.children[1].children}
    before = explorer.picture()
    sliders["top k"].value = 3
    explorer.throttle.flush()
    assert explorer.top_k == explorer.parameters.top_k == 3
    assert explorer.shown.content == explorer.picture() != before and "top k 3" in explorer.shown.content
    explorer.top_k = 0
    assert sliders["top k"].value == 0
    explorer.shown.picked = "t2"
    assert explorer.position == explorer.steps.step == 2
    explorer.shown.picked = "c7"
    assert any(each.picked and each.token == 7 for each in explorer.figures().candidates)
    explorer.token = -1


def test_draw_again_draws_with_other_seeds() -> None:
    explorer = SamplingExplorer(torch.zeros(VOCAB), draws=200)
    first = explorer.figures().draws
    (button,) = explorer.children[2].children
    button.click()
    assert explorer.seed == 200 and explorer.figures().draws != first


def test_a_text_of_ones_own_is_not_generated(runner: Runner) -> None:
    explorer = SamplingExplorer(runner, "def f(x):", output="\n    return x").wait()
    assert explorer._text is not None and runner.tokenizer is not None
    assert runner.tokenizer.decode(explorer._text.ids) == "def f(x):\n    return x"
    assert "bits before the filters" in explorer.picture()


def test_generate_goes_on_with_the_present_settings(runner: Runner) -> None:
    explorer = SamplingExplorer(runner, PROMPT, max_tokens=6, temperature=0).wait()
    first = explorer._text
    explorer.generate()
    explorer.wait()
    assert first is not None and explorer._text is not None and explorer._text.ids == first.ids
    explorer.temperature = 2.0
    explorer.generate()
    explorer.wait()
    assert explorer._text is not None and explorer._text.ids != first.ids


def test_stopped_it_shows_what_there_is(runner: Runner) -> None:
    explorer = SamplingExplorer(runner, PROMPT, max_tokens=500, temperature=0, ignore_eos=True)
    explorer.stop()
    explorer.wait()
    assert explorer._text is not None and len(explorer._text.output_ids) < 500
    assert "working" not in explorer.shown.content


def test_a_part_is_shown_by_its_name_and_pointed_at_by_its_path() -> None:
    own = {"path": "experiments.zoo.typical:Typical", "arguments": {"mass": 0.5}}
    picture = SamplingExplorer(torch.arange(VOCAB).float(), prompt=[1], filters=[own]).picture()
    assert ">1  Typical<" in picture and "1  experiments.zoo.typical:Typical: " in picture
    assert ">1  experiments" not in picture, "a path is wider than its column"


def test_while_it_is_live_a_fault_is_a_line_of_text(runner: Runner) -> None:
    explorer = SamplingExplorer(torch.tensor([math.nan, 1.0]))
    assert 'role="alert"' in explorer.picture() and "contain NaN" in explorer.picture()
    with pytest.raises(WorkbenchError):
        explorer.top_p = -0.1
    assert explorer.top_p == 1.0
    with pytest.raises(traitlets.TraitError):
        explorer.top_k = "many"  # type: ignore
    refused = SamplingExplorer(runner, [1] * 2000).wait()
    assert 'role="alert"' in refused.picture() and "context" in refused.picture()
