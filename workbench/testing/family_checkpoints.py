"""Build random checkpoints of every supported family with transformers, for comparison with our models.

They are tiny, and no parameter has a value without effect: norms are not 1, biases are not 0.
"""

from __future__ import annotations

from typing import Any

import torch

SIZES: dict[str, Any] = {
    "vocab_size": 131, "pad_token_id": None, "bos_token_id": None, "eos_token_id": 3,
    "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 96,
}  # fmt: skip
NAMES_OF_ITS_OWN: dict[str, dict[str, str]] = {
    "gpt2": {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
             "max_position_embeddings": "n_positions", "intermediate_size": "n_inner"},
    "bloom": {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head"},
    "mpt": {"hidden_size": "d_model", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads",
            "max_position_embeddings": "max_seq_len"},
}  # fmt: skip
NAMES_OF_ITS_OWN["gptj"] = NAMES_OF_ITS_OWN["gpt2"]
WITHOUT_GROUPS = ("gpt2", "gptj", "gpt_neox", "opt", "bloom", "mpt", "falcon")
MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.3,
    "logits_scaling": 2.0,
    "attention_multiplier": 0.2,
}
QWEN_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
DEEPSEEK = {
    "kv_lora_rank": 24, "q_lora_rank": 20, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10,
    "num_key_value_heads": 4, "first_k_dense_replace": 1, "moe_intermediate_size": 24, "n_routed_experts": 8,
    "num_experts_per_tok": 3, "n_shared_experts": 2,
}  # fmt: skip
LLAMA4 = {"head_dim": 16, "num_local_experts": 5, "num_experts_per_tok": 1}
DELTA_NET = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 10,
}  # fmt: skip
GEMMA3N = {
    "head_dim": 16, "sliding_window": 7, "vocab_size_per_layer_input": 100, "hidden_size_per_layer_input": 12,
    "laurel_rank": 6, "activation_sparsity_pattern": [0.9, 0.0, 0.5, 0.0],
}  # fmt: skip
FALCON_H1 = {
    "embedding_multiplier": 3.0, "lm_head_multiplier": 0.4, "mlp_multipliers": [0.7, 1.6], "key_multiplier": 1.7,
    "attention_in_multiplier": 0.6, "attention_out_multiplier": 1.3, "ssm_in_multiplier": 1.4,
    "ssm_out_multiplier": 0.8, "ssm_multipliers": [0.5, 1.2, 0.9, 1.5, 0.7],
}  # fmt: skip
GEMMA = {"head_dim": 24, "query_pre_attn_scalar": 20, "sliding_window": 7}
CONFIGS: dict[str, tuple[dict[str, Any], ...]] = {
    "llama": ({}, {"attention_bias": True, "mlp_bias": True, "head_dim": 24}),
    "mistral": ({"sliding_window": 7},),
    "ministral": ({"sliding_window": 7, "head_dim": 16},),
    "qwen2": ({}, {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2}),
    "qwen3": ({"head_dim": 24},),
    "gemma": ({"head_dim": 24},),
    "gemma2": (GEMMA,),
    "gemma3_text": (GEMMA,),
    "gemma3n_text": (
        {**GEMMA3N, "num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2},
        {**GEMMA3N, "num_kv_shared_layers": 0, "layer_types": ["full_attention"] * 4, "altup_active_idx": 1,
         "altup_num_inputs": 3, "altup_correct_scale": False, "intermediate_size": [48, 40, 24, 48],
         "attention_bias": True},
    ),
    "phi": ({}, {"qk_layernorm": True, "partial_rotary_factor": 0.25}),
    "phi3": ({"sliding_window": 7}, {"sliding_window": None, "partial_rotary_factor": 0.5}),
    "olmo": ({"clip_qkv": 0.8},),
    "olmo2": ({}, {"num_key_value_heads": 4}),
    "olmo3": ({"sliding_window": 7},),
    "smollm3": ({},),
    "granite": (MULTIPLIERS,),
    "cohere": ({}, {"use_qk_norm": True}),
    "cohere2": ({"sliding_window": 7},),
    "starcoder2": ({"sliding_window": 7}, {"use_bias": False}),
    "stablelm": (
        {"partial_rotary_factor": 0.5},
        {"partial_rotary_factor": 0.5, "qk_layernorm": True, "use_parallel_residual": True, "use_qkv_bias": True},
    ),
    "gpt2": ({}, {"scale_attn_weights": False}),
    "gpt_neox": ({"rotary_pct": 0.25}, {"rotary_pct": 0.5, "use_parallel_residual": False}),
    "gptj": ({"rotary_dim": 8},),
    "falcon": (
        {"multi_query": True}, {"new_decoder_architecture": True, "num_kv_heads": 2},
        {"multi_query": False, "bias": True, "parallel_attn": False},
        {"new_decoder_architecture": True, "num_kv_heads": 4, "num_ln_in_parallel_attn": 1},
    ),
    "opt": ({"ffn_dim": 48, "word_embed_proj_dim": 64},),
    "bloom": ({},),
    "mpt": ({}, {"attn_config": {"clip_qkv": 0.8}}),
    "nemotron": ({}, {"mlp_bias": True, "attention_bias": True}),
    "exaone4": ({"sliding_window": 7, "sliding_window_pattern": 4},),
    "glm": ({"head_dim": 16},),
    "glm4": ({"head_dim": 16, "attention_bias": True},),
    "ernie4_5": ({"head_dim": 16, "use_bias": True},),
    "seed_oss": ({"head_dim": 16},),
    "helium": ({"head_dim": 16},),
    "ministral3": (
        {"head_dim": 16, "rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0,
         "original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.3}},
    ),
    "apertus": ({"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}, {}),
    "arcee": ({},),
    "hunyuan_v1_dense": ({"head_dim": 16},),
    "mixtral": ({"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 7},),
    "qwen2_moe": (
        {**QWEN_EXPERTS, "shared_expert_intermediate_size": 40},
        {**QWEN_EXPERTS, "shared_expert_intermediate_size": 40, "norm_topk_prob": True, "decoder_sparse_step": 2},
    ),
    "qwen3_moe": ({**QWEN_EXPERTS, "mlp_only_layers": [1], "head_dim": 16, "norm_topk_prob": True},),
    "olmoe": (
        {"num_experts": 6, "num_experts_per_tok": 2}, {"num_experts": 6, "num_experts_per_tok": 2, "clip_qkv": 0.8},
    ),
    "phimoe": (
        {"num_local_experts": 6, "num_experts_per_tok": 2, "router_jitter_noise": 0.3, "lm_head_bias": True},
        {"num_local_experts": 6, "num_experts_per_tok": 2, "attention_bias": True, "sliding_window": 7},
    ),
    "llama4_text": (
        {**LLAMA4, "attention_chunk_size": 7, "floor_scale": 5, "attn_scale": 0.4},
        {**LLAMA4, "attention_chunk_size": 16, "interleave_moe_layer_step": 2, "intermediate_size_mlp": 40,
         "no_rope_layer_interval": 2, "use_qk_norm": False, "num_experts_per_tok": 2},
    ),
    "granitemoe": ({**MULTIPLIERS, "num_local_experts": 6, "num_experts_per_tok": 2},),
    "deepseek_v2": (
        {**DEEPSEEK, "topk_method": "greedy"},
        {**DEEPSEEK, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2,
         "routed_scaling_factor": 2.0, "q_lora_rank": None},
    ),
    "deepseek_v3": ({**DEEPSEEK, "n_group": 4, "topk_group": 2}, {**DEEPSEEK, "n_group": 1, "topk_group": 1}),
    "lfm2": (
        {"layer_types": ["conv", "full_attention", "conv", "conv"], "block_multiple_of": 8},
        {"layer_types": ["conv"] * 4, "conv_bias": True, "conv_L_cache": 4, "block_auto_adjust_ff_dim": False},
    ),
    "mamba2": (
        {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2},
        {"num_heads": 4, "head_dim": 32, "state_size": 7, "n_groups": 1, "use_bias": True, "use_conv_bias": False,
         "conv_kernel": 3, "chunk_size": 16},
    ),
    "bamba": (
        {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_state": 12, "mamba_n_groups": 2},
        {"attn_layer_indices": [0, 3], "mamba_n_heads": 4, "mamba_d_state": 9, "mamba_proj_bias": True,
         "attention_bias": True, "mlp_bias": True},
    ),
    "falcon_h1": (
        {**FALCON_H1, "mamba_d_ssm": 96, "mamba_n_heads": 8, "mamba_d_state": 12, "mamba_n_groups": 2},
        {**FALCON_H1, "mamba_d_ssm": None, "mamba_n_heads": 4, "mamba_d_state": 9, "mamba_rms_norm": True,
         "mamba_norm_before_gate": False, "mamba_proj_bias": True, "attention_bias": True, "mlp_bias": True},
        {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_state": 8, "mamba_rms_norm": True, "projectors_bias": True,
         "mamba_conv_bias": False, "tie_word_embeddings": True},
    ),
    "qwen3_next": (
        {**QWEN_EXPERTS, **DELTA_NET, "shared_expert_intermediate_size": 40, "head_dim": 16},
        {**QWEN_EXPERTS, **DELTA_NET, "shared_expert_intermediate_size": 40, "head_dim": 24, "norm_topk_prob": False,
         "linear_key_head_dim": 12, "linear_value_head_dim": 16,
         "layer_types": ["full_attention", "linear_attention"] * 2, "mlp_only_layers": [1], "attention_bias": True},
    ),
    "gpt_oss": ({"num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 7},),
}  # fmt: skip
FAMILY_CASES = [(family, changes) for family, cases in CONFIGS.items() for changes in cases]


def random_checkpoint(family: str, changes: dict[str, Any], seed: int = 0) -> Any:
    """Return a model of transformers with random parameters.

    Args:
        family: its `model_type`.
        changes: fields of its config in addition to the common sizes.
        seed: random seed of the parameters.

    Raises:
        ImportError: if transformers is not installed.
    """
    import transformers

    own = NAMES_OF_ITS_OWN.get(family, {})
    left_out = ("num_key_value_heads", "intermediate_size")[: 2 if family in ("bloom", "mpt", "opt") else 1]
    left_out = left_out if family in WITHOUT_GROUPS else ()
    values = {**{own.get(key, key): value for key, value in SIZES.items() if key not in left_out}, **changes}
    config = transformers.AutoConfig.for_model(family, **values)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    generator = torch.Generator().manual_seed(seed)
    biases = [(name, buffer) for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]
    with torch.no_grad():
        for name, parameter in [*model.named_parameters(), *biases]:
            if name.endswith("weight") and parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5, generator=generator)
            else:
                size = parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.3
                parameter.normal_(0, size, generator=generator)
    return model
