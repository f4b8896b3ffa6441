"""Greedy steps on ranks: two numbers a row and rank travel, and the tokens are those of all logits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from compiled_kernels import Backend
from tests.engine.tiny import layer, spec_of, weights_of
from tests.tensor_parallel.in_threads import Ranks, Task, runner_of_ranks, serving, share
from workbench.engine.runner import Runner, generate
from workbench.memory.ranks import gathered_logits_bytes
from workbench.model.quantized import WeightFormat
from workbench.request import Request, SamplingParameters
from workbench.sampling.sampler import _largest
from workbench.tensor_parallel.cut import Section
from workbench.tensor_parallel.transformer import TensorParallelTransformer

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


class PeakBytes(TorchDispatchMode):
    """Count the bytes of all storages that operations of this thread made and that live, but for `known` ones."""

    def __init__(self, *known: Tensor):
        super().__init__()
        self.known, self.live, self.peak = {StorageWeakRef(each.untyped_storage()).cdata for each in known}, {}, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and (ref := StorageWeakRef(tensor.untyped_storage())).cdata not in self.known:
                self.live[ref.cdata] = ref, tensor.untyped_storage().nbytes()
        self.live = {key: each for key, each in self.live.items() if not each[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.live.values()))
        return out


@pytest.mark.parametrize(("size", "vocab_size"), [(2, 20000), (3, 20000), (3, 900000)])
def test_gathered_logits_take_the_bytes_of_the_formula(size: int, vocab_size: int) -> None:
    """Hold one copy of all: of a vocabulary that ranks divide, of one they do not, of rows longer than an exchange."""
    logits, found = torch.randn(64 if vocab_size < 10**5 else 4, vocab_size), list[Tensor]()
    bounds = [Section(vocab_size, size).bounds(rank, size) for rank in range(size)]
    shards = [logits[:, first:end].clone() for first, end in bounds]

    def gather(ranks: Ranks) -> Task:
        model: Any = TensorParallelTransformer.__new__(TensorParallelTransformer)
        vars(model).update(spec=SimpleNamespace(vocab_size=vocab_size), ranks=ranks, only_largest=False)
        return lambda _: model.gather_logits(shards[ranks.rank])

    with serving(lambda ranks: {"gather": gather(ranks)}, size) as first:
        own = gather(first)

        def measured() -> None:
            with PeakBytes(first.group._slots[0], shards[0]) as held:
                found.append(own(None))
            assert held.peak == gathered_logits_bytes(vocab_size, size, len(logits))

        first.lead("gather", None, measured)
    assert torch.equal(found[0], logits)


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
