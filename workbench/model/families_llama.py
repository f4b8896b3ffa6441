"""Llama's block and its relatives: Mistral with a window, Qwen 3 with normed queries and keys."""

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
)
from workbench.model.spec import Attention, LayerKind, ModelSpec


def llama(config: Fields, name: str) -> ModelSpec:
    refuse_what_is_not_carried_out(config, "LlamaForCausalLM")
    refuse_activation(config, "hidden_act", "silu")
    refuse_windows(config, "Llama")
    bias = config.boolean("attention_bias")
    layer = LayerKind(
        attention=Attention(**heads_of(config), input_bias=bias, output_bias=bias),
        hidden=config.integer("intermediate_size"),
        feedforward_bias=config.boolean("mlp_bias"),
    )
    return model_of(config, name, (layer,) * layers_of(config))


def mistral(config: Fields, name: str) -> ModelSpec:
    """Read Mistral 7B (Jiang et al., 2023); later versions have no window: `sliding_window` is null."""
    refuse_what_is_not_carried_out(config, "MistralForCausalLM")
    refuse_activation(config, "hidden_act", "silu")
    window = config.integer("sliding_window", default=None) if "sliding_window" in config.values else 4096
    kinds, right = config.get("layer_types"), FULL if window is None else SLIDING
    if kinds is not None and (not isinstance(kinds, list) or any(kind != right for kind in kinds)):
        raise config.wrong("layer_types", kinds, f'absent, or "{right}" for every layer, as sliding_window says')
    attention = Attention(**heads_of(config), window=window)
    layer = LayerKind(attention=attention, hidden=config.integer("intermediate_size"))
    return model_of(config, name, (layer,) * layers_of(config))


def qwen3(config: Fields, name: str) -> ModelSpec:
    """Read Qwen 3 (2025). With `use_sliding_window` the layers from `max_window_layers` on have windows."""
    refuse_what_is_not_carried_out(config, "Qwen3ForCausalLM")
    refuse_activation(config, "hidden_act", "silu")
    bias, layers = config.boolean("attention_bias"), layers_of(config)
    window = config.integer("sliding_window", default=4096) if config.boolean("use_sliding_window") else None
    first = config.integer("max_window_layers", default=28, least=0)
    kinds = tuple(FULL if window is None or index < first else SLIDING for index in range(layers))
    if config.get("layer_types") is not None:
        kinds = layer_types_of(config, period=1)
    of_kind = {
        kind: LayerKind(
            attention=Attention(
                **heads_of(config, dim=128), window=sliding, qk_norm=True, input_bias=bias, output_bias=bias
            ),
            hidden=config.integer("intermediate_size"),
        )
        for kind, sliding in ((FULL, None), (SLIDING, window))
    }
    return model_of(config, name, by_kind(kinds, of_kind))
