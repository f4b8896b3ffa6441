"""Greedy steps on ranks: two numbers a row and rank travel, and the tokens are those of all logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from compiled_kernels import Backend
from tests.engine.tiny import layer, spec_of, weights_of
from tests.tensor_parallel.in_threads import Ranks, Task, runner_of_ranks, serving, share
from workbench.engine.runner import Runner, generate
from workbench.model.quantized import WeightFormat
from workbench.request import Request, SamplingParameters
from workbench.sampling.sampler import _largest
from workbench.tensor_parallel.cut import Section

SPEC = spec_of(layer(4, 4), layer(4, 2))
STATE = weights_of(SPEC, torch.float32, 0)
FLOAT32 = 4
VALUES = st.sampled_from([0.0, -0.0, 1.5, 2.5, -3.0, float("inf"), float("-inf"), float("nan")])


def exactly(found: tuple[list[float], list[int]]) -> tuple[list[str], list[int]]:
    """Return what compares equal where both are NaN."""
    return list(map(str, found[0])), found[1]


@given(st.sampled_from([2, 4]), st.lists(st.lists(VALUES, min_size=31, max_size=31), min_size=1, max_size=4))
def test_the_largest_of_all_ranks_is_that_of_the_whole_row(size: int, rows: list[list[float]]) -> None:
    """The first of equal ones, whichever rank has it; NaN where a row has one."""
    logits = torch.tensor(rows)
    found: list[Tensor] = []

    def gather(ranks: Ranks) -> Task:
        model = share(SPEC, STATE, WeightFormat(), ranks)
        model.only_largest = True
        first, end = Section(SPEC.vocab_size, size).bounds(ranks.rank, size)
        return lambda _: found.append(model.gather_logits(logits[:, first:end])) if not ranks.rank else (
            model.gather_logits(logits[:, first:end]))  # fmt: skip

    with serving(lambda ranks: {"gather": gather(ranks)}, size) as first:
        own = gather(first)
        first.lead("gather", None, lambda: own(None))
        assert first.traffic.bytes == 2 * FLOAT32 * len(rows)
    assert exactly(_largest(found[0])) == exactly(_largest(logits))


def tokens_and_bytes(runner: Runner, **sampling: Any) -> tuple[list[tuple[int, ...]], int]:
    """Return the tokens of three requests, and the bytes that rank 0 gave to exchanges."""
    runner.model.ranks.traffic.bytes = 0  # type: ignore[union-attr]
    given = SamplingParameters(**{"temperature": 0, "max_tokens": 6, "ignore_eos": True, **sampling})
    ends = generate(runner, [Request(f"r{i}", tuple(range(3 + i, 9 + 2 * i)), given) for i in range(3)])
    assert all(end.reason == "length" for end in ends.values()), {end.error for end in ends.values()}
    return [tuple(end.token_ids) for end in ends.values()], runner.model.ranks.traffic.bytes  # type: ignore[union-attr]


@pytest.mark.parametrize("size", [2, 4])
def test_a_greedy_step_sends_two_numbers_a_row(size: int) -> None:
    """As many rows, the same tokens; what needs more of the logits gathers them all."""
    given: dict[str, Any] = {"page_size": 4, "pages": 40, "max_num_batched_tokens": 64}
    with runner_of_ranks(SPEC, STATE, WeightFormat(), size, Backend.EAGER, **given) as runner:
        tokens, few = tokens_and_bytes(runner)
        widest = -(-SPEC.vocab_size // size)
        saved = 3 * 6 * (widest - 2) * FLOAT32  # of each token that was sampled
        for more in ({"logprobs": 1}, {"repetition_penalty": 1.0001}, {"logit_bias": {3: 1e-6}}):
            again, many = tokens_and_bytes(runner, **more)
            assert again == tokens and many == few + saved, more
        sampled = tokens_and_bytes(runner, temperature=1.0)[1]
        assert sampled == few + saved
        assert tokens_and_bytes(runner)[1] == few


def test_one_request_that_needs_all_logits_makes_the_step_gather_them() -> None:
    given: dict[str, Any] = {"page_size": 4, "pages": 40, "max_num_batched_tokens": 64}
    with runner_of_ranks(SPEC, STATE, WeightFormat(), 2, Backend.EAGER, **given) as runner:
        alone = tokens_and_bytes(runner)[0][0]
        plain, other = (SamplingParameters(temperature=0, max_tokens=6, ignore_eos=True, logprobs=n) for n in (None, 2))
        ends = generate(runner, [Request("r0", tuple(range(3, 9)), plain), Request("other", (9, 8, 7), other)])
        assert tuple(ends["r0"].token_ids) == alone and ends["other"].reason == "length"
