"""Trees of drafts on backend eager: the same tokens, the same rows, the same pages, whatever tree is proposed."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import workbench
from compiled_kernels import attention
from tests.engine.guesses import plain, run_checked, tokens
from tests.engine.tiny import (
    CONTEXT,
    VOCAB,
    Objection,
    expected,
    layer,
    model_of,
    own_specs,
    request,
    runner_of,
    spec_of,
)
from tests.helpers.recorded import Around
from tests.speculative.parts import HERE
from tests.thorough import tries
from workbench.engine.cache import KVCache
from workbench.executors.requirements import Requirements
from workbench.executors.select import select_backends
from workbench.kv_cache.pages import pages_for
from workbench.model.attention_spec import MLASpec
from workbench.model.spec import LayerSpec, ModelSpec
from workbench.parts import Draft, Proposer
from workbench.speculative.proposers import Speculator
from workbench.trace.events import Finished

PARENTS = st.lists(st.integers(0, 100), min_size=1, max_size=9).map(
    lambda drawn: tuple(number % (place + 1) - 1 for place, number in enumerate(drawn))
)


class TreeGuesses(Proposer):
    """Propose random trees; a token is, with some probability, what will come after its ancestors, if these are."""

    def __init__(self, answers: dict[str, tuple[int, ...]], seed: int, right: float):
        self.answers, self.dice, self.right = answers, random.Random(seed), right

    def propose(self, sequences, counts):
        return [self._tree(each, count) for each, count in zip(sequences, counts, strict=True)]

    def _tree(self, sequence, count: int) -> Draft:
        coming = self.answers[sequence.request_id][len(sequence.output_ids) :]
        ids: list[int] = []
        parents: list[int] = []
        depth = {-1: 0}  # of places along which all tokens are right
        for place in range(self.dice.randint(1, count)):
            parent = self.dice.choice([*depth, self.dice.randint(-1, place - 1)])
            parents.append(parent)
            if parent in depth and depth[parent] < len(coming) and self.dice.random() < self.right:
                ids.append(coming[depth[parent]])
                depth[place] = depth[parent] + 1
            else:
                ids.append(self.dice.randrange(VOCAB))
        return Draft(tuple(ids), None, tuple(parents))


class RowByRow(Around):
    """Stands in for a runner's executor and holds every row of a tree against the oracle of its own path."""

    def __init__(self, runner):
        super().__init__(runner)
        self.model, self.rows = runner.model, 0

    def forward(self, plan):
        found = self.inner.forward(plan)
        rows = iter(found)
        for span in plan.spans:
            draft = Draft(span.draft_token_ids, None, span.draft_parents or None)
            for row in range(1 + len(draft)) if span.needs_sample else ():
                exact, bound = expected(self.model, [*span.sequence.token_ids, *draft.before(row)])
                error = (next(rows).double() - exact).abs().max().item()
                if not error <= 4 * bound:
                    raise Objection(f"row {row} of a tree is {error} away from the oracle's, {bound} is allowed")
                self.rows += bool(span.draft_parents)
        return found


def tree_speculator(proposer, most: int = 7) -> Speculator:
    return Speculator(proposer, most, CONTEXT, vocab_size=VOCAB, trees=True)


@given(PARENTS, st.data())
def test_paths_of_a_tree(parents: tuple[int, ...], data: st.DataObject) -> None:
    ids = tuple(range(len(parents)))  # each token is its own place
    draft = Draft(ids, None, parents)
    for place, parent in enumerate(parents):
        assert draft.before(place + 1) == (*draft.before(parent + 1), place)
        assert draft.next_row(parent + 1, place) == place + 1
        assert draft.follow(draft.before(place + 1)) == draft.before(place + 1)
        assert draft.follow((*draft.before(place + 1), 99)) == draft.before(place + 1)
    count = data.draw(st.integers(0, len(parents)))
    assert draft.truncated(count).parents == parents[:count] or count == len(parents)
    branch = draft.first_branch()
    assert branch.parents is None and draft.follow(branch.token_ids) == branch.token_ids
    assert not branch.token_ids or all(p != branch.token_ids[-1] for p in parents)


