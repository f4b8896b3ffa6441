"""Searches of the user's own: a beam search written as one is the engine's, and the states are the model's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.poison import MODEL, Poison, asked
from tests.engine.tiny import runner_of
from tests.thorough import tries
from workbench.custom import temporarily_registered
from workbench.decoding.search import Branch
from workbench.engine.runner import generate
from workbench.oracle import naive
from workbench.request import CustomPart, Request, SamplingParameters


class Beams:
    """Beam search without ends: the best continuations of all branches."""

    def __init__(self) -> None:
        self.seen: list[Branch] = []

    def advance(self, branches: Sequence[Branch]) -> tuple[int, list[tuple[int, int]]]:
        self.seen += branches
        totals = [sum(branch.logprobs) for branch in branches]
        alike = branches[:1] if not branches[0].token_ids else branches  # at first all are the prompt
        found = [
            (-(totals[number] + logprob), number, token)
            for number, branch in enumerate(alike)
            for token, logprob in enumerate(branch.logits.double().log_softmax(-1).tolist())
        ]
        best = max(range(len(branches)), key=lambda number: totals[number])
        return best, [(number, token) for _, number, token in sorted(found)[: len(branches)]]


def searched(made: Request, path: str, width: int) -> Request:
    sampling = SamplingParameters(
        beams=width, search=CustomPart(path=path), max_tokens=made.sampling.max_tokens, ignore_eos=True
    )
    return replace(made, sampling=sampling)


@settings(max_examples=tries(15))
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 8), st.integers(1, 6)), min_size=1, max_size=3),
       st.integers(1, 4), st.integers(3, 16), st.integers(28, 40), st.sampled_from(["off", "radix"]))  # fmt: skip
def test_a_beam_search_written_as_one_is_the_engines(
    prompts: list, width: int, chunk: int, pages: int, prefix: str
) -> None:
    plain = [asked(f"r{i}", *each) for i, each in enumerate(prompts)]
    beams = [
        replace(each, sampling=SamplingParameters(beams=width, max_tokens=each.sampling.max_tokens, ignore_eos=True))
        for each in plain
    ]
    expected = generate(runner_of(MODEL), beams)
    runner, part = runner_of(MODEL, pages=pages, max_num_batched_tokens=chunk, prefix=prefix), Beams()
    Poison(runner)
    with temporarily_registered(part) as path:
        done = generate(runner, [searched(each, path, width) for each in plain])
    for each in plain:
        end = done[each.request_id]
        assert (end.token_ids, end.reason) == (expected[each.request_id].token_ids, "length"), end.error
    assert runner.scheduler.pages_in_use == 0
    ids = {each.prompt_ids for each in plain}
    for branch in part.seen[:: max(1, len(part.seen) // 8)]:
        assert len(branch.states) == 1 + len(branch.token_ids) == 1 + len(branch.logprobs)
        rows = MODEL.compute_logits(branch.states)
        exact = [naive.logits(MODEL, torch.tensor([*prompt, *branch.token_ids]))[len(prompt) - 1 :] for prompt in ids]
        assert any(torch.allclose(rows, each, rtol=1e-4, atol=1e-4) for each in exact)
        assert torch.allclose(rows[-1], branch.logits, rtol=1e-4, atol=1e-4)


class Worst(Beams):
    """The same, led by its least likely branch, so that others end before it."""

    def advance(self, branches: Sequence[Branch]) -> tuple[int, list[tuple[int, int]]]:
        _, pairs = super().advance(branches)
        going = [number for number, branch in enumerate(branches) if not branch.is_ended] or [0]
        return min(going, key=lambda number: sum(branches[number].logprobs)), pairs


def test_a_branch_says_that_it_ended() -> None:
    ends = tuple(range(0, 30, 2))
    part, plain = Worst(), asked("r", 0, 4, 6)
    with temporarily_registered(part) as path:
        made = searched(plain, path, 3)
        sampling = made.sampling.model_copy(update={"stop_token_ids": ends})
        generate(runner_of(MODEL), [replace(made, sampling=sampling)])
    assert {branch.is_ended for branch in part.seen} == {True, False}
    for branch in part.seen:
        assert branch.is_ended == any(id in ends for id in branch.token_ids)
