"""Typical and mirostat sampling, added from outside, keep the laws and do what their papers say."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation.logits_process import TypicalLogitsWarper

from experiments.custom_sampling import Mirostat, Typical
from workbench.request import CustomPart, Request, SamplingParameters, Sequence
from workbench.sampling import Sampler, uniform
from workbench.testing import check_sampler
from workbench.testing.samplers import logits_rows


@pytest.mark.parametrize("part", ["experiments.custom_sampling:Typical", "experiments/custom_sampling.py:Mirostat"])
def test_both_keep_the_laws(part, request, monkeypatch):
    monkeypatch.chdir(request.config.rootpath)
    check_sampler(part).raise_if_failed()


ENDS = [Typical(0.2), Typical(0.99), Mirostat(0.1, rate=1.0), Mirostat(20.0)]


@pytest.mark.parametrize("part", ENDS, ids=repr)
def test_at_the_ends_of_their_ranges_too(part):
    check_sampler(part, examples=15).raise_if_failed()


@given(st.lists(logits_rows(257), min_size=1, max_size=4), st.floats(0.01, 0.99))
def test_typical_is_that_of_transformers(batch, mass):
    logits = torch.stack([row.logits for row in batch])
    expected = TypicalLogitsWarper(mass)(torch.LongTensor(len(batch), 0), logits)
    assert torch.equal(Typical(mass)(logits), expected)


@pytest.mark.parametrize("target", [2.5, 3.0, 4.0])
def test_mirostat_holds_the_surprise_it_was_given(target):
    """Over Zipfian rows of changing steepness the mean surprise under the model comes to the target."""
    generator = torch.Generator().manual_seed(0)
    part = Mirostat(target, rate=0.1)
    state, bits = part.start(), []
    for position in range(1500):
        steepness = 1 + 0.4 * float(torch.rand(1, generator=generator))
        logits = -steepness * torch.arange(1, 257).log()[torch.randperm(256, generator=generator)]
        token, state = part.choose(logits, uniform(0, position), state)
        bits.append(-float(logits.double().log_softmax(-1)[token]) / math.log(2))
    assert sum(bits[300:]) / 1200 == pytest.approx(target, abs=0.05)


def test_both_through_the_sampler_as_a_configuration_names_them():
    sampling = SamplingParameters(
        seed=5,
        filters=(CustomPart(path="experiments.custom_sampling:Typical", arguments={"mass": 0.95}),),
        sampler=CustomPart(path="experiments.custom_sampling:Mirostat", arguments={"surprise": 2.0}),
    )

    def tokens(beside: int) -> list[int]:
        """One request's 20 tokens with `beside` others like it in the batch, each on rows of its own."""
        sampler = Sampler(64)
        held = [Sequence.from_request(Request(f"r{n}", (1,), sampling), n) for n in range(beside + 1)]
        for position in range(20):
            generators = [torch.Generator().manual_seed(100 * position + n) for n in range(beside + 1)]
            logits = torch.stack([torch.randn(64, generator=generator) * 2 for generator in generators])
            for one, choice in zip(held, sampler.sample(logits, held), strict=True):
                assert not choice.error
                one.token_ids.append(choice.token_id)
        return held[0].output_ids

    assert tokens(0) == tokens(3)
