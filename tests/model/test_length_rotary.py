"""Rotary scalings that look at a sequence's length: LongRoPE and dynamic NTK, chosen by sequence and not by batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.steps import forced
from tests.engine.tiny import finals, generate, runner_of
from tests.helpers.refusals import refuses
from tests.model.families import Changes, assert_equal, draw_ids, logits_of, ours_of
from tests.thorough import tries
from workbench.inspect.whole_text import TextAttention
from workbench.model.attention_spec import RotaryConfig, RotaryScaling
from workbench.model.hf.families import read_spec, spec_from_config
from workbench.model.rotary import build_rotary_table, rotary_frequencies
from workbench.oracle import naive
from workbench.request import Request, SamplingParameters
from workbench.testing.family_checkpoints import SIZES, random_checkpoint

TRAINED = 24  # tokens of the context before it was stretched
SHORT, LONG = [1.0, 1.1, 1.3, 1.6, 2.0, 2.5, 3.1, 4.0], [1.0, 1.5, 2.2, 3.0, 4.0, 6.0, 9.0, 14.0]
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": SHORT, "long_factor": LONG,
    "original_max_position_embeddings": TRAINED,
}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 3.0}
MIXED = {"num_local_experts": 4, "num_experts_per_tok": 2}
CASES: dict[str, tuple[str, Changes]] = {
    "phi3": ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": TRAINED}),
    "phi3, half of each head": ("phi3", {
        "rope_parameters": {**LONGROPE, "short_factor": SHORT[:4], "long_factor": LONG[:4]},
        "original_max_position_embeddings": TRAINED, "partial_rotary_factor": 0.5,
    }),
    # transformers 5.23 takes short factors alone for phimoe: equal lists show the rest
    "phimoe": ("phimoe", {
        **MIXED, "rope_parameters": {**LONGROPE, "long_factor": SHORT, "short_mscale": 1.1, "long_mscale": 1.3}
    }),
    "llama, dynamic": ("llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": TRAINED}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("length", [TRAINED - 1, TRAINED, TRAINED + 1, 40])
def test_logits_are_those_of_transformers(tmp_path: Path, case: str, length: int) -> None:
    """Whole, in chunks that do not reach the end, and token by token: the length that matters is the sequence's."""
    family, changes = CASES[case]
    theirs = random_checkpoint(family, changes)
    model, ids = ours_of(theirs, tmp_path), draw_ids(length, 1)
    expected = logits_of(theirs, ids)
    assert_equal(naive.logits(model, ids), expected)
    assert_equal(model.logits(ids), expected)
    assert_equal(forced(model, ids, chunks=(11, 6)), expected[[10, *range(16, length)]])


@pytest.mark.parametrize("case", CASES)
def test_each_sequence_has_its_own_factors_in_a_batch(tmp_path: Path, case: str) -> None:
    """Short and long requests run beside each other, with shared prefixes; each has the logits of its own length."""
    family, changes = CASES[case]
    model, ids = ours_of(random_checkpoint(family, changes), tmp_path), draw_ids(34, 1)
    dynamic = "dynamic" in case
    prompts = {"short": ids[:12], "long": ids[:30], "short too": ids[:16], "long too": ids[:34]}
    greedy = SamplingParameters(temperature=0, max_tokens=4, ignore_eos=True)
    runner = runner_of(model, prefix="radix", max_num_seqs=2, pages=60)
    found = finals(runner, [Request(name, tuple(text.tolist()), greedy) for name, text in prompts.items()])
    for name, prompt in prompts.items():
        alone = finals(runner_of(model, prefix="off", pages=60), [Request(name, tuple(prompt.tolist()), greedy)])
        assert found[name] == alone[name]
        if dynamic and "long" in name:  # its base is that of prompt and answer, the oracle's of the text so far
            continue
        assert list(found[name]) == naive.greedy(model, prompt.tolist(), 4)


def test_pages_of_another_length_class_are_not_reused(tmp_path: Path) -> None:
    model = ours_of(random_checkpoint(*CASES["phi3"]), tmp_path)
    runner, ids = runner_of(model, prefix="radix", pages=60), tuple(draw_ids(34, 1).tolist())
    greedy = SamplingParameters(temperature=0, max_tokens=2, ignore_eos=True)
    cached = {}
    for name, count in {"a": 16, "b": 32, "c": 33, "d": 17}.items():
        cached[name] = generate(runner, [Request(name, ids[:count], greedy)])[name].cached_tokens
    assert cached["b"] == 0, "its keys are rotated by the long factors, a's by the short ones"
    assert cached["c"] > 0 and cached["d"] > 0


