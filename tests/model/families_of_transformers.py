"""Tiny models of transformers' own, one for each family that is read here, with random weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
}
LAYERS = {
    "vocab_size": 257,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 3,
}
GEMMA = {"head_dim": 24, "query_pre_attn_scalar": 20, "sliding_window": 7}
EXPERTS = {"head_dim": 16, "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 7}
LATENT = {
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "first_k_dense_replace": 3,
    "num_key_value_heads": 4,
}


@dataclass(frozen=True)
class Case:
    """`architecture` without its endings: the config is `...Config`, the model `...ForCausalLM`."""

    name: str
    architecture: str
    changes: dict[str, Any] = field(default_factory=dict)
    config: str = ""


CASES = [
    Case("mistral", "Mistral", {"sliding_window": 7}),
    Case("mistral without a window", "Mistral", {"sliding_window": None, "head_dim": 24}),
    Case("qwen3", "Qwen3", {"head_dim": 24}),
    Case("qwen3 with windows", "Qwen3", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1,
                                         "attention_bias": True}),
    Case("gemma2", "Gemma2", {**GEMMA, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0}),
    Case("gemma2 without caps", "Gemma2", {**GEMMA, "attn_logit_softcapping": None, "final_logit_softcapping": None,
                                           "tie_word_embeddings": False}),
    Case("gemma3", "Gemma3", GEMMA, "Gemma3Text"),
    Case("gemma3 with a pattern", "Gemma3",
         {**GEMMA, "sliding_window_pattern": 2, "num_hidden_layers": 4, "final_logit_softcapping": 2.0,
          "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0},
                              "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}}}, "Gemma3Text"),
    Case("gpt-oss", "GptOss", EXPERTS),
    Case("gpt-oss clamped", "GptOss", {**EXPERTS, "swiglu_limit": 0.5, "swiglu_alpha": 1.1, "attention_bias": False,
                                       "rope_parameters": {**YARN, "truncate": False}}),
    Case("deepseek", "DeepseekV3", LATENT),
    Case("deepseek with yarn", "DeepseekV3",
         {**LATENT, "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3}}),
    Case("deepseek without a latent of queries", "DeepseekV3", {**LATENT, "q_lora_rank": None}),
    Case("deepseek with biases, pairs not interleaved", "DeepseekV3",
         {**LATENT, "attention_bias": True, "rope_interleave": False}),
]  # fmt: skip


def model_of(case: Case, dtype: torch.dtype = torch.float32) -> Any:
    """A model of theirs under which logits are near 1 and no parameter is at a value that hides it."""
    import transformers

    config = getattr(transformers, f"{case.config or case.architecture}Config")(**{**LAYERS, **case.changes})
    model = getattr(transformers, f"{case.architecture}ForCausalLM")(config).eval().to(dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                centre = 0.0 if "Gemma" in case.architecture else 1.0
                parameter.uniform_(centre - 0.5, centre + 0.5, generator=generator)
            elif parameter.ndim == 1 or "bias" in name:
                parameter.normal_(0, 1, generator=generator)
            else:
                inputs = parameter.shape[1 if parameter.ndim == 3 else -1]  # experts are stored for x @ weight
                parameter.normal_(0, inputs**-0.5, generator=generator)
    return model


def saved(case: Case, folder: Path) -> Any:
    """The same model, written to `folder`."""
    model = model_of(case)
    model.save_pretrained(folder)
    return model


def token_ids(vocab: int, tokens: int = 40) -> Tensor:
    return torch.randint(vocab, (tokens,), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits_of(model: Any, ids: Tensor) -> Tensor:
    logits = model(ids[None]).logits[0]
    assert 0.2 < logits.std().item() < 4
    return logits
