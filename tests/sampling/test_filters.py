"""The filters' laws, and their equality with transformers over ties and removed tokens."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers.generation import logits_process as theirs

from tests.helpers.refusals import refuses
from tests.thorough import tries
from workbench.request import SamplingParameters
from workbench.sampling import filters
from workbench.sampling.filters import (
    FrequencyPenalty,
    History,
    LogitBias,
    MinP,
    PresencePenalty,
    RepetitionPenalty,
    Temperature,
    TopK,
    TopP,
    build_filters,
)
from workbench.sampling.samplers import Greedy
from workbench.testing.samplers import LogitsRow, logits_rows

VOCABS = st.sampled_from([2, 5, 64, 257, 4096])
PROBABILITIES = st.floats(0.01, 1.0)
INF = float("inf")


def batches(most: int = 4) -> st.SearchStrategy[list[LogitsRow]]:
    return VOCABS.flatmap(lambda vocab: st.lists(logits_rows(vocab), min_size=1, max_size=most))


def stacked(batch: list[LogitsRow]) -> torch.Tensor:
    return torch.stack([row.logits for row in batch])


@given(batches(), st.floats(0.01, 10), st.integers(1, 100), PROBABILITIES, st.floats(0, 1))
@example([LogitsRow(torch.zeros(4), History(), "")], 1.0, 2, 0.5, 1.0)  # ties at each bound
@example([LogitsRow(torch.zeros(2), History(), "")], 0.01, 1, 0.5, 0.5)
def test_equal_to_the_warpers_of_transformers(batch, temperature, k, top_p, min_p):
    logits = stacked(batch)
    none = torch.LongTensor(len(batch), 0)
    pairs = [
        (Temperature(temperature), theirs.TemperatureLogitsWarper(temperature)),
        (TopK(k), theirs.TopKLogitsWarper(k)),
        (TopP(top_p), theirs.TopPLogitsWarper(top_p)),
        (MinP(min_p), theirs.MinPLogitsWarper(min_p)),
    ]
    for ours, warper in pairs:
        assert torch.equal(ours(logits), warper(none, logits)), ours


@given(batches(), st.floats(0.1, 5))
def test_repetition_penalty_is_that_of_transformers(batch, penalty):
    for row in batch:
        ids = torch.LongTensor([[*row.history.prompt_ids, *row.history.output_ids]])
        expected = theirs.RepetitionPenaltyLogitsProcessor(penalty)(ids, row.logits[None])
        assert torch.equal(RepetitionPenalty(penalty)(row.logits[None], [row.history]), expected)


@given(batches())
def test_a_chain_is_that_of_transformers(batch):
    parameters = SamplingParameters(repetition_penalty=1.3, temperature=0.7, top_k=20, top_p=0.9, min_p=0.05)
    for row in batch:
        ids = torch.LongTensor([[*row.history.prompt_ids, *row.history.output_ids]])
        expected = theirs.LogitsProcessorList(
            [
                theirs.RepetitionPenaltyLogitsProcessor(1.3),
                theirs.TemperatureLogitsWarper(0.7),
                theirs.TopKLogitsWarper(20),
                theirs.TopPLogitsWarper(0.9),
                theirs.MinPLogitsWarper(0.05),
            ]
        )(ids, row.logits[None])
        logits = row.logits[None]
        for rule in build_filters(parameters):
            logits = rule(logits, [row.history])
        assert torch.equal(logits, expected)


def test_presence_and_frequency_count_the_output_alone():
    logits, history = torch.tensor([[1.0, 2.0, 3.0, -INF]]), History(prompt_ids=[0, 0], output_ids=[1, 1, 3])
    assert FrequencyPenalty(0.5)(logits, [history]).tolist() == [[1.0, 1.0, 3.0, -INF]]
    assert PresencePenalty(0.5)(logits, [history]).tolist() == [[1.0, 1.5, 3.0, -INF]]
    assert RepetitionPenalty(2.0)(logits, [history]).tolist() == [[0.5, 1.0, 3.0, -INF]]


@given(batches(), st.sampled_from([1e-300, 1e-30, 1e-7, 0.3, 1.0, 50.0]))
def test_temperature_keeps_the_order(batch, temperature):
    logits = stacked(batch)
    cooled = Temperature(temperature)(logits)
    order = logits.argsort(dim=-1, stable=True)
    assert bool((cooled.gather(-1, order).diff(dim=-1).nan_to_num(0.0) >= 0).all())
    assert torch.equal(cooled.gather(-1, logits.argmax(-1, keepdim=True))[:, 0], cooled.amax(-1))
    assert bool(cooled.amax(-1).isfinite().all())


@given(batches())
def test_top_1_is_greedy_up_to_ties(batch):
    logits = stacked(batch)
    left = TopK(1)(logits)
    assert torch.equal(left > -INF, logits == logits.amax(-1, keepdim=True))
    assert left.argmax(-1).tolist() == Greedy().choose_rows(logits, [0.5] * len(batch))


@pytest.mark.parametrize("vocab", [5, filters.LARGE_VOCAB + 1])
def test_no_rows_stay_no_rows(vocab: int) -> None:
    for each in (TopP(0.9), TopK(3), MinP(0.1), Temperature(0.5)):
        assert each(torch.empty(0, vocab)).shape == (0, vocab)


@pytest.mark.parametrize("large", [filters.LARGE_VOCAB, 256])  # by all tokens, and by the likely ones
@given(batches(), PROBABILITIES)
def test_top_p_keeps_the_smallest_set_that_holds_p(large, batch, p):
    logits = stacked(batch)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(filters, "LARGE_VOCAB", large)
        filtered = TopP(p)(logits)
        if large < logits.shape[-1]:
            assert torch.equal(filtered, torch.cat([TopP(p)(row) for row in logits.split(1)]))
    kept = filtered > -INF
    assert torch.equal(filtered[kept], logits[kept])
    mass = logits.double().softmax(-1)
    for row_kept, row_mass in zip(kept, mass, strict=True):
        held = row_mass[row_kept]
        assert float(held.sum()) >= p - 1e-5
        if len(held) > 1:
            assert float(held.sum() - held.min()) < p + 1e-5  # without its least token it holds less than p
        if not bool(row_kept.all()):
            assert float(row_mass[~row_kept].max()) <= float(held.min()) + 1e-9


@given(batches(), st.sampled_from([5e-324, 1e-12, 1e-6]))
def test_the_smallest_top_p_still_keeps_one_of_the_most_probable(batch, p):
    logits = stacked(batch)
    kept = TopP(p)(logits) > -INF
    assert bool(kept.any(-1).all())
    assert bool((logits == logits.amax(-1, keepdim=True))[kept].all())


@given(batches(), PROBABILITIES)
def test_min_p_is_relative_to_the_mode(batch, p):
    logits = stacked(batch)
    kept = MinP(p)(logits) > -INF
    share = (logits.double() - logits.double().amax(-1, keepdim=True)).exp()
    assert bool(kept[share > p * (1 + 1e-4)].all())
    assert not bool(kept[share < p * (1 - 1e-4)].any())


@given(batches(), st.integers(1, 70), PROBABILITIES, st.floats(0.2, 3))
def test_which_filters_commute(batch, k, p, temperature):
    logits = stacked(batch)
    assert torch.equal(TopK(k)(logits / 2), TopK(k)(logits) / 2)  # rank does not see the temperature
    held = TopP(p)(TopK(k)(logits)) > -INF
    assert bool((held <= (TopK(k)(logits) > -INF)).all())


def test_top_p_after_top_k_is_over_what_top_k_left():
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    assert (TopP(0.55)(TopK(2)(logits)) > -INF).tolist() == [[True, False, False, False]]
    assert (TopK(2)(TopP(0.55)(logits)) > -INF).tolist() == [[True, True, False, False]]


@given(st.lists(logits_rows(257), min_size=2, max_size=5))
def test_no_filter_changes_its_input_or_sees_other_rows(batch):
    parameters = SamplingParameters(
        repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=0.2, logit_bias={3: 1.5, 7: -INF},
        temperature=0.8, top_k=40, top_p=0.95, min_p=0.02,
    )  # fmt: skip
    logits, histories = stacked(batch), [row.history for row in batch]
    for rule in build_filters(parameters):
        before = logits.clone()
        together = rule(logits, histories)
        assert torch.equal(logits, before), rule
        for i, history in enumerate(histories):
            assert torch.equal(rule(logits[i : i + 1].clone(), [history])[0], together[i]), rule
        assert not bool(((before == -INF) & (together > -INF)).any()), rule
        logits = together


def test_the_order_of_the_pipeline_and_its_identities():
    everything = SamplingParameters(
        repetition_penalty=1.1, frequency_penalty=0.1, presence_penalty=0.1, logit_bias={1: 2.0},
        temperature=0.5, top_k=5, top_p=0.5, min_p=0.5,
    )  # fmt: skip
    kinds = [RepetitionPenalty, FrequencyPenalty, PresencePenalty, LogitBias, Temperature, TopK, TopP, MinP]
    assert [type(rule) for rule in build_filters(everything)] == kinds
    assert build_filters(SamplingParameters()) == ()
    greedy = everything.model_copy(update={"temperature": 0.0})
    assert [type(rule) for rule in build_filters(greedy)] == kinds[:4]
    assert hash(build_filters(everything)) == hash(build_filters(everything.model_copy(update={"seed": 9})))


@settings(max_examples=tries(20))
@given(st.sampled_from([0, -1, float("nan")]))
def test_a_filter_that_cannot_be_is_refused(bad):
    for make in (Temperature, TopK, TopP, RepetitionPenalty):
        refuses("must be", make, bad)


@pytest.mark.parametrize("biases", [((-1, 1.0),), ((2, float("nan")),), ((2, INF),)])
def test_a_bias_that_cannot_be_is_refused(biases):
    refuses("logit bias", LogitBias, biases)


def test_a_bias_beyond_the_vocabulary_is_refused():
    refuses("token id 9 is outside the vocabulary of 4 tokens", lambda: LogitBias(((9, 1.0),))(torch.zeros(1, 4)))
