"""Drafts change nothing about what is sampled: exactly, by enumeration; and through the sampler, by counting."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sampling.exact import (
    LEVEL,
    MODEL,
    PROMPT,
    SIZE,
    VOCAB,
    WAYS,
    chances,
    chi_square_p,
    expected,
    first_two,
    sequence,
)
from tests.thorough import tries
from workbench.request import CustomPart, SamplingParameters
from workbench.sampling.enumeration import NUM_CELLS, speculative_distribution, target_distribution
from workbench.sampling.filters import History
from workbench.sampling.rows import PendingRows
from workbench.sampling.sampler import Sampler
from workbench.sampling.samplers import uniform
from workbench.sampling.sampling_state import build_sampling_state
from workbench.sampling.verify import NO_DRAFT, Draft, rejection_sample


def tables(depth: int) -> st.SearchStrategy[dict[tuple[int, ...], tuple[float, ...]]]:
    """A distribution for what follows each beginning of up to `depth` tokens."""
    beginnings = [b for n in range(depth + 1) for b in itertools.product(range(VOCAB), repeat=n)]
    return st.fixed_dictionaries({beginning: chances() for beginning in beginnings})


def lossless(p, q, drafted: int, rule=rejection_sample) -> bool:
    return speculative_distribution(p, q, drafted, rule) == pytest.approx(
        target_distribution(p, drafted + 1), abs=1e-12
    )


@settings(max_examples=tries(40))
@given(tables(1), tables(0) | st.none())
def test_one_drafted_token_leaves_the_joint_distribution_of_two_exactly(p, q):
    assert lossless(p, q, 1)


@settings(max_examples=tries(8))
@given(tables(2), tables(1) | st.none())
def test_two_drafted_tokens_leave_the_joint_distribution_of_three_exactly(p, q):
    assert lossless(p, q, 2)


@settings(max_examples=tries(20))
@given(tables(2), tables(1), st.sampled_from([0.4, 0.5, 0.75, 1.0, 1.1]))
def test_drafts_that_stop_where_the_draft_is_unsure_leave_it_too(p, q, least):
    """As long as the length hangs on what was drafted before, and not on the token that is left out."""
    found = speculative_distribution(p, q, 2, proposes=lambda row, token: max(row) >= least)
    assert found == pytest.approx(target_distribution(p, 3), abs=1e-12)


def test_the_law_catches_a_draft_that_leaves_out_tokens_for_what_they_are():
    found = speculative_distribution(P, Q, 1, proposes=lambda row, token: row[token] >= 0.5)
    assert found != pytest.approx(target_distribution(P, 2), abs=0.01)


@given(st.lists(st.integers(0, 5), max_size=6).map(lambda ups: [max(-1, n - 1 - up) for n, up in enumerate(ups)]))
def test_a_random_number_belongs_to_a_position_of_the_output(parents: list[int]) -> None:
    """Tokens of a tree that stand at one position are draws of one number, whichever branch they are on."""
    asked, tree = sequence(SamplingParameters(seed=7)), Draft((0,) * len(parents), None, tuple(parents))
    rows = PendingRows(0, range(len(parents) + 1), asked, tree, build_sampling_state(asked.request, VOCAB), [])
    depths = [0]
    for parent in parents:
        depths.append(depths[parent + 1] + 1)
    assert [rows.uniform(row) for row in range(len(depths))] == [uniform(7, depth) for depth in depths]


def ignores_q(draft, target, uniforms):
    """Accepts by the target's probability alone, and draws from the target where a token falls. (Were the fallen token
    left out of that draw, it would be right again, only slower: that is the rule for a certain draft.)"""
    standing, left = rejection_sample(Draft(draft.token_ids), target, uniforms)
    return standing, left if standing == len(draft) else target(standing)


def resamples_from_p(draft, target, uniforms):
    """Accepts rightly, and draws from the target where a token falls."""
    standing, left = rejection_sample(draft, target, uniforms)
    return standing, left if standing == len(draft) else target(standing)


def one_off(draft, target, uniforms):
    """Judges each token by the row that follows it."""
    return rejection_sample(draft, lambda place: target(min(place + 1, len(draft))), uniforms)


def bonus_of_the_last_row(draft, target, uniforms):
    """A planted bug: where all drafts are accepted, draw from the last verified row again."""
    standing, left = rejection_sample(draft, target, uniforms)
    return standing, target(standing - 1) if standing == len(draft) else left


P = {(): (0.25, 0.25, 0.5), (0,): (0.5, 0.5, 0.0), (1,): (0.0, 0.25, 0.75), (2,): (0.25, 0.0, 0.75)}
Q = {(): (0.5, 0.25, 0.25)}


@pytest.mark.parametrize("wrong", [ignores_q, resamples_from_p, one_off, bonus_of_the_last_row])
def test_the_law_catches_a_wrong_rule(wrong):
    assert lossless(P, Q, 1)
    assert not lossless(P, Q, 1, wrong)


def test_a_drawn_draft_may_be_judged_as_if_it_were_certain():
    """Slower, since it stands less often, and lossless all the same."""
    assert lossless(P, Q, 1, lambda draft, *rest: rejection_sample(Draft(draft.token_ids), *rest))


@settings(max_examples=tries(40))
@given(chances(), chances())
def test_a_token_stands_as_often_as_the_distributions_overlap(p, q):
    """The acceptance rate is the sum of min(p, q), the most that any rule can reach."""
    rows = torch.tensor([q], dtype=torch.float64)
    stands = sum(
        q[token]
        * (rejection_sample(Draft((token,), rows), lambda _: torch.tensor(p).double(), [(c + 0.5) / NUM_CELLS])[0])
        for token in range(VOCAB)
        if q[token]
        for c in range(NUM_CELLS)
    )
    assert stands / NUM_CELLS == pytest.approx(sum(map(min, p, q)), abs=1e-12)


# Through the sampler: a model that knows the last two tokens, and a draft that knows the last one.

CASES = [*((name, "drawn") for name in WAYS), ("plain", "certain"), ("penalties", "certain")]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_two_tokens_have_the_targets_joint_distribution(name, kind):
    assert chi_square_p(first_two(WAYS[name], kind), expected(WAYS[name])) > LEVEL


def test_counting_catches_filters_that_do_not_see_drafted_tokens(monkeypatch):
    from workbench.sampling import rows as asked

    blind = property(lambda own: [History(PROMPT, own.sequence.output_ids)] * len(own.rows))
    monkeypatch.setattr(asked.PendingRows, "histories", blind)
    assert chi_square_p(first_two(WAYS["penalties"], "drawn"), expected(WAYS["penalties"])) < LEVEL


def test_counting_catches_a_draft_whose_probabilities_are_ignored(monkeypatch):
    from workbench.sampling import rows as asked

    monkeypatch.setattr(asked, "rejection_sample", ignores_q)
    assert chi_square_p(first_two(WAYS["plain"], "drawn"), expected(WAYS["plain"])) < LEVEL


def test_counting_catches_one_random_number_for_two_uses(monkeypatch):
    from workbench.sampling import rows as asked

    monkeypatch.setattr(asked, "ACCEPT_STREAM", b"")
    assert chi_square_p(first_two(WAYS["plain"], "certain"), expected(WAYS["plain"])) < LEVEL


MATCHED = [
    SamplingParameters(temperature=0),
    SamplingParameters(temperature=0, repetition_penalty=1.5, logprobs=2),
    SamplingParameters(sampler=CustomPart(path="tests.sampling.parts:Alternating"), top_k=4),
    SamplingParameters(temperature=0.8, top_p=0.9, logprobs=1, logprobs_of="filtered"),
]


@settings(max_examples=tries(30))
@given(st.sampled_from(MATCHED), st.integers(0, 50), st.data())
def test_matched_tokens_are_those_that_come_without_a_draft(way, seed, data):
    """Greedy and the user's own samplers, and draws where that is asked for: token for token, state and all."""
    way = way.model_copy(update={"seed": seed})
    alone, checked = Sampler(SIZE, "match"), Sampler(SIZE, "match")
    asked, drafted = sequence(way), sequence(way)
    wanted, found = [], []
    for _ in range(8):
        wanted += alone.sample(MODEL[tuple(asked.token_ids[-2:])][None], [asked])
        asked.token_ids.append(wanted[-1].token_id)
    while len(found) < 8:
        right = [choice.token_id for choice in wanted[len(found) :]][: data.draw(st.integers(0, 4))]
        draft = [token if data.draw(st.integers(0, 3)) else 0 for token in right]
        known = [*drafted.token_ids, *draft]
        rows = torch.stack([MODEL[tuple(known[: len(known) - i][-2:])] for i in range(len(draft), -1, -1)])
        found += checked.verify(rows, [drafted], [Draft(tuple(draft))])[0]
        drafted.token_ids[2:] = [choice.token_id for choice in found]
    assert found[:8] == wanted


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("broken", [0, 1, 2])
def test_a_broken_row_matters_only_where_it_is_reached(broken, temperature):
    logits = torch.full((3, 3), 0.0)
    logits[[0, 1, 2], [1, 2, 0]] = 1000.0
    logits[broken] = math.nan
    asked = sequence(SamplingParameters(temperature=temperature, seed=5))
    for draft, reached in (((1, 2), 3), ((0, 0), 1)):
        choices = Sampler(3).verify(logits, [asked], [Draft(draft)])[0]
        assert [bool(c.error) for c in choices] == [row == broken for row in range(min(reached, broken + 1))]


def test_rows_with_drafts_do_not_change_rows_beside_them():
    logits = torch.randn(7, 64, generator=torch.Generator().manual_seed(3))
    ways = [
        SamplingParameters(seed=1, top_p=0.9),
        SamplingParameters(seed=2, top_p=0.9),
        SamplingParameters(temperature=0),
    ]
    asked = [sequence(way, (3,), f"r{i}") for i, way in enumerate(ways)]
    drafts = [Draft((5, 6)), NO_DRAFT, Draft((int(logits[4].argmax()), 9))]
    together = Sampler(64).verify(logits, asked, drafts)
    for number, rows in enumerate((slice(0, 3), slice(3, 4), slice(4, 7))):
        assert Sampler(64).verify(logits[rows], [asked[number]], [drafts[number]]) == [together[number]]
    assert len(together[2]) == 2
