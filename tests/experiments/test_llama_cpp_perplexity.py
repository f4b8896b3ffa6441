"""The rule of `experiments/llama_cpp_perplexity.py`: it gives each verdict, and its yardstick rounds as it says."""

from __future__ import annotations

from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.llama_cpp_perplexity import BLOCK, judged, log_probabilities, own_log_probabilities, rounded
from tests.thorough import tries
from workbench.engine.loaded_model import BUNDLED_MODELS
from workbench.model.hf.convert_gguf import convert_to_gguf


@settings(max_examples=tries(50))
@given(st.floats(0.01, 0.5), st.floats(0.1, 1.9), st.booleans())
def test_each_verdict_of_the_rule(spread: float, share: float, biased: bool) -> None:
    exact = [-3.0] * 400
    away = [spread if place % 2 else -spread for place in range(len(exact))]  # a mean of 0
    bias = (1.1 if biased else 0.9) * 3 * spread / len(exact) ** 0.5
    sources = {
        "exact": exact,
        "rounded": [one + by for one, by in zip(exact, away, strict=True)],
        "llama.cpp": [one + share * by + bias for one, by in zip(exact, away, strict=True)],
    }
    assert judged(sources)["holds"] == (not biased)
    wider = [one + 2.1 * by for one, by in zip(exact, away, strict=True)]
    assert not judged({**sources, "llama.cpp": wider})["holds"]


def test_log_probabilities_are_of_the_next_token() -> None:
    probabilities = torch.tensor([[0.5, 0.25, 0.25], [0.125, 0.75, 0.125], [1.0, 0.0, 0.0]])
    found = log_probabilities(probabilities.log(), torch.tensor([0, 2, 1]))
    torch.testing.assert_close(torch.tensor(found).exp(), torch.tensor([0.25, 0.75]))


def test_a_block_keeps_its_largest_number_and_rounds_the_others_to_its_steps() -> None:
    x = torch.randn(5, 3 * BLOCK, generator=torch.Generator().manual_seed(0))
    near, blocks = rounded(x), x.unflatten(-1, (-1, BLOCK))
    steps = blocks.abs().amax(-1, keepdim=True) / 127
    assert ((near.unflatten(-1, (-1, BLOCK)) - blocks).abs() <= 0.5001 * steps).all() and (near != x).any()
    torch.testing.assert_close(near.abs().unflatten(-1, (-1, BLOCK)).amax(-1), blocks.abs().amax(-1))
    assert not rounded(torch.zeros(1, BLOCK)).any()


def test_the_yardstick_rounds_what_enters_products(tmp_path: Path) -> None:
    convert_to_gguf(BUNDLED_MODELS["demo-draft"], tmp_path / "draft.gguf", "q8_0", torch.bfloat16)
    found = own_log_probabilities(tmp_path / "draft.gguf", torch.arange(5, 25))
    away = [abs(one - exact) for one, exact in zip(found["rounded"], found["exact"], strict=True)]
    assert len(away) == 19 and 0 < max(away) < 0.5