@given(st.lists(st.integers(0, 3), max_size=6), st.lists(st.integers(0, 3), max_size=8))
def test_a_chain_is_the_tree_of_one_branch(ids: list[int], following: list[int]) -> None:
    chain = Draft(tuple(ids))
    tree = Draft(tuple(ids), None, tuple(range(-1, len(ids) - 1)))
    assert chain.follow(following) == tree.follow(following)
    assert [chain.before(row) for row in range(len(ids) + 1)] == [tree.before(row) for row in range(len(ids) + 1)]
    assert tree.first_branch() == chain.first_branch() == chain


@settings(max_examples=tries(25))
@given(own_specs, st.integers(0, 2**31), st.integers(5, 40), st.sampled_from(["off", "radix"]), st.floats(0, 1))
def test_greedy_output_and_every_row_are_what_they_are_without(spec: ModelSpec, seed, pages, prefix, right) -> None:
    """Windows, ALiBi, masks and scores of one's own, pages that run out, chunks: each row is its path's own."""
    model = model_of(spec, seed, dtype=torch.float64)
    asked = [request(f"{seed}-{i}", 3 + 4 * i, 5 + 3 * i, presence_penalty=0.3 * (i % 2)) for i in range(3)]
    wanted = plain(model, asked, pages=60, max_num_seqs=3)
    answers = {name: end.token_ids for name, end in wanted.items()}
    runner = runner_of(
        model, pages=max(pages, 2 * pages_for(30, 4) + 4), prefix=prefix, max_num_seqs=3,
        speculator=tree_speculator(TreeGuesses(answers, seed, right)),
    )  # fmt: skip
    rows = RowByRow(runner)
    assert tokens(run_checked(runner, asked)) == tokens(wanted) and rows.rows
    runner.reset_prefix_cache()
    assert all(pool.num_used == 0 for pool in runner.scheduler.pools)


def test_latent_attention_verifies_trees() -> None:
    latent = MLASpec(
        num_heads=2, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4, q_lora_rank=None
    )  # fmt: skip
    model = model_of(spec_of(LayerSpec(attention=latent, intermediate_size=12), layer()), dtype=torch.float64)
    asked = [request("a", 5, 16), request("b", 9, 9)]
    wanted = plain(model, asked)
    proposer = TreeGuesses({name: end.token_ids for name, end in wanted.items()}, 3, 0.8)
    assert tokens(run_checked(runner_of(model, speculator=tree_speculator(proposer)), asked)) == tokens(wanted)


def keeps_no_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVCache, "keep_path", lambda *arguments: None)


def sees_siblings(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = attention.along_tree

    def along(read, parents):
        found = inner(read, parents)
        return found._replace(readable=None)

    monkeypatch.setattr(attention, "along_tree", along)


def counts_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    from workbench.executors import packing

    monkeypatch.setattr(packing, "_depths", lambda parents: range(len(parents)))


@pytest.mark.parametrize("bug", [keeps_no_path, sees_siblings, counts_slots])
def test_planted_bugs_are_seen(bug, monkeypatch: pytest.MonkeyPatch) -> None:
    model, asked = model_of(spec_of(), dtype=torch.float64), [request("a", 5, 20), request("b", 9, 20)]
    wanted = plain(model, asked)

    def check() -> None:
        proposer = TreeGuesses({name: end.token_ids for name, end in wanted.items()}, 2, 0.8)
        runner = runner_of(model, speculator=tree_speculator(proposer))
        RowByRow(runner)
        assert tokens(run_checked(runner, asked)) == tokens(wanted)

    check()
    bug(monkeypatch)
    with pytest.raises((AssertionError, Objection)):
        check()


def speculate(name: str = "Twice", **more) -> dict:
    return {"path": HERE + name, "tree": True, **more}


def test_auto_chooses_the_backend_that_verifies_trees() -> None:
    found = select_backends("auto", Requirements(tree_drafts=True))
    assert {str(found.decode), str(found.blocks), str(found.attention)} == {"eager"}


def test_requests_with_a_grammar_take_the_first_branch() -> None:
    wanted, found = (
        workbench.load("demo-draft", dtype="float64", backend="eager", pages=32, speculate=setting)
        for setting in ("none", speculate())
    )
    sampling = {"max_tokens": 16, "temperature": 0, "response_format": {"kind": "regex", "regex": "(ab|ba)+"}}
    texts = [[e.output_text for e in r.stream("abab", **sampling) if isinstance(e, Finished)] for r in (wanted, found)]
    assert texts[0] == texts[1] != [""]