def test_a_text_that_grows_past_the_trained_context_is_computed_anew(tmp_path: Path) -> None:
    model, ids = ours_of(random_checkpoint(*CASES["phi3"]), tmp_path), draw_ids(40, 1)
    grown, whole = TextAttention(model, ids[:20].tolist()), TextAttention(model, ids.tolist())
    grown.extend(ids[20:].tolist())
    for layer in range(len(model.blocks)):
        torch.testing.assert_close(grown.weights(layer, range(40)), whole.weights(layer, range(40)))


@settings(max_examples=tries(60))
@given(
    st.sampled_from(["longrope", "dynamic"]), st.integers(2, 8), st.integers(0, 4), st.integers(1, 64),
    st.lists(st.tuples(st.integers(0, 200), st.integers(1, 200)), min_size=1, max_size=6),
)  # fmt: skip
def test_angles_of_a_batch_are_those_of_each_token_alone(
    kind: Any, pairs: int, unrotated: int, trained: int, tokens: list[tuple[int, int]]
) -> None:
    factors = tuple(1 + 0.3 * pair for pair in range(pairs))
    scaling = RotaryScaling(
        kind=kind, factor=2.5, short_factors=factors, long_factors=tuple(map(lambda each: 2 * each, factors)),
        attention_factor=1.2, long_attention_factor=1.4, original_max_position_embeddings=trained,
    )  # fmt: skip
    rotary = RotaryConfig(scaling=scaling)
    table = build_rotary_table((rotary, 2 * pairs, 2 * (pairs + unrotated)))
    cos, sin = table(*(torch.tensor(each) for each in zip(*tokens, strict=True)))
    for row, (position, limit) in enumerate(tokens):
        angles = position * rotary_frequencies(rotary, 2 * pairs, limit)
        gain = 1.4 if limit > trained and kind == "longrope" else 1.2
        torch.testing.assert_close(cos[row, :pairs], gain * angles.cos(), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(sin[row, :pairs], gain * angles.sin(), rtol=1e-9, atol=1e-9)
        assert (cos[row, pairs:] == 1).all() and (sin[row, pairs:] == 0).all()


def config_of(tmp_path: Path, **changes: Any) -> Changes:
    random_checkpoint(*CASES["phi3"]).save_pretrained(tmp_path)
    return {**json.loads((tmp_path / "config.json").read_text()), **changes}


@pytest.mark.parametrize(
    ("rope", "words"),
    [
        (
            {**LONGROPE, "short_factor": SHORT[:3]},
            "layer 0 rotates 8 pairs of columns; longrope has factors for (3, 8)",
        ),
        ({**LONGROPE, "original_max_position_embeddings": 1}, "at least 2|it must be 1"),
        ({**LONGROPE, "long_factor": "long"}, "long_factor is"),
        ({**LONGROPE, "long_factor": [0.0] * 8}, "above 0"),
        ({**DYNAMIC}, "Phi 3 has no others"),
        ({"rope_type": "default", "rope_theta": 1e4, "long_factor": LONG}, "long_factor"),
    ],
)
def test_wrong_factors_are_refused(tmp_path: Path, rope: Changes, words: str) -> None:
    refuses(
        words.replace("(", r"\(").replace(")", r"\)"),
        lambda: spec_from_config(config_of(tmp_path, rope_parameters=rope), "phi"),
    )


def test_old_names_of_longrope_are_read(tmp_path: Path) -> None:
    old = {"type": "su", "short_factor": SHORT, "long_factor": LONG}
    random_checkpoint(*CASES["phi3"]).save_pretrained(tmp_path)
    right = read_spec(tmp_path)
    changes = {"rope_parameters": None, "rope_scaling": old, "rope_theta": 10000.0}
    found = spec_from_config(config_of(tmp_path, **changes), right.name)
    assert found.rotary == right.rotary and right.max_position_embeddings == SIZES["max_position_embeddings"]
