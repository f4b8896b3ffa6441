"""Bounds: what is too large is refused by the name of its field, before any work."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.gateway.calls import chat
from workbench.gateway.bounds import Bounds, check_bounds, check_prompt_tokens, fit_output
from workbench.serve.call import Breakpoint
from workbench.serve.errors import ApiError

TOOL = {"name": "look", "description": "", "parameters": {"type": "object", "description": "x" * 900}}
SMALL = Bounds(
    prompts=2, choices=4, sequences=6, output_tokens=400, prompt_characters=2_000, turns=3, tools=2,
    schema_characters=800, stops=3, stop_characters=10, logprobs=5, logit_bias=4, breakpoints=1,
)  # fmt: skip


@pytest.mark.parametrize(
    ("values", "dialect", "param", "said"),
    [
        ({"sampling": {"n": 5}}, "openai.chat", "n", "5 choices"),
        ({"sampling": {"n": 2, "best_of": 7, "max_tokens": 1}}, "openai.completions", "best_of", "7 sequences"),
        ({"sampling": {"n": 4, "max_tokens": 101}}, "openai.chat", "max_completion_tokens", "404 tokens"),
        ({"sampling": {"max_tokens": 401}}, "anthropic.messages", "max_tokens", "401 tokens"),
        ({"sampling": {"max_tokens": 401}}, "openai.responses", "max_output_tokens", "401 tokens"),
        ({"sampling": {"stop": ("a", "b", "c", "d")}}, "anthropic.messages", "stop_sequences", "4 stop"),
        ({"sampling": {"stop": ("a", "b"), "stop_token_ids": (3, 4)}}, "openai.chat", "stop", "4 stop"),
        ({"sampling": {"stop": ("a" * 11,)}}, "openai.chat", "stop", "11 characters"),
        ({"sampling": {"logprobs": 6}}, "openai.chat", "logprobs", "6 alternatives"),
        ({"prompt_logprobs": 6}, "openai.completions", "logprobs", "6 alternatives"),
        ({"sampling": {"logit_bias": {n: 1.0 for n in range(5)}}}, "openai.chat", "logit_bias", "5 entries"),
        ({"breakpoints": (Breakpoint("system"),) * 2}, "anthropic.messages", "cache_control", "2 breakpoints"),
        ({"tools": [TOOL]}, "openai.chat", "tools.0", "characters of a schema"),
        ({"text": "x" * 2_001}, "openai.responses", "input", "2,001 characters"),
        (
            {"sampling": {"response_format": {"kind": "regex", "regex": "a" * 900}}},
            "openai.responses", "text.format", "characters",
        ),
    ],
)  # fmt: skip
def test_each_size_is_refused_by_its_field(values: dict[str, Any], dialect: str, param: str, said: str) -> None:
    call = chat(values.pop("text", "Hi"), dialect=dialect, **values)
    check_bounds(call, Bounds())
    with pytest.raises(ApiError, match=said) as caught:
        check_bounds(call, SMALL)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_many_prompts_and_ids() -> None:
    call = replace(chat(), prompts=((1, 2), "x", "y"), dialect="openai.completions")
    with pytest.raises(ApiError, match="prompt: 3 prompts; at most 2"):
        check_bounds(call, SMALL)
    with pytest.raises(ApiError, match="2,001 characters"):
        check_bounds(replace(call, prompts=((1,) * 2_001,)), SMALL)
    with pytest.raises(ApiError, match="prompt: 9 tokens; at most 8"):
        check_prompt_tokens(call, 9, Bounds(prompt_tokens=8))


@given(prompts=st.integers(1, 4), n=st.integers(1, 9), max_tokens=st.integers(1, 300))
def test_what_is_let_in_is_within_the_bounds(prompts: int, n: int, max_tokens: int) -> None:
    call = chat("Hi", sampling={"n": n, "max_tokens": max_tokens})
    call = replace(call, prompts=call.prompts * prompts)
    fits = prompts <= 2 and prompts * n <= 4 and prompts * n * max_tokens <= 400
    try:
        check_bounds(call, SMALL)
    except ApiError:
        assert not fits
    else:
        assert fits
    longest = 400 // (prompts * n)
    assert fit_output(call, SMALL) == call
    free = fit_output(replace(call, has_max_tokens=False), SMALL)
    assert free.sampling.max_tokens == min(max_tokens, longest or max_tokens)
