"""Llama's block and its relatives: Mistral with a window, Qwen 3 with normed queries and keys."""

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
)
from workbench.model.spec import AttentionSpec, LayerSpec, ModelSpec


def llama(config: ConfigFields, name: str) -> ModelSpec:
    refuse_unsupported(config, "LlamaForCausalLM")
    refuse_activation(config, "hidden_act", "silu")
    refuse_sliding_windows(config, "Llama")
    bias = config.boolean("attention_bias")
    layer = LayerSpec(
        attention=AttentionSpec(**read_heads(config), qkv_bias=bias, o_proj_bias=bias),
        intermediate_size=config.integer("intermediate_size"),
        mlp_bias=config.boolean("mlp_bias"),
    )
    return build_spec(config, name, (layer,) * read_num_layers(config))


def mistral(config: ConfigFields, name: str) -> ModelSpec:
    """Read Mistral 7B (Jiang et al., 2023); later versions have no window: `sliding_window` is null."""
    refuse_unsupported(config, "MistralForCausalLM")
    refuse_activation(config, "hidden_act", "silu")
    window = config.integer("sliding_window", default=None) if "sliding_window" in config.values else 4096
    kinds, right = config.get("layer_types"), FULL if window is None else SLIDING
    if kinds is not None and (not isinstance(kinds, list) or any(kind != right for kind in kinds)):
        raise config.invalid("layer_types", kinds, f'absent, or "{right}" for every layer, as sliding_window says')
    attention = AttentionSpec(**read_heads(config), window=window)
    layer = LayerSpec(attention=attention, intermediate_size=config.integer("intermediate_size"))
    return build_spec(config, name, (layer,) * read_num_layers(config))


def qwen3(config: ConfigFields, name: str) -> ModelSpec:
    """Read Qwen 3 (2025). With `use_sliding_window` the layers from `max_window_layers` on have windows."""
    refuse_unsupported(config, "Qwen3ForCausalLM")
    refuse_activation(config, "hidden_act", "silu")
    bias, layers = config.boolean("attention_bias"), read_num_layers(config)
    window = config.integer("sliding_window", default=4096) if config.boolean("use_sliding_window") else None
    first = config.integer("max_window_layers", default=28, minimum=0)
    kinds = tuple(FULL if window is None or index < first else SLIDING for index in range(layers))
    if config.get("layer_types") is not None:
        kinds = read_layer_types(config, period=1)
    of_kind = {
        kind: LayerSpec(
            attention=AttentionSpec(
                **read_heads(config, dim=128), window=sliding, qk_norm=True, qkv_bias=bias, o_proj_bias=bias
            ),
            intermediate_size=config.integer("intermediate_size"),
        )
        for kind, sliding in ((FULL, None), (SLIDING, window))
    }
    return build_spec(config, name, layers_by_type(kinds, of_kind))
