"""Families with a mixture of experts or a compressed cache: gpt-oss (OpenAI, 2025) and DeepSeek-V3 (2024)."""

from __future__ import annotations

from workbench.model.config_fields import Fields
from workbench.model.family_fields import (
    FULL,
    SLIDING,
    by_kind,
    heads_of,
    layer_types_of,
    layers_of,
    model_of,
    refuse_activation,
    refuse_what_is_not_carried_out,
    refuse_windows,
    window_of,
)
from workbench.model.latent_spec import LatentAttention
from workbench.model.rotary_config import rotary_from, yarn_gain, yarn_gain_of_scores
from workbench.model.spec import Attention, Experts, Gate, LayerKind, ModelSpec, Rotary, RotaryScaling

GPT_OSS_BASE = 150_000.0


def gpt_oss(config: Fields, name: str) -> ModelSpec:
    """Read gpt-oss: windows in every other layer, the first included; a learned logit a head that attends
    to nothing."""
    refuse_what_is_not_carried_out(config, "GptOssForCausalLM", ("num_local_experts",))
    refuse_activation(config, "hidden_act", "silu")
    bias = config.boolean("attention_bias", default=True)
    kinds = layer_types_of(config, period=2)
    windows = {FULL: None, SLIDING: window_of(config, 128) if SLIDING in kinds else None}
    count, used = config.integer("num_local_experts", default=128), config.integer("num_experts_per_tok", default=4)
    if used > count:
        raise config.wrong("num_experts_per_tok", used, f"at most num_local_experts ({count})")
    layers = {
        kind: LayerKind(
            attention=Attention(
                **heads_of(config, dim=64), window=window, sink_logits=True, input_bias=bias, output_bias=bias
            ),
            hidden=config.integer("intermediate_size"),
            feedforward_bias=True,
            gate=Gate(
                kind="clamped",
                alpha=config.number("swiglu_alpha", default=1.702),
                limit=config.number("swiglu_limit", default=7.0),
            ),
            experts=Experts(count=count, used=used),
        )
        for kind, window in windows.items()
    }
    return model_of(config, name, by_kind(kinds, layers), eps=1e-5, rotary=_gpt_oss_rotary(config))


def _gpt_oss_rotary(config: Fields) -> Rotary:
    if config.inner("rope_scaling") or config.inner("rope_parameters"):
        return rotary_from(config, GPT_OSS_BASE)
    scaling = RotaryScaling(
        kind="yarn", factor=32.0, whole_pairs=False, amplitude=yarn_gain(32.0), original_context=4096
    )
    return Rotary(base=config.number("rope_theta", default=GPT_OSS_BASE), scaling=scaling)


def deepseek_v3(config: Fields, name: str) -> ModelSpec:
    """Read DeepSeek-V3: layers of latent attention with plain feed-forwards; mixtures (sigmoid scores, a shared
    expert) are not read."""
    refuse_what_is_not_carried_out(config, "DeepseekV3ForCausalLM")
    refuse_activation(config, "hidden_act", "silu")
    refuse_windows(config, "DeepSeek-V3")
    layers, dense = layers_of(config), config.integer("first_k_dense_replace", default=3, least=0)
    if dense < layers:
        right = f"at least num_hidden_layers ({layers}): DeepSeek's mixtures of experts are not carried out"
        raise config.wrong("first_k_dense_replace", dense, right)
    bias = config.boolean("attention_bias")
    plain, turned = config.integer("qk_nope_head_dim", default=128), config.integer("qk_rope_head_dim", default=64)
    if turned % 2:
        raise config.wrong("qk_rope_head_dim", turned, "even, because rotary turns pairs")
    latent = config.integer("q_lora_rank", default=None) if "q_lora_rank" in config.values else 1536
    if bias and latent is None:
        raise config.wrong("attention_bias", bias, "false where q_lora_rank is null")
    gain = yarn_gain_of_scores(config)
    attention = LatentAttention(
        heads=config.integer("num_attention_heads"),
        latent=config.integer("kv_lora_rank", default=512),
        rope_dim=turned,
        plain_dim=plain,
        value_dim=config.integer("v_head_dim", default=128),
        query_latent=latent,
        scale=None if gain == 1 else (plain + turned) ** -0.5 * gain,
        interleaved=config.boolean("rope_interleave", default=True),
        input_bias=bias,
        output_bias=bias,
    )
    layer = LayerKind(attention=attention, hidden=config.integer("intermediate_size"))
    return model_of(config, name, (layer,) * layers)
