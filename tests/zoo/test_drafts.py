"""Every draft of the zoo is held to the kit of proposers, and each to the equation of its own."""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.thorough import tries
from workbench.claims.technique import ZOO_FOLDER
from workbench.engine.config import EngineConfig
from workbench.engine.loaded_model import LoadedModel
from workbench.parts import Draft, Sequence, SpeculationTarget, Verification
from workbench.request import Request
from workbench.speculative.config import parse_speculation
from workbench.speculative.proposers import PromptLookupProposer

SPEC = LoadedModel.load(EngineConfig.build("demo-draft", backend="eager"), lambda line: None).transformer.spec


def part(name: str) -> ModuleType:
    """Import the file of an entry."""
    spec = importlib.util.spec_from_file_location(f"zoo_{name}", ZOO_FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def target(**settings) -> SpeculationTarget:
    def no_model(settings):
        raise AssertionError("no draft model is wanted")

    return SpeculationTarget(SPEC, None, parse_speculation({"path": "mine.py:Mine", **settings}), no_model)  # type: ignore[arg-type] (custom)


def text(*ids: int, prompt: int = 1) -> Sequence:
    sequence = Sequence.from_request(Request("a", ids[:prompt]), 0)
    sequence.token_ids = list(ids)
    return sequence


def proposed(proposer, sequence: Sequence, count: int = 8) -> tuple[int, ...]:
    (draft,) = proposer.propose([sequence], [count])
    return draft.token_ids


@given(st.lists(st.integers(0, 3), min_size=2, max_size=40), st.integers(1, 3), st.integers(0, 2), st.integers(1, 6))
@settings(max_examples=tries(60))
def test_prompt_lookup_is_the_built_in_one(ids: list[int], least: int, more: int, count: int) -> None:
    mine = part("prompt_lookup").PromptLookup(target(), least, least + more)
    built_in = PromptLookupProposer(least, least + more)
    assert proposed(mine, text(*ids), count) == proposed(built_in, text(*ids), count)


def test_jacobi_converges_to_greedy_decoding_in_at_most_as_many_steps_as_tokens() -> None:
    """Against a table of next tokens: each step's guesses are the answers to the step before, position by position."""
    after = {token: (3 * token + 1) % 17 for token in range(17)}
    proposer, sequence = part("jacobi").Jacobi(target()), text(5)
    greedy = [5]
    for _ in range(20):
        greedy.append(after[greedy[-1]])
    steps = 0
    while len(sequence.token_ids) < 20:
        (draft,) = proposer.propose([sequence], [4])
        rows = tuple((after[token],) for token in (sequence.token_ids[-1], *draft.token_ids))
        path = []
        for (token,), drafted in zip(rows, (*draft.token_ids, None), strict=True):
            path.append(token)
            if token != drafted:
                break
        assert len(path) >= 1
        sequence.token_ids += path
        proposer.observe([Verification(sequence, draft, tuple(range(len(path) - 1)), tuple(path), rows)])
        kept = proposer.guesses["a"]
        assert kept == [row[0] for row in rows[len(path) :]]
        steps += 1
    assert sequence.token_ids == greedy[: len(sequence.token_ids)] and steps <= 19
    proposer.forget("a")
    assert not proposer.guesses


@given(st.lists(st.integers(0, 4), min_size=1, max_size=60), st.integers(2, 4), st.lists(st.integers(0, 4), min_size=1))
@settings(max_examples=tries(40))
def test_the_table_has_the_most_frequent_continuation(corpus: list[int], order: int, known: list[int]) -> None:
    module = part("ngram_table")
    proposer = module.NgramTable(target(), order)
    assert proposed(proposer, text(*known)) == ()  # without a tokenizer there is no corpus
    proposer.table = module.table_of([corpus], order)
    found, now = [], list(known)
    for _ in range(3):
        for size in range(min(order - 1, len(now)), 0, -1):
            places = [p for p in range(size, len(corpus)) if corpus[p - size : p] == now[-size:]]
            if places:
                counts = Counter(corpus[place] for place in places)
                found.append(min(counts, key=lambda token: (-counts[token], token)))
                now.append(found[-1])
                break
        else:
            break
    assert proposed(proposer, text(*known), 3) == tuple(found)


def test_lookahead_keeps_the_trajectory_as_ngrams_and_proposes_them_first() -> None:
    proposer = part("lookahead").Lookahead(target(), ngram=3)
    sequence = text(1)
    assert proposed(proposer, sequence, 3) == (1, 1, 1)  # nothing is known: the last token repeated
    sequence.token_ids = [1, 2]
    proposer.observe([Verification(sequence, Draft((1, 1)), (), (2,), ((2,), (4,), (5,)))])
    assert proposer.kept["a"].pool == {1: (2,)}  # answers to the token 1 at three places: the nearest stays
    assert proposed(proposer, sequence, 2) == (4, 5)  # no n-gram begins with 2: the guesses of positions 2 and 3
    sequence.token_ids = [1, 2, 4, 6]
    proposer.observe([Verification(sequence, Draft((4, 5)), (0,), (4, 6), ((4,), (6,), (7,)))])
    assert proposer.kept["a"].pool == {1: (2, 4)}  # along three steps: 1, its answer 2, and the answer 4 to that
    sequence.token_ids = [1, 2, 4, 6, 1]
    proposer.observe([Verification(sequence, Draft((7,)), (), (1,), ((1,), (3,)))])
    assert proposed(proposer, sequence, 4) == (2, 4, 1, 1)[:2] + (1, 1)  # the n-gram under 1; beyond the guesses
    proposer.forget("a")
    assert not proposer.kept


def verification(drafted: int, accepted: int) -> Verification:
    draft = Draft(tuple(range(drafted)))
    return Verification(text(1, 2), draft, tuple(range(accepted)), tuple(range(accepted + 1)))


def test_the_threshold_of_skipped_layers_follows_the_acceptance_rate() -> None:
    rule = part("layer_skip").AdaptiveExit(goal=0.9, start=0.5, step=0.1)
    q = torch.tensor([[0.6, 0.4], [0.4, 0.6]])
    assert rule(q, ["a", "b"]).tolist() == [False, False]
    threshold, rate = 0.5, 1.0
    for drafted, accepted in ((4, 0), (4, 4), (0, 0), (2, 1)):
        rule.observe([verification(drafted, accepted)])
        if drafted:
            rate = 0.9 * rate + 0.1 * accepted / drafted
            threshold = 0.5 * threshold + 0.5 * (threshold + (0.1 if rate <= 0.9 else -0.1))
        assert rule.kept["a"] == pytest.approx((threshold, rate))
    assert rule(torch.tensor([[threshold + 0.01], [threshold - 0.01]]), ["a", "a"]).tolist() == [False, True]
    rule.forget("a")
    assert not rule.kept


def test_entropy_ends_drafts_as_the_equations_have_it() -> None:
    q = torch.rand(20, 9, dtype=torch.float64).softmax(-1) ** 6
    q /= q.sum(-1, keepdim=True)
    entropy = -(q * q.log()).sum(-1)
    middle = float(entropy.median())
    svip = part("svip").SelfVerification(most=middle**0.5 + 1e-9)
    assert svip(q, []).tolist() == (entropy > middle).tolist() and 0 < svip(q, []).sum() < 20
    bound = part("adaedl").EntropyBound(weight=0.2, threshold=1 - (0.2 * middle) ** 0.5 - 1e-9)
    assert bound(q, []).tolist() == svip(q, []).tolist()
    sure = torch.tensor([[1.0, 0.0]])
    assert not svip(sure, []).any() and not bound(sure, []).any()
    before = bound.threshold
    bound.observe([verification(0, 0)])
    assert bound.threshold == before
    bound.observe([verification(4, 1), verification(4, 1)])
    assert bound.rate == pytest.approx(0.5 * 0.9 + 0.5 * 0.25)
    assert bound.threshold == pytest.approx(before + 0.1 * 0.01)  # too few are accepted: end earlier


@given(st.lists(st.integers(0, 3), min_size=2, max_size=30), st.integers(1, 4))
@settings(max_examples=tries(40))
def test_suffix_decoding_goes_along_the_counts(ids: list[int], depth: int) -> None:
    proposer = part("suffix_decoding").SuffixDecoding(target(), depth=depth, factor=2.0, least=0.3)
    found = proposed(proposer, text(*ids), 6)
    assert proposed(proposer, text(*ids), 6) == found  # a token is counted once

    def count(gram: list[int]) -> int:  # occurrences with a token after them
        return sum(ids[place : place + len(gram)] == gram for place in range(len(ids) - len(gram)))

    sizes = [size for size in range(1, min(depth, len(ids)) + 1) if count(ids[-size:])]
    assert len(found) <= 2 * max(sizes, default=0)
    chance, now = 1.0, list(ids[-max(sizes, default=0) :])
    for token in found:
        last = next(now[-size:] for size in range(min(depth, len(now)), 0, -1) if count(now[-size:]))
        share = sum(ids[p : p + len(last) + 1] == [*last, token] for p in range(len(ids) - len(last))) / count(last)
        chance *= share
        now.append(token)
    assert not found or chance >= 0.3


def test_a_cascade_asks_the_draft_model_where_nothing_matches() -> None:
    asked: list[tuple[int, ...]] = []

    class Drafter:
        def propose(self, sequences, counts):
            asked.append(tuple(len(each.token_ids) for each in sequences))
            return [Draft((7,) * count) for count in counts]

        def forget(self, request_id):
            asked.append(())

    verifier = SpeculationTarget(SPEC, None, parse_speculation("mine.py:Mine"), lambda settings: Drafter())  # type: ignore[arg-type] (custom)
    cascade = part("cascade").Cascade(verifier, model_tokens=2)
    texts = [text(1, 2, 3, 4, 1, 2, 3), text(1, 2, 3, 4, 5)]
    drafts = cascade.propose(texts, [5, 5])
    assert [draft.token_ids for draft in drafts] == [(4, 1, 2, 3), (7, 7)] and asked == [(5,)]
    cascade.forget("a")
    assert asked == [(5,), ()]


def test_recycled_tokens_grow_into_a_tree_best_first() -> None:
    proposer = part("token_recycling").TokenRecycling(target(tree=True), candidates=2)
    assert proposer.tree(1, 5).token_ids == ()
    draft = Draft((2, 3), None, (-1, -1))
    proposer.observe([Verification(text(0, 1, 4), draft, (), (4,), ((2, 3), (5, 6), (7, 8)))])
    assert proposer.matrix == {1: (2, 3), 2: (5, 6), 3: (7, 8)}
    found = proposer.tree(1, 10)
    # Costs: 2 has 1, 3 has 2 and so has 5 after 2; then 6 after 2 and 7 after 3, and 8 after 3.
    assert {found.before(row) for row in range(1, 7)} == {(2,), (3,), (2, 5), (2, 6), (3, 7), (3, 8)}
    assert found.token_ids[0] == 2 and set(found.token_ids[1:3]) == {3, 5}
    assert proposer.tree(1, 3).token_ids == found.token_ids[:3]


@given(st.lists(st.lists(st.integers(0, 2), max_size=5).map(tuple), min_size=1, max_size=4), st.integers(1, 30))
@settings(max_examples=tries(60))
def test_a_merged_tree_has_the_sequences_of_all_and_no_others(chains: list[tuple[int, ...]], count: int) -> None:
    found = part("specinfer").merge(chains, count)
    paths = [found.before(row) for row in range(1, len(found) + 1)]
    wanted = {chain[:size] for chain in chains for size in range(1, len(chain) + 1)}
    assert len(set(paths)) == len(paths) == min(count, len(wanted)) and set(paths) <= wanted


def test_the_window_is_a_tree_whose_columns_see_themselves_and_the_first_level() -> None:
    module = part("lookahead_window")
    proposer = module.LookaheadWindow(target(tree=True), window=3, ngram=4, candidates=2)
    sequence = text(1, 2, 3, 4, 5)
    draft = proposer.tree(sequence, 20)
    levels = [[1, 2, 3], [2, 3, 4], [3, 4, 5]]
    assert proposer.kept["a"].levels == levels and proposer.kept["a"].first == 0
    for level in range(3):
        for column in range(3):
            path = levels[0][: column + 1] + [levels[k][column] for k in range(1, level + 1)]
            assert list(draft.before(1 + 3 * level + column)) == path  # its position is level + column + 1
    sequence.token_ids = [1, 2, 3, 4, 5, 1]
    rows = tuple((10 + row,) for row in range(10))
    proposer.observe([Verification(sequence, draft, (), (1,), rows)])
    assert proposer.kept["a"].levels == [[2, 3, 4], [3, 4, 5], [17, 18, 19]]
    assert {first: list(grams) for first, grams in proposer.kept["a"].pool.items() if grams} == {
        1: [(2, 3, 17)], 2: [(3, 4, 18)], 3: [(4, 5, 19)],
    }  # fmt: skip
    draft = proposer.tree(sequence, 12)
    assert draft.token_ids[:3] == (2, 3, 17) and proposer.kept["a"].first == 3
    assert draft.before(3) == (2, 3, 17) and draft.before(4) == (2,) and len(draft) == 12
    assert len(proposer.tree(sequence, 11)) == 3  # no room for the window
    proposer.forget("a")
    assert not proposer.kept
