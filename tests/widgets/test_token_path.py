"""The path of a token shows the numbers of the model: to the draw, to one product, and without a head."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compiled_kernels import Backend
from tests.engine.tiny import VOCAB, layer, mixture_of, model_of, own_specs, request, runner_of, spec_of, weights_of
from tests.patience import limit
from tests.tensor_parallel.in_threads import runner_of_ranks
from tests.thorough import tries
from workbench.engine.load import load
from workbench.engine.runner import Runner
from workbench.errors import WorkbenchError
from workbench.inspect.ablation import Ablation, continue_text
from workbench.model.quantized import WeightFormat
from workbench.model.spec import ModelSpec
from workbench.oracle import naive
from workbench.trace.events import Decoded, Finished
from workbench.units import format_number
from workbench.widgets import RunnerThread, TokenPath
from workbench.widgets.token_path.ablation_picture import Continuations, draw_texts
from workbench.widgets.token_path.lens_picture import positions_shown
from workbench.widgets.token_path.tensor_picture import TensorStrip

PROMPT = "def add(a, b):\n    return a +"
IDS = (3, 1, 4, 1, 5, 9, 2, 6)


@pytest.fixture(scope="module")
def demo() -> Iterator[Runner]:
    runner = load("demo", backend="eager")
    yield runner
    RunnerThread.attach(runner).stop()


@pytest.fixture
def path() -> Iterator[TokenPath]:
    with followed(temperature=1.0, top_k=5, max_tokens=6, seed=3) as made:
        yield made


@contextmanager
def followed(spec: ModelSpec | None = None, **settings: Any) -> Iterator[TokenPath]:
    """Follow a prompt in a tiny model; what is left of it is closed."""
    runner = runner_of(model_of(spec or spec_of(layer(4, 2), layer(4, 4), tied=False)))
    made = TokenPath(runner, IDS, ignore_eos=True, **settings)
    yield made
    made.close()
    RunnerThread.attach(runner).stop()


def pick(path: TokenPath, key: str) -> str:
    path.shown.picked = key
    path.throttle.flush()
    return path.shown.content


def test_the_draw_is_the_engine_s(path: TokenPath) -> None:
    path.section = "ablation"
    path.wait(limit(60))
    engine, _ = path.continuations()
    draw, share = path.data.draw, path.data.trace.probabilities
    assert draw.token == engine[0] and [step.name for step in path.data.steps[-2:]] == ["filter 1", "draw"]
    assert sum(float(share[n]) > 0 for n in range(VOCAB)) == 5
    for name, begin, end in draw.segments:
        assert abs(float(share[int(name[1:])]) - (end - begin)) < 1e-9
    inside = [name for name, begin, end in draw.segments if begin <= draw.number < end]
    assert inside in ([], [draw.text])


def test_each_seed_draws_the_engine_s_token() -> None:
    drawn = set()
    for seed in range(8):
        with followed(section="ablation", seed=seed, temperature=4.0, max_tokens=1) as path:
            path.wait(limit(60))
            assert path.continuations()[0] == (path.data.draw.token,)
            drawn.add(path.data.draw.token)
    assert len(drawn) > 3


@settings(max_examples=tries(5), deadline=None)
@given(own_specs, st.data())
def test_steps_are_all_stages_and_a_chosen_number_is_the_tensor_s(spec: ModelSpec, data: st.DataObject) -> None:
    with followed(spec, temperature=0) as path:
        stages = path.forward_pass.stages
        names = [(stage.name, stage.layer) for stage in stages]
        assert [(step.name, step.layer) for step in path.data.steps] == [*names, ("filter 1", None), ("draw", None)]
        path.step = data.draw(st.integers(0, len(names) - 1))
        stage = stages[path.step]
        path.set_trait("column", data.draw(st.integers(0, stage.num_columns - 1)))
        values = stage.values[0] if path.data.is_by_head(path.data.steps[path.step]) else stage.values
        assert f">{format_number(float(values[-1, path.column]))}</text>" in path.picture()


@pytest.mark.parametrize("ids", [[], [7], [7, 10, 8]])
def test_each_token_has_its_piece_of_the_text(ids: list[int]) -> None:
    path: Any = SimpleNamespace(_tokenizer=SimpleNamespace(decode=lambda ids: "".join(map(str, ids))))
    assert TokenPath._pieces(path, ids) == tuple(map(str, ids))


def test_marks_are_picked_down_to_one_number(path: TokenPath) -> None:
    pick(path, "s1.projected")
    step = path.data.steps[path.step]
    assert (step.name, step.layer) == ("projected", 1)
    pick(path, "t2")
    assert (path.position, path.column) == (2, -1)
    content = pick(path, "b3.5")
    assert (path.position, path.column) == (3, 5) and "dot product of the row before it with row 5 of the" in content
    pick(path, "n7")
    assert path.column == 7
    pick(path, "s1.weights")
    pick(path, "h3")
    assert (path.head, path.column) == (3, -1)  # another step begins at its own largest number
    path.section = "lens"
    pick(path, "l1.6")
    assert (path.lens_layer, path.position, path.shown.picked) == (1, 6, "")
    path.section = "heads"
    assert "Layer 0, head 2" in pick(path, "m0.2")


def test_the_lens_is_the_head_on_the_residual_stream(path: TokenPath) -> None:
    found, model = path.forward_pass, path.forward_pass.model
    cells = path.data.lens(range(2, 5))
    assert [(cell.position, cell.layer) for cell in cells] == [(p, n) for p in (2, 3, 4) for n in range(3)]
    for cell in cells:
        with torch.inference_mode():
            share = model.compute_logits(found.residual(cell.layer)[cell.position][None])[0].double().softmax(-1)
        assert abs(float(share.max()) - cell.probability) < 1e-6 and cell.text == f"#{int(share.argmax())}"
    top = path.data.lens_top(2, 4)
    assert len(top) == 5 and all(abs(each.before - each.after) < 1e-12 for each in top)
    assert abs(top[0].before - float(found.values("logits")[4].double().softmax(-1).max())) < 1e-6


def test_a_head_is_switched_off_and_on_again(path: TokenPath) -> None:
    keys = ("o0.1", "o1.2", "y1")

    def texts(*picked: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        for key in picked:
            pick(path, key)
        path.wait(limit(60))
        return path.continuations()  # type: ignore

    path.section = "ablation"
    engine, without = texts()
    assert engine == without and len(engine) == 6
    off, request = Ablation(frozenset({(0, 1), (1, 2)}), frozenset({1})), path._request
    expected = continue_text(path.forward_pass.model, request.prompt_ids, request.sampling, off)
    assert texts(*keys) == (engine, expected) and path.heads_off == ((0, 1), (1, 2)) and path.layers_off == (1,)
    assert 'aria-checked="false"' in path.picture()
    assert texts(*keys) == (engine, engine) and 'aria-checked="false"' not in path.picture()


def test_the_first_difference_is_marked() -> None:
    found = Continuations(("a", "b", "c"), ("a", "<x>", "c"))
    pairs = (("a", "b"), ("a",)), (("a",), ("a",))
    assert found.first_difference == 1 and [Continuations(*pair).first_difference for pair in pairs] == [1, None]
    for made, said in (
        (found, '<b class="first" data-tip="the first difference">&lt;x&gt;</b>'),
        (Continuations(("a", "b"), ("a", "c"), 0), "Rounding alone"),
        (Continuations(("a",), None), "computing"),
        (Continuations((), None, error="no memory"), 'role="alert"'),
    ):
        assert said in draw_texts("say ", made, True)


@given(st.integers(1, 300), st.integers(1, 40), st.integers(200, 2000), st.data())
def test_bins_hold_every_column_once(columns: int, tokens: int, width: int, data: st.DataObject) -> None:
    values = np.random.default_rng(0).normal(size=(tokens, columns))
    row, column = data.draw(st.integers(0, tokens - 1)), data.draw(st.integers(0, columns - 1))
    strip = TensorStrip(values, [str(n) for n in range(tokens)], row, column, width)
    assert column in strip.bin and row in strip.rows and strip.bin.stop <= columns
    markup, _ = strip.draw()
    picked = [int(each.split(".")[1]) for each in re.findall(rf'data-key="b({row}\.\d+)"', markup)]
    bins = [picked_column // strip.columns_per_bin for picked_column in picked]
    assert bins == list(range(-(-columns // strip.columns_per_bin)))
    for chosen in picked:
        begin = chosen // strip.columns_per_bin * strip.columns_per_bin
        assert abs(values[row, chosen]) == abs(values[row, begin : begin + strip.columns_per_bin]).max()


@given(st.integers(1, 60), st.integers(300, 2000), st.data())
def test_the_lens_shows_the_followed_position(count: int, width: int, data: st.DataObject) -> None:
    position = data.draw(st.integers(0, count - 1))
    shown = positions_shown(count, position, width)
    assert position in shown and shown.start >= 0 and shown.stop <= count


def test_it_plays_to_the_end(path: TokenPath) -> None:
    assert path.steps.last == len(path.data.steps) - 1
    path.steps.step = 4
    path.throttle.flush()
    assert path.step == 4 and path.steps.drawn == 4 and path.steps.title.startswith("5 of 35: layer 0, ")


def test_a_compiled_model_is_followed_as_it_is_served() -> None:
    """Its products are the compiled backend's; the step adds in another order, within what its type rounds."""
    runner = load("demo", backend="mlir")
    path = TokenPath(runner, PROMPT)
    logits = path.forward_pass.values("logits")[-1].double()
    exact = logits.log_softmax(-1)
    events = runner.stream(PROMPT, max_tokens=1, logprobs=20, temperature=0.7, top_k=40)
    (event,) = (each for each in events if isinstance(each, Decoded))
    worst = max(abs(logprob - float(exact[token])) for token, logprob in event.top_logprobs)
    assert worst < torch.finfo(runner.model.dtype).eps * (1 + float(logits.abs().max()))
    assert path.data.draw.token == event.token_id
    path.close()
    RunnerThread.attach(runner).stop()


