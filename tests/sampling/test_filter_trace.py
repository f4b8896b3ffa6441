"""The filter trace shows what the engine does: the same filters, in the same order, with the same draws."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.helpers.refusals import refuses
from workbench.errors import WorkbenchError
from workbench.request import CustomPart, Request, SamplingParameters, Sequence
from workbench.sampling.filter_trace import entropy_bits, trace_filters
from workbench.sampling.filters import History, build_filters
from workbench.sampling.sampler import Sampler
from workbench.sampling.samplers import RandomSampler, uniform

VOCAB = 12
VALUES = st.one_of(st.sampled_from([-math.inf, 0.0, 0.5, 1.0]), st.floats(-30, 30, width=32))
ROWS = st.lists(VALUES, min_size=VOCAB, max_size=VOCAB).filter(lambda row: max(row) > -math.inf).map(torch.tensor)
TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=6)
WAYS = st.builds(
    SamplingParameters,
    temperature=st.sampled_from([0.0, 1e-9, 0.3, 1.0, 2.0]),
    top_k=st.integers(0, VOCAB + 1),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.1, 1.0]),
    repetition_penalty=st.sampled_from([0.7, 1.0, 1.5]),
    presence_penalty=st.sampled_from([-1.0, 0.0, 1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.5]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-math.inf, 2.0]), max_size=2),
    seed=st.integers(0, 2**40),
)


def sequence(sampling: SamplingParameters, prompt: list[int], output: list[int]) -> Sequence:
    made = Sequence.from_request(Request("r", tuple(prompt), sampling), 0)
    made.token_ids += output
    return made


@given(ROWS, WAYS, TOKENS.filter(bool), TOKENS)
def test_what_is_shown_is_what_the_engine_chooses_from(
    row: Tensor, way: SamplingParameters, prompt: list[int], output: list[int]
) -> None:
    history = History(tuple(prompt), output)
    choices = [
        Sampler(VOCAB).sample(row[None], [sequence(each, prompt, output)])[0]
        for each in (way.model_copy(update={"seed": way.seed + n}) for n in range(8))
    ]
    try:
        found = trace_filters(row, history, way)
    except WorkbenchError as error:
        assert choices[0].error == str(error)
        return
    assert found.draw([uniform(way.seed + n, len(output)) for n in range(8)]) == [each.token_id for each in choices]
    left = row
    for stage, rule in zip(found.steps, build_filters(way), strict=False):
        left = rule(left[None], [history])[0]
        assert torch.equal(stage.logits, left)
    assert len(found.steps) == len(build_filters(way)) + (way.temperature == 0)
    if way.temperature:
        assert torch.equal(found.probabilities, left.double().softmax(-1))
    else:
        assert found.probabilities[choices[0].token_id] == 1 and found.steps[-1].name == "greedy"


@given(ROWS, WAYS, TOKENS.filter(bool), TOKENS)
def test_no_probability_is_lost_and_no_token_falls_twice(
    row: Tensor, way: SamplingParameters, prompt: list[int], output: list[int]
) -> None:
    try:
        found = trace_filters(row, History(tuple(prompt), output), way)
    except WorkbenchError:
        return
    assert math.isclose(found.kept_mass + math.fsum(stage.removed_mass for stage in found.steps), 1, abs_tol=1e-9)
    fallen = [int(token) for stage in found.steps for token in stage.removed]
    never = (row == -math.inf).nonzero()[:, 0].tolist()
    left = (found.logits > -math.inf).nonzero()[:, 0].tolist()
    assert sorted(fallen + never + left) == list(range(VOCAB))
    assert {*found.draw([n / 50 for n in range(50)])} <= {*left}
    assert 0 <= entropy_bits(found.probabilities) <= math.log2(len(left)) + 1e-9


@given(ROWS)
def test_top_k_and_top_p_remove_what_the_one_distribution_holds(row: Tensor) -> None:
    """Filters that only remove: what falls is what those tokens had in the distribution before any of them."""
    whole = row.double().softmax(-1)
    found = trace_filters(row, History(), SamplingParameters(top_k=5, top_p=0.8))
    for stage in found.steps:
        assert math.isclose(stage.removed_mass, float(whole[stage.removed].sum()), abs_tol=1e-6)
    assert math.isclose(found.kept_mass, float(whole[found.logits > -math.inf].sum()), abs_tol=1e-6)


@given(ROWS, st.lists(st.floats(0, 1, exclude_max=True), min_size=2, max_size=20))
def test_many_draws_from_one_row_are_those_of_as_many_rows(row: Tensor, numbers: list[float]) -> None:
    assert RandomSampler().choose_rows(row[None], numbers) == RandomSampler().choose_rows(
        row.expand(len(numbers), -1), numbers
    )


def test_the_users_own_parts_are_stages_and_draws_too() -> None:
    row, paths = torch.arange(VOCAB, dtype=torch.float32), ("typical:Typical", "mirostat:Mirostat")
    own, sampler = (CustomPart(path=f"experiments.zoo.{each}") for each in paths)
    way = SamplingParameters(top_k=6, filters=(own,), sampler=sampler)
    found = trace_filters(row, History((1,)), way)
    assert [stage.name for stage in found.steps] == ["top k 6", own.path] and len(found.steps[1].removed)
    numbers = [uniform(seed, 0) for seed in range(20)]
    seeds = [way.model_copy(update={"seed": seed}) for seed in range(20)]
    chosen = [Sampler(VOCAB).sample(row[None], [sequence(each, [1], [])])[0].token_id for each in seeds]
    assert found.draw(numbers) == found.draw(numbers) == chosen


def test_broken_logits_are_reported_as_the_engine_reports_them() -> None:
    for row, message in (([math.nan, 1.0], "contain NaN"), ([-math.inf] * 2, "leave no token"), ([math.inf, 0], "inf")):
        refuses(message, trace_filters, torch.tensor(row), History(), SamplingParameters())
    refuses(
        "outside the vocabulary",
        lambda: trace_filters(torch.zeros(2), History(), SamplingParameters(logit_bias={5: 1.0})),
    )
