"""Parameters that cannot be meant are refused when they are written down, with what would be right."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from workbench.errors import explain
from workbench.request import SamplingParameters

WRONG = [
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("temperature", -0.1),
    ("temperature", "hot"),
    ("top_k", -1),
    ("top_k", 1.5),
    ("top_p", -0.01),
    ("top_p", 1.01),
    ("top_p", math.nan),
    ("min_p", -0.1),
    ("min_p", math.nan),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", math.nan),
    ("presence_penalty", math.inf),
    ("frequency_penalty", math.nan),
    ("max_tokens", 0),
    ("max_tokens", -5),
    ("logprobs", -1),
    ("logprobs", 101),
    ("seed", -1),
    ("seed", 2**63),
    ("stop", [f"stop {n}" for n in range(10_000)]),
    ("stop", ["", "end"]),
    ("logit_bias", {"word": 1.0}),
    ("logprobs_of", "both"),
    ("temprature", 0.5),
]


@pytest.mark.parametrize(("name", "value"), WRONG, ids=[f"{name}={str(value)[:12]}" for name, value in WRONG])
def test_refused_with_its_name(name, value):
    with pytest.raises(ValidationError) as caught:
        SamplingParameters.model_validate({name: value})
    message = str(explain(caught.value, "sampling", SamplingParameters))
    assert name in message and "\n" not in message and len(message) < 400


SEEDS = st.integers(0, 2**63 - 1)


@given(st.floats(0, 1e6), st.integers(0, 10**6), st.floats(0.001, 1), st.floats(0, 1), SEEDS)
def test_what_is_in_range_is_taken_and_survives_a_round_trip(temperature, top_k, top_p, min_p, seed):
    written = SamplingParameters(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed, logit_bias={3: -1.0}
    )
    assert SamplingParameters.model_validate_json(written.model_dump_json()) == written


def test_one_stop_string_is_a_list_of_one():
    assert SamplingParameters(stop="end").stop == ("end",)  # pyright: ignore[reportArgumentType]
