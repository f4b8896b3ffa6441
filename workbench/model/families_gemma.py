"""Gemma 2 and 3 (Google, 2024 and 2025): norms around both parts, alternating windows, scaled embeddings."""

from __future__ import annotations

from typing import Any

from workbench.model.config_fields import ConfigFields
from workbench.model.family_fields import (
    FULL,
    SLIDING,
    layers_by_type,
    read_softcap,
    read_heads,
    read_layer_types,
    build_spec,
    refuse_activation,
    refuse_unsupported,
    read_window,
)
from workbench.model.rotary_config import read_rotary, read_layer_rotary
from workbench.model.spec import AttentionSpec, GateSpec, LayerSpec, ModelSpec, RotaryConfig

CAPS = ("attn_logit_softcapping", "final_logit_softcapping")


def gemma2(config: ConfigFields, name: str) -> ModelSpec:
    """Read Gemma 2: windows in every other layer, the first included; scores and logits are capped."""
    refuse_unsupported(config, "Gemma2ForCausalLM", CAPS)
    rotary = read_rotary(config)
    kinds = read_layer_types(config, period=2)
    more = {"softcap": read_softcap(config, "attn_logit_softcapping", 50.0)}
    return _gemma(config, name, kinds, {FULL: rotary, SLIDING: rotary}, read_softcap(config, CAPS[1], 30.0), more)


def gemma3_text(config: ConfigFields, name: str) -> ModelSpec:
    """Read Gemma 3: windows in five of six layers, which have another rope_theta; queries and keys are normed."""
    refuse_unsupported(config, "Gemma3ForCausalLM", CAPS)
    kinds = read_layer_types(config, period=config.integer("sliding_window_pattern", default=6))
    rotaries = {
        FULL: read_layer_rotary(config, FULL, "rope_theta", 1_000_000.0, old_scaling=True),
        SLIDING: read_layer_rotary(config, SLIDING, "rope_local_base_freq", 10_000.0, old_scaling=False),
    }
    if read_softcap(config, "attn_logit_softcapping", 0.0):
        raise config.invalid(CAPS[0], config.get(CAPS[0]), "null: transformers does not carry it out either")
    return _gemma(config, name, kinds, rotaries, read_softcap(config, CAPS[1], 0.0), {"qk_norm": True})


def _gemma(
    config: ConfigFields,
    name: str,
    kinds: tuple[str, ...],
    rotaries: dict[str, RotaryConfig],
    final_logit_softcapping: float,
    more: dict[str, Any],
) -> ModelSpec:
    refuse_activation(config, "hidden_activation", "gelu_pytorch_tanh")
    bias, model = config.boolean("attention_bias"), rotaries[FULL]
    windows = {FULL: None, SLIDING: read_window(config, 4096) if SLIDING in kinds else None}
    layers = {
        kind: LayerSpec(
            attention=AttentionSpec(
                **read_heads(config, dim=256),
                window=windows[kind],
                scale=config.number("query_pre_attn_scalar", default=256.0) ** -0.5,
                rotary=None if rotary == model else rotary,
                qkv_bias=bias,
                o_proj_bias=bias,
                **more,
            ),
            intermediate_size=config.integer("intermediate_size"),
            gate=GateSpec(kind="gelu_tanh"),
            post_norms=True,
        )
        for kind, rotary in rotaries.items()
    }
    return build_spec(
        config,
        name,
        layers_by_type(kinds, layers),
        tied=True,
        rotary=model,
        norm_offset=1.0,
        embedding_scale=config.integer("hidden_size") ** 0.5,
        final_logit_softcapping=final_logit_softcapping,
    )
