"""One table of families for everything that is held against transformers, and both sides of a comparison."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from workbench.model.hf.families import read_spec, spec_from_config
from workbench.model.hf.weights import load_weights
from workbench.model.spec import ModelSpec
from workbench.model.transformer import Transformer
from workbench.testing.family_checkpoints import CONFIGS, FAMILY_CASES, MULTIPLIERS, SIZES

NEEDS_TRANSFORMERS = pytest.mark.skipif(
    find_spec("transformers") is None, reason="transformers is not installed: pip install 'transformers>=5'"
)
BOUND, LLAMA_BOUND = 2e-5, 3e-6  # of the largest logit
Changes = dict[str, Any]
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192, "rope_theta": 500_000.0,
}  # fmt: skip
# With heads of width 16 and 24, wavelengths of all three ranges occur.
SHORT_LLAMA3 = {**LLAMA3, "original_max_position_embeddings": 32, "rope_theta": 1000.0}
YARN = {
    "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "beta_fast": 4.0, "beta_slow": 1.0,
    "rope_theta": 1000.0,
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1000.0, "original_max_position_embeddings": 16,
    "short_factor": [1.0 + 0.1 * pair for pair in range(8)], "long_factor": [2.0 + 0.5 * pair for pair in range(8)],
}  # fmt: skip
BY_KIND = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}  # fmt: skip
BIASED = {"attention_bias": True, "mlp_bias": True, "head_dim": 24}
GEMMA = {"head_dim": 24, "sliding_window": 7, "query_pre_attn_scalar": 24}
EXPERTS = {"num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 7}
QWEN_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
LATENT = {
    "kv_lora_rank": 24, "q_lora_rank": 20, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10,
    "first_k_dense_replace": 4, "num_key_value_heads": 4,
}  # fmt: skip

# What GGUF can say of each family.
GGUF_CASES: dict[str, tuple[Changes, ...]] = {
    "llama": (
        {"tie_word_embeddings": True}, BIASED, {"rope_parameters": LLAMA3, "head_dim": 32},
        {"rope_parameters": LINEAR}, {"rope_parameters": YARN},
    ),
    "mistral": ({"sliding_window": None, "head_dim": 24, "rope_theta": 1e6},),
    "mixtral": ({"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": None},),
    "qwen2": ({}, {"tie_word_embeddings": True}),
    "qwen2_moe": ({**QWEN_EXPERTS, "shared_expert_intermediate_size": 64, "norm_topk_prob": False},),
    "qwen3_moe": ({**QWEN_EXPERTS, "norm_topk_prob": True},),
    "gemma2": ({**GEMMA, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0},),
    "gemma3_text": ({**GEMMA, "num_hidden_layers": 7, "final_logit_softcapping": 10.0, "rope_parameters": BY_KIND},),
    "phi": ({"intermediate_size": 256}, {"intermediate_size": 256, "partial_rotary_factor": 0.25}),
    "phi3": (
        *CONFIGS["phi3"],
        {"sliding_window": None, "rope_parameters": LONGROPE, "original_max_position_embeddings": 16},
    ),
    "gpt2": ({"n_inner": 256},),
    "starcoder2": ({"sliding_window": None},),
    "falcon": (
        *CONFIGS["falcon"][:2], {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ),
    "stablelm": (
        {"partial_rotary_factor": 0.5, "use_qkv_bias": True},
        {"partial_rotary_factor": 0.5, "qk_layernorm": True, "use_parallel_residual": True},
    ),
    "nemotron": ({},),
    "olmo": ({"clip_qkv": 0.8}, {}),
    "olmoe": CONFIGS["olmoe"][:1],
    "smollm3": ({"num_hidden_layers": 5},),
    "cohere2": ({"sliding_window": 7, "num_hidden_layers": 5},),
    "ernie4_5": ({"head_dim": 16},),
    "granite": (MULTIPLIERS,),
    **{
        family: CONFIGS[family]
        for family in (
            "qwen3", "gemma", "gpt_neox", "olmo2", "olmo3", "granitemoe", "arcee", "cohere", "exaone4", "glm4",
            "seed_oss", "hunyuan_v1_dense", "gpt_oss",
        )
    },
}  # fmt: skip
# Beside those of CONFIGS: fields that those leave at their defaults, and rotary scalings.
VARIANTS = [
    *((family, changes) for family in ("llama", "gemma2", "gemma3_text") for changes in GGUF_CASES[family]),
    ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    ("llama", {"num_key_value_heads": 4}),
    ("llama", {"num_key_value_heads": 1, "rms_norm_eps": 0.1}),
    ("llama", {**BIASED, "rope_parameters": SHORT_LLAMA3, "tie_word_embeddings": True}),
    ("mistral", {"sliding_window": None, "head_dim": 24}),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1, "attention_bias": True}),
    ("gemma2", {**GEMMA, "attn_logit_softcapping": None, "final_logit_softcapping": None,
                "tie_word_embeddings": False}),
    ("qwen2_moe", {**QWEN_EXPERTS, "use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2,
                   "shared_expert_intermediate_size": 40}),
    ("qwen3_moe", {**QWEN_EXPERTS, "use_sliding_window": True, "sliding_window": 7}),
    ("cohere2", {"sliding_window": 7, "sliding_window_pattern": 2}),
    ("ernie4_5", {"head_dim": None}),
    ("gemma3_text", {**GEMMA, "sliding_window_pattern": 2, "rope_parameters": BY_KIND}),
    ("gpt_oss", {**EXPERTS, "swiglu_limit": 0.5, "swiglu_alpha": 1.1, "attention_bias": False,
                 "rope_parameters": {**YARN, "truncate": False}}),
    ("deepseek_v3", LATENT),
    ("deepseek_v3", {**LATENT, "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3}}),
    ("deepseek_v3", {**LATENT, "q_lora_rank": None}),
    ("deepseek_v3", {**LATENT, "attention_bias": True, "rope_interleave": False}),
]  # fmt: skip
CASES: list[tuple[str, Changes]] = [*FAMILY_CASES, *VARIANTS]
WIDE = {
    "hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4,
    "num_hidden_layers": 2,
}  # fmt: skip

COMMON = {
    "vocab_size": 100, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4,
    "max_position_embeddings": 4096,
}  # fmt: skip


def spec_of_config(family: str, /, **changes: object) -> ModelSpec:
    """Return what is read from a config of `COMMON` with `changes`; a change to `...` takes a field out."""
    config = {"model_type": family, **COMMON, **changes}
    return spec_from_config({key: value for key, value in config.items() if value is not ...}, "some", "config.json")


def named(cases: list[tuple[str, Changes]]) -> pytest.MarkDecorator:
    """Return the mark that gives a test each `family` with its `changes`."""
    ids = [f"{family}-{number}" for number, (family, _) in enumerate(cases)]
    return pytest.mark.parametrize(("family", "changes"), cases, ids=ids)


def read_model(path: Path, dtype: torch.dtype = torch.float32) -> Transformer:
    """Return the model of a folder or a GGUF file."""
    spec = read_spec(path)
    return Transformer.from_state(spec, load_weights(path, spec, dtype))


def ours_of(theirs: Any, folder: Path) -> Transformer:
    """Return the model as read from the folder that transformers writes."""
    theirs.save_pretrained(folder)
    return read_model(folder)


@torch.no_grad()
def logits_of(theirs: Any, ids: Tensor) -> Tensor:
    return theirs(ids[None], use_cache=False).logits[0]


def assert_equal(given: Tensor, expected: Tensor, bound: float = BOUND) -> None:
    assert given.shape == expected.shape
    assert (given - expected).abs().max() <= bound * max(1.0, expected.abs().max().item())


def draw_ids(count: int, seed: int) -> Tensor:
    return torch.randint(4, SIZES["vocab_size"], (count,), generator=torch.Generator().manual_seed(seed))
