"""Families with a mixture of experts or a compressed cache: gpt-oss (OpenAI, 2025) and DeepSeek-V3 (2024)."""

from __future__ import annotations

from workbench.model.config_fields import ConfigFields
from workbench.model.family_fields import (
    FULL,
    SLIDING,
    layers_by_type,
    read_heads,
    read_layer_types,
    read_num_layers,
    build_spec,
    refuse_activation,
    refuse_unsupported,
    refuse_sliding_windows,
    read_window,
)
from workbench.model.latent_spec import MLASpec
from workbench.model.rotary_config import read_rotary, yarn_attention_factor, yarn_score_factor
from workbench.model.spec import AttentionSpec, MoESpec, GateSpec, LayerSpec, ModelSpec, RotaryConfig, RotaryScaling

GPT_OSS_BASE = 150_000.0


def gpt_oss(config: ConfigFields, name: str) -> ModelSpec:
    """Read gpt-oss: windows in every other layer, the first included; a learned logit a head that attends
    to nothing."""
    refuse_unsupported(config, "GptOssForCausalLM", ("num_local_experts",))
    refuse_activation(config, "hidden_act", "silu")
    bias = config.boolean("attention_bias", default=True)
    kinds = read_layer_types(config, period=2)
    windows = {FULL: None, SLIDING: read_window(config, 128) if SLIDING in kinds else None}
    count, used = config.integer("num_local_experts", default=128), config.integer("num_experts_per_tok", default=4)
    if used > count:
        raise config.invalid("num_experts_per_tok", used, f"at most num_local_experts ({count})")
    layers = {
        kind: LayerSpec(
            attention=AttentionSpec(
                **read_heads(config, dim=64), window=window, sink_logits=True, qkv_bias=bias, o_proj_bias=bias
            ),
            intermediate_size=config.integer("intermediate_size"),
            mlp_bias=True,
            gate=GateSpec(
                kind="clamped",
                alpha=config.number("swiglu_alpha", default=1.702),
                limit=config.number("swiglu_limit", default=7.0),
            ),
            experts=MoESpec(num_experts=count, num_experts_per_tok=used),
        )
        for kind, window in windows.items()
    }
    return build_spec(config, name, layers_by_type(kinds, layers), eps=1e-5, rotary=_gpt_oss_rotary(config))


def _gpt_oss_rotary(config: ConfigFields) -> RotaryConfig:
    if config.nested("rope_scaling") or config.nested("rope_parameters"):
        return read_rotary(config, GPT_OSS_BASE)
    scaling = RotaryScaling(
        kind="yarn", factor=32.0, truncate=False, attention_factor=yarn_attention_factor(32.0), original_max_position_embeddings=4096
    )
    return RotaryConfig(rope_theta=config.number("rope_theta", default=GPT_OSS_BASE), scaling=scaling)


def deepseek_v3(config: ConfigFields, name: str) -> ModelSpec:
    """Read DeepSeek-V3: layers of latent attention with plain feed-forwards; mixtures (sigmoid scores, a shared
    expert) are not read."""
    refuse_unsupported(config, "DeepseekV3ForCausalLM")
    refuse_activation(config, "hidden_act", "silu")
    refuse_sliding_windows(config, "DeepSeek-V3")
    layers, dense = read_num_layers(config), config.integer("first_k_dense_replace", default=3, minimum=0)
    if dense < layers:
        right = f"at least num_hidden_layers ({layers}): DeepSeek's mixtures of experts are not carried out"
        raise config.invalid("first_k_dense_replace", dense, right)
    bias = config.boolean("attention_bias")
    plain, turned = config.integer("qk_nope_head_dim", default=128), config.integer("qk_rope_head_dim", default=64)
    if turned % 2:
        raise config.invalid("qk_rope_head_dim", turned, "even, because rotary turns pairs")
    latent = config.integer("q_lora_rank", default=None) if "q_lora_rank" in config.values else 1536
    if bias and latent is None:
        raise config.invalid("attention_bias", bias, "false where q_lora_rank is null")
    gain = yarn_score_factor(config)
    attention = MLASpec(
        num_heads=config.integer("num_attention_heads"),
        kv_lora_rank=config.integer("kv_lora_rank", default=512),
        qk_rope_head_dim=turned,
        qk_nope_head_dim=plain,
        v_head_dim=config.integer("v_head_dim", default=128),
        q_lora_rank=latent,
        scale=None if gain == 1 else (plain + turned) ** -0.5 * gain,
        rope_interleave=config.boolean("rope_interleave", default=True),
        qkv_bias=bias,
        o_proj_bias=bias,
    )
    layer = LayerSpec(attention=attention, intermediate_size=config.integer("intermediate_size"))
    return build_spec(config, name, (layer,) * layers)
