"""Texts fed through a runner: every scored place is the oracle's, however the text is cut into chunks and decodes."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.engine.tiny import VOCAB, expected, finals, layer, model_of, request, runner_of, spec_of, specs
from tests.thorough import tries
from workbench.measure.quality.teacher_forcing import (
    ForcedText,
    ReferenceLogits,
    TokenDivergences,
    append_divergences,
    measure_divergence,
    score_texts,
)
from workbench.model.spec import ModelSpec
from workbench.oracle import naive
from workbench.request import random_token_ids

MODEL = model_of(spec_of(layer(4, 2), layer(4, 2, sliding_window=5)))


def text(draw: random.Random, most: int = 30) -> ForcedText:
    ids = random_token_ids(draw, VOCAB, draw.randrange(2, most))
    return ForcedText(ids, draw.randrange(1, len(ids)), draw.randrange(1, len(ids)))


@settings(max_examples=tries(25))
@given(specs, st.integers(1, 20), st.integers(1, 4), st.randoms())
def test_every_scored_place_is_the_oracles(spec: ModelSpec, budget: int, seqs: int, draw: random.Random) -> None:
    model = model_of(spec, draw.randrange(99))
    texts = [text(draw) for _ in range(draw.randrange(1, 5))]
    rows: dict[int, list[Tensor]] = {index: [] for index in range(len(texts))}
    reached = {index: one.first_scored for index, one in enumerate(texts)}

    def note(index: int, first: int, logits: Tensor) -> None:
        assert first == reached[index]
        reached[index] += len(logits)
        rows[index].append(logits)

    runner = runner_of(model, max_num_batched_tokens=budget, max_num_seqs=seqs)
    score_texts(runner, texts, note)
    for index, one in enumerate(texts):
        assert reached[index] == len(one.ids)
        exact = naive.logits(model, torch.tensor(one.ids), torch.float64)[one.first_scored - 1 : -1]
        _, bound = expected(model, list(one.ids))
        assert (torch.cat(rows[index]).double() - exact).abs().max() <= bound + 1e-5


def test_a_text_that_is_preempted_is_noted_once() -> None:
    draw = random.Random(3)
    texts = [ForcedText(random_token_ids(draw, VOCAB, 24), 1, 9) for _ in range(4)]
    noted: dict[int, list[int]] = {index: [] for index in range(4)}
    runner = runner_of(MODEL, pages=9)
    backs = []
    runner.telemetry.listener = lambda event: backs.append(event) if event.kind == "preempted" else None
    score_texts(runner, texts, lambda index, first, logits: noted[index].extend(range(first, first + len(logits))))
    assert backs
    assert all(places == list(range(1, 24)) for places in noted.values())


def test_the_runner_is_itself_again_afterwards() -> None:
    runner = runner_of(MODEL)
    before = finals(runner, [request("a", 7, 9)])
    executor, sampler = runner.core.executor, runner.core.decoder.sampler
    score_texts(runner, [ForcedText((1, 2, 3, 4), 1, 2)], lambda *_: None)
    assert runner.core.executor is executor and runner.core.decoder.sampler is sampler
    assert finals(runner, [request("a", 7, 9)]) == before


def test_a_model_is_no_distance_from_itself_and_some_from_another() -> None:
    draw = random.Random(5)
    texts = [text(draw) for _ in range(4)]
    reference = ReferenceLogits.compute(runner_of(MODEL), texts)
    same = measure_divergence(runner_of(MODEL, page_size=3, max_num_batched_tokens=5), reference).summary(100)
    other = measure_divergence(runner_of(model_of(MODEL.spec, seed=1)), reference).summary(100)
    assert same["kl_max"] < 1e-11 and same["same_top"] == 1.0
    assert other["kl_mean"] > 1e-6 and other["kl_max"] >= other["kl_p99"] >= 0
    assert same["scored_tokens"] == sum(len(one.ids) - one.first_scored for one in texts)


def test_figures_of_a_place() -> None:
    """KL(p || q), p the reference: by hand, and not the other way round."""
    p, q = torch.tensor([[0.5, 0.25, 0.25]]), torch.tensor([[0.25, 0.5, 0.25]])
    places = TokenDivergences()
    append_divergences(places, 7, 3, p.log(), q.log(), torch.tensor([1]))
    assert places.kl == pytest.approx([0.25 * 0.6931471805599453])
    assert places.nats == pytest.approx([0.6931471805599453])
    assert (places.text, places.token, places.same_top) == ([7], [3], [False])
    p = torch.tensor([[0.8, 0.1, 0.1]])
    append_divergences(places, 7, 4, p.log(), q.log(), torch.tensor([0]))
    assert places.kl[1] == pytest.approx(float((p * (p / q).log()).sum()))
    found = places.summary(2)
    assert found["bits_per_byte"] == pytest.approx((1 + 2) / 2)
