"""Techniques that choose pages, or differ by head, or divide by no sum: their equations, and their limits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from einops import einsum
from hypothesis import given, settings
from hypothesis import strategies as st

import workbench
from compiled_kernels.attention import AttentionParameters, SpanContext, attend
from compiled_kernels.masks import AndMask, Causal, HeadMask, SlidingWindow
from experiments.zoo.duo_attention import DuoAttention
from experiments.zoo.minference import MInference
from experiments.zoo.sigmoid_attention import Sigmoid
from tests.thorough import tries
from tests.zoo.loaded import text_of

HEADS, GROUPS, DIM = 6, 2, 8
TEXT = "def add(a, b):\n    return a + b\n\n\n" * 8


def drawn(tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(tokens, heads, DIM, generator=generator) for heads in (HEADS, GROUPS, GROUPS))  # type: ignore[return-value] (three of them)


@settings(max_examples=tries(20))
@given(st.integers(1, 30), st.integers(0, 2**31), st.floats(-2, 2))
def test_sigmoid_attention_is_that_of_its_equation(tokens: int, seed: int, bias: float) -> None:
    q, k, v = drawn(tokens, seed)
    parameters = AttentionParameters(DIM**-0.5, score=Sigmoid(bias))
    found = attend(q, SpanContext.whole(k, v, tokens), parameters)
    scores = einsum(q, k.repeat_interleave(3, 1), "token head dim, key head dim -> head token key") * DIM**-0.5
    seen = torch.arange(1, tokens + 1)[:, None]
    weights = torch.sigmoid(scores + bias - seen.log()).tril()
    right = einsum(weights, v.repeat_interleave(3, 1), "head token key, key head dim -> token head dim")
    torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5)


@settings(max_examples=tries(20))
@given(st.integers(1, 60), st.integers(0, 2**31))
def test_heads_of_a_kind_see_what_they_would_alone(tokens: int, seed: int) -> None:
    """DuoAttention: heads of the first group see as in full attention, those of the second a window with sinks."""
    q, k, v = drawn(tokens, seed)
    context = SpanContext.whole(k, v, tokens)
    duo = DuoAttention(share=3, every=2, sinks=4, recent=8)
    found = attend(q, context, AttentionParameters(DIM**-0.5, AndMask(Causal(), HeadMask(duo, HEADS))))
    whole = attend(q, context, AttentionParameters(DIM**-0.5))
    streaming = attend(q, context, AttentionParameters(DIM**-0.5, SlidingWindow(8, 4)))
    torch.testing.assert_close(found[:, :3], whole[:, :3], rtol=0, atol=0)
    torch.testing.assert_close(found[:, 3:], streaming[:, 3:], rtol=0, atol=0)


def test_each_head_of_minference_has_one_of_three_patterns() -> None:
    at = torch.arange(512)
    shown = MInference()(at[None, :, None], at[None, None], torch.arange(6)[:, None, None])
    assert torch.equal(shown[:3], shown[3:])
    assert len({int(pattern.sum()) for pattern in shown[:3]}) == 3
    share = shown.sum((1, 2)) / (512 * 513 / 2)
    assert bool((share < 0.75).all()) and bool(shown.any(-1).all())
    whole = MInference(sinks=512, vertical=1, sparsity=1)
    everything = whole(at[None, :, None], at[None, None], torch.arange(3)[:, None, None])
    assert torch.equal(everything, (at <= at[:, None]).expand(3, -1, -1))


@pytest.mark.parametrize(
    ("name", "size", "backend"),
    [
        ("quest.py:Quest", 16, "mlir"), ("quest.py:Quest", 16, "eager"), ("moba.py:MoBA", 64, "eager"),
        ("sparse_selection.py:SelectedBlocks", 32, "eager"),
    ],
)  # fmt: skip
def test_with_as_many_pages_as_there_are_the_text_is_the_models(name: str, size: int, backend: str) -> None:
    def text(**settings: Any) -> str:
        runner = workbench.load("demo", backend=backend, dtype="float32", page_size=size, **settings)
        return text_of(runner, TEXT, 16)

    pages = {"path": f"experiments/zoo/{name}", "arguments": {"keep": 1000, "page_size": size}}
    assert text(attention={"pages": pages}) == text()
