"""Our logits against transformers', on random weights, float32."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from workbench.engine import naive
from workbench.model.hf.families import read_spec
from workbench.model.hf.save import save_folder
from workbench.model.hf.weights import load_weights, random_weights
from workbench.model.transformer import Transformer

TOKENS = 40
BOUND = 1e-5
# With an original context of 32 and heads of width 16 and 24, all three ranges of wavelengths occur.
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}


@dataclass(frozen=True)
class Case:
    name: str
    changes: dict[str, Any] = field(default_factory=dict)
    shard: str = "1GB"


CASES = [
    Case("plain"),
    Case("base", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    Case("linear", {"rope_parameters": LINEAR}),
    Case("llama3", {"rope_parameters": LLAMA3}),
    Case("tied", {"tie_word_embeddings": True}),
    Case("attention bias", {"attention_bias": True}),
    Case("feed-forward bias", {"mlp_bias": True}),
    Case("head width", {"head_dim": 24}),
    Case("no sharing", {"num_key_value_heads": 4}),
    Case("one group", {"num_key_value_heads": 1}),
    Case("large eps", {"rms_norm_eps": 0.1}),
    Case("sharded", shard="50KB"),
    Case(
        "everything",
        {
            "rope_parameters": LLAMA3,
            "tie_word_embeddings": True,
            "attention_bias": True,
            "mlp_bias": True,
            "head_dim": 24,
        },
        shard="50KB",
    ),
]


def theirs(case: Case) -> LlamaForCausalLM:
    """A model of theirs under which logits are near 1 and no parameter is at a value that hides it."""
    config = LlamaConfig(
        **{
            "vocab_size": 257,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 128,
            "rms_norm_eps": 1e-5,
            **case.changes,
        }
    )
    model = LlamaForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5, generator=generator)
            else:
                parameter.normal_(0, parameter.shape[-1] ** -0.5, generator=generator)
    return model


def token_ids(vocab: int) -> Tensor:
    return torch.randint(vocab, (TOKENS,), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def their_logits(model: LlamaForCausalLM, ids: Tensor) -> Tensor:
    logits = model(ids[None]).logits[0]
    assert logits.dtype == torch.float32 and 0.3 < logits.std().item() < 3
    return logits


def ours(folder: Path) -> Transformer:
    spec = read_spec(folder)
    return Transformer.from_state(spec, load_weights(folder, spec, torch.float32))


def assert_equal_logits(model: Transformer, ids: Tensor, expected: Tensor) -> None:
    for logits in (naive.logits(model, ids), model.logits(ids)):
        assert logits.shape == expected.shape
        assert (logits - expected).abs().max().item() <= BOUND


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_logits_equal_transformers(tmp_path: Path, case: Case) -> None:
    reference = theirs(case)
    reference.save_pretrained(tmp_path, max_shard_size=case.shard)
    assert (tmp_path / "model.safetensors.index.json").exists() == (case.shard != "1GB")
    ids = token_ids(reference.config.vocab_size)
    assert_equal_logits(ours(tmp_path), ids, their_logits(reference, ids))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_is_saved_here_is_the_same_model_there(tmp_path: Path, case: Case) -> None:
    theirs(case).save_pretrained(tmp_path / "a")
    spec = read_spec(tmp_path / "a")
    state = random_weights(spec, torch.float32, seed=3)
    shard_bytes = 10**9 if case.shard == "1GB" else 50_000
    save_folder(tmp_path / "b", spec, state, torch.float32, shard_bytes=shard_bytes)
    back = LlamaForCausalLM.from_pretrained(tmp_path / "b", dtype=torch.float32).eval()
    ids = token_ids(spec.vocab_size)
    assert_equal_logits(Transformer.from_state(spec, state), ids, their_logits(back, ids))


def test_stored_bfloat16_is_read_as_float32(tmp_path: Path) -> None:
    theirs(CASES[0]).bfloat16().save_pretrained(tmp_path)
    reference = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ids = token_ids(reference.config.vocab_size)
    assert_equal_logits(ours(tmp_path), ids, their_logits(reference, ids))
