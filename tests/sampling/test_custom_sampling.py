"""Typical and mirostat sampling of the zoo: equal to a known implementation, and named by path in a request."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation.logits_process import TypicalLogitsWarper

from experiments.zoo.mirostat import Mirostat
from experiments.zoo.typical import Typical
from workbench.request import CustomPart, Request, SamplingParameters, Sequence
from workbench.sampling.sampler import Sampler
from workbench.testing import check_sampler
from workbench.testing.samplers import logits_rows


@pytest.mark.parametrize("part", [Typical(0.2), Typical(0.99), Mirostat(20.0)], ids=repr)
def test_at_the_ends_of_their_ranges_too(part) -> None:
    check_sampler(part, examples=15).raise_if_failed()


@given(st.lists(logits_rows(257), min_size=1, max_size=4), st.floats(0.01, 0.99))
def test_typical_is_that_of_transformers(batch, mass) -> None:
    logits = torch.stack([row.logits for row in batch])
    expected = TypicalLogitsWarper(mass)(torch.LongTensor(len(batch), 0), logits)
    assert torch.equal(Typical(mass)(logits), expected)


def test_both_through_the_sampler_as_a_configuration_names_them(request, monkeypatch) -> None:
    monkeypatch.chdir(request.config.rootpath)
    sampling = SamplingParameters(
        seed=5,
        filters=(CustomPart(path="experiments/zoo/typical.py:Typical", arguments={"mass": 0.95}),),
        sampler=CustomPart(path="experiments.zoo.mirostat:Mirostat", arguments={"target": 2.0}),
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