def test_a_model_of_inductor_is_followed_without_being_compiled() -> None:
    """`tests/engine/test_compiled.py` compares it with what the engine compiles."""
    runner = runner_of(model_of(spec_of(layer(4, 2)), backend=Backend.INDUCTOR))
    path = TokenPath(runner, IDS)
    whole = naive.logits(runner.model, torch.tensor(IDS))
    assert torch.allclose(path.forward_pass.values("logits"), whole, atol=1e-5)
    assert path.data.derivation(path.data.steps[1], 0, 0).terms and runner.core.executor.compiles == 0
    path.close()
    RunnerThread.attach(runner).stop()


def test_the_ranks_of_a_model_that_is_refused_go_on() -> None:
    spec = spec_of(layer(4, 2))
    with runner_of_ranks(spec, weights_of(spec, torch.float32, 0), WeightFormat(), 2, Backend.EAGER) as runner:
        with pytest.raises(WorkbenchError, match=r"spread over 2 ranks.*load it with tensor=1 to look inside"):
            TokenPath(runner, IDS)
        ends = [event for event in runner.stream([request("a", 5, 3)]) if isinstance(event, Finished)]
        assert len(ends[0].token_ids) == 3


def test_a_mixture_and_a_runner_under_way() -> None:
    with followed(mixture_of()) as path:
        for name, words in (("router", "choice 1 of 2, by its router&#x27;s number"), ("feedforward", "of experts")):
            path.step = next(n for n, step in enumerate(path.data.steps) if step.name == name)
            assert words in path.picture()
