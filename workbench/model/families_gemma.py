"""Gemma 2 and 3 (Google, 2024 and 2025): norms around both parts, alternating windows, scaled embeddings."""

from __future__ import annotations

from typing import Any

from workbench.model.config_fields import Fields
from workbench.model.family_fields import (
    FULL,
    SLIDING,
    by_kind,
    cap,
    heads_of,
    layer_types_of,
    model_of,
    refuse_activation,
    refuse_what_is_not_carried_out,
    window_of,
)
from workbench.model.rotary_config import rotary_from, rotary_of_layers
from workbench.model.spec import Attention, Gate, LayerKind, ModelSpec, Rotary

CAPS = ("attn_logit_softcapping", "final_logit_softcapping")


def gemma2(config: Fields, name: str) -> ModelSpec:
    """Read Gemma 2: windows in every other layer, the first included; scores and logits are capped."""
    refuse_what_is_not_carried_out(config, "Gemma2ForCausalLM", CAPS)
    rotary = rotary_from(config)
    kinds = layer_types_of(config, period=2)
    more = {"softcap": cap(config, "attn_logit_softcapping", 50.0)}
    return _gemma(config, name, kinds, {FULL: rotary, SLIDING: rotary}, cap(config, CAPS[1], 30.0), more)


def gemma3_text(config: Fields, name: str) -> ModelSpec:
    """Read Gemma 3: windows in five of six layers, which have another rope_theta; queries and keys are normed."""
    refuse_what_is_not_carried_out(config, "Gemma3ForCausalLM", CAPS)
    kinds = layer_types_of(config, period=config.integer("sliding_window_pattern", default=6))
    rotaries = {
        FULL: rotary_of_layers(config, FULL, "rope_theta", 1_000_000.0, old_scaling=True),
        SLIDING: rotary_of_layers(config, SLIDING, "rope_local_base_freq", 10_000.0, old_scaling=False),
    }
    if cap(config, "attn_logit_softcapping", 0.0):
        raise config.wrong(CAPS[0], config.get(CAPS[0]), "null: transformers does not carry it out either")
    return _gemma(config, name, kinds, rotaries, cap(config, CAPS[1], 0.0), {"qk_norm": True})


def _gemma(
    config: Fields,
    name: str,
    kinds: tuple[str, ...],
    rotaries: dict[str, Rotary],
    final_softcap: float,
    more: dict[str, Any],
) -> ModelSpec:
    refuse_activation(config, "hidden_activation", "gelu_pytorch_tanh")
    bias, model = config.boolean("attention_bias"), rotaries[FULL]
    windows = {FULL: None, SLIDING: window_of(config, 4096) if SLIDING in kinds else None}
    layers = {
        kind: LayerKind(
            attention=Attention(
                **heads_of(config, dim=256),
                window=windows[kind],
                scale=config.number("query_pre_attn_scalar", default=256.0) ** -0.5,
                rotary=None if rotary == model else rotary,
                input_bias=bias,
                output_bias=bias,
                **more,
            ),
            hidden=config.integer("intermediate_size"),
            gate=Gate(kind="gelu_tanh"),
            post_norms=True,
        )
        for kind, rotary in rotaries.items()
    }
    return model_of(
        config,
        name,
        by_kind(kinds, layers),
        tied=True,
        rotary=model,
        norm_offset=1.0,
        embedding_scale=config.integer("hidden_size") ** 0.5,
        final_softcap=final_softcap,
    )
