"""Read Hugging Face configs as model specs: Mistral, Qwen 3, Gemma, gpt-oss and their relatives.

- Llama's block and its relatives: Mistral with a window, Qwen 3 with normed queries and keys.
- Gemma 2, 3 and 3n (Google, 2024 and 2025): norms around both parts, alternating windows, scaled embeddings.
- A mixture of experts or a compressed cache: gpt-oss (OpenAI, 2025) and DeepSeek-V3 (2024).
"""

from __future__ import annotations

from typing import Any

from workbench.model.attention_spec import AttentionSpec, QKNormSpec, RotaryConfig, RotaryScaling
from workbench.model.hf.family_fields import (
    FULL,
    SLIDING,
    build_spec,
    layers_by_type,
    read_heads,
    read_layer_types,
    read_num_layers,
    read_softcap,
    read_window,
    refuse_activation,
    refuse_sliding_windows,
    refuse_unsupported,
)
from workbench.model.hf.fields import ConfigFields
from workbench.model.hf.rotary import read_layer_rotary, read_rotary, yarn_attention_factor
from workbench.model.spec import ActivationSpec, AltUpSpec, LayerSpec, ModelSpec, MoESpec, NormSpec

CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
GPT_OSS_BASE = 150_000.0


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
    """Read Mistral 7B (Jiang et al., 2023). Later versions have no window: `sliding_window` is null."""
    refuse_unsupported(config, "MistralForCausalLM")
    refuse_activation(config, "hidden_act", "silu")
    window = config.integer("sliding_window", default=None) if "sliding_window" in config.values else 4096
    kinds, right = config.get("layer_types"), FULL if window is None else SLIDING
    if kinds is not None and (not isinstance(kinds, list) or any(kind != right for kind in kinds)):
        raise config.invalid("layer_types", kinds, f'absent, or "{right}" for every layer, as sliding_window says')
    attention = AttentionSpec(**read_heads(config), sliding_window=window)
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
                **read_heads(config, dim=128),
                sliding_window=sliding,
                qk_norm=QKNormSpec(),
                qkv_bias=bias,
                o_proj_bias=bias,
            ),
            intermediate_size=config.integer("intermediate_size"),
        )
        for kind, sliding in ((FULL, None), (SLIDING, window))
    }
    return build_spec(config, name, layers_by_type(kinds, of_kind))


def gemma2(config: ConfigFields, name: str) -> ModelSpec:
    """Read Gemma 2: windows in every other layer, from the first on; scores and logits are capped."""
    refuse_unsupported(config, "Gemma2ForCausalLM", CAPS)
    rotary = read_rotary(config)
    kinds = read_layer_types(config, period=2)
    more = {"softcap": read_softcap(config, "attn_logit_softcapping", 50.0)}
    return _gemma(config, name, kinds, {FULL: rotary, SLIDING: rotary}, read_softcap(config, CAPS[1], 30.0), more)


def gemma3_text(config: ConfigFields, name: str) -> ModelSpec:
    """Read Gemma 3: windows in five of six layers, with another rope_theta; normalized queries and keys."""
    refuse_unsupported(config, "Gemma3ForCausalLM", CAPS)
    kinds = read_layer_types(config, period=config.integer("sliding_window_pattern", default=6))
    rotaries = {
        FULL: read_layer_rotary(config, FULL, "rope_theta", 1_000_000.0, old_scaling=True),
        SLIDING: read_layer_rotary(config, SLIDING, "rope_local_base_freq", 10_000.0, old_scaling=False),
    }
    if read_softcap(config, "attn_logit_softcapping", 0.0):
        raise config.invalid(CAPS[0], config.get(CAPS[0]), "null: transformers does not apply it either")
    return _gemma(config, name, kinds, rotaries, read_softcap(config, CAPS[1], 0.0), {"qk_norm": QKNormSpec()})


def gemma3n_text(config: ConfigFields, name: str) -> ModelSpec:
    """Read the text part of Gemma 3n (2025): several residual streams, an additional input for each layer, sparse
    gates. The last layers read the keys and values of an earlier layer, the last one of their kind with its own."""
    refuse_unsupported(config, "Gemma3nForCausalLM", CAPS[1:])
    refuse_activation(config, "hidden_activation", "gelu_pytorch_tanh")
    kinds = read_layer_types(config, period=5)
    rotaries = {
        FULL: read_layer_rotary(config, FULL, "rope_theta", 1_000_000.0, old_scaling=True),
        SLIDING: read_layer_rotary(config, SLIDING, "rope_local_base_freq", 10_000.0, old_scaling=False),
    }
    shared = config.integer("num_kv_shared_layers", default=15, minimum=0)
    own = kinds[: max(0, len(kinds) - shared)]
    if shared and set(own) != set(kinds):
        raise config.invalid("num_kv_shared_layers", shared, "small enough to leave a layer of each kind before them")
    widths = [each.integer("intermediate_size") for each in _by_layer(config, "intermediate_size", 16_384, len(kinds))]
    sparse = [0.95 if index < 10 < len(kinds) else 0.0 for index in range(len(kinds))]
    patterns = _by_layer(config, "activation_sparsity_pattern", sparse, len(kinds))
    shares = [each.number("activation_sparsity_pattern", zero=True) for each in patterns]
    bias, window = config.boolean("attention_bias"), read_window(config, 512)
    layers = []
    for index, kind in enumerate(kinds):
        source = None if index < len(own) else len(own) - 1 - own[::-1].index(kind)
        attention = AttentionSpec(
            **read_heads(config, dim=256), sliding_window=window if kind == SLIDING else None, scale=1.0,
            rotary=None if kind == FULL else rotaries[kind], qk_norm=QKNormSpec(), value_norm=source is None,
            kv_shared_with=source, qkv_bias=bias, o_proj_bias=bias,
        )  # fmt: skip
        activation = ActivationSpec(kind="gelu_tanh", sparsity=shares[index])
        layers.append(
            LayerSpec(attention=attention, intermediate_size=widths[index], activation=activation, norms="both")
        )
    width = config.integer("hidden_size")
    altup = AltUpSpec(
        streams=config.integer("altup_num_inputs", default=4),
        active=config.integer("altup_active_idx", default=0, minimum=0),
        scales_active=config.boolean("altup_correct_scale", default=True),
        low_rank=config.integer("laurel_rank", default=64),
        input_columns=config.integer("hidden_size_per_layer_input", default=256),
        input_vocab_size=config.integer("vocab_size_per_layer_input", default=262_144),
    )
    return build_spec(
        config, name, tuple(layers), tied=True, rotary=rotaries[FULL], embedding_scale=width**0.5, altup=altup,
        final_logit_softcapping=read_softcap(config, CAPS[1], 30.0),
    )  # fmt: skip


def _by_layer(config: ConfigFields, key: str, default: Any, layers: int) -> list[ConfigFields]:
    """Return a field's value for each layer: from a list, or the same for all; `default` is the family's."""
    values = default if config.get(key) is None else config.get(key)
    values = values if isinstance(values, list) else [values] * layers
    if len(values) != layers:
        raise config.invalid(key, values, f"a number, or a list of {layers} numbers")
    return [ConfigFields({key: value}, config.source) for value in values]


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
                sliding_window=windows[kind],
                scale=config.number("query_pre_attn_scalar", default=256.0) ** -0.5,
                rotary=None if rotary == model else rotary,
                qkv_bias=bias,
                o_proj_bias=bias,
                **more,
            ),
            intermediate_size=config.integer("intermediate_size"),
            activation=ActivationSpec(kind="gelu_tanh"),
            norms="both",
        )
        for kind, rotary in rotaries.items()
    }
    return build_spec(
        config,
        name,
        layers_by_type(kinds, layers),
        tied=True,
        rotary=model,
        norm=NormSpec(eps=config.number("rms_norm_eps", default=1e-6), offset=1.0),
        embedding_scale=config.integer("hidden_size") ** 0.5,
        final_logit_softcapping=final_logit_softcapping,
    )


def gpt_oss(config: ConfigFields, name: str) -> ModelSpec:
    """Read gpt-oss: windows in every other layer, from the first on; a learned sink logit for each head."""
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
                **read_heads(config, dim=64), sliding_window=window, sink_logits=True, qkv_bias=bias, o_proj_bias=bias
            ),
            intermediate_size=config.integer("intermediate_size"),
            mlp_bias=True,
            activation=ActivationSpec(
                kind="clamped",
                alpha=config.number("swiglu_alpha", default=1.702),
                limit=config.number("swiglu_limit", default=7.0),
            ),
            experts=MoESpec(num_experts=count, num_experts_per_tok=used, router_bias=True),
        )
        for kind, window in windows.items()
    }
    return build_spec(config, name, layers_by_type(kinds, layers), eps=1e-5, rotary=_gpt_oss_rotary(config))


def _gpt_oss_rotary(config: ConfigFields) -> RotaryConfig:
    if config.nested("rope_scaling") or config.nested("rope_parameters"):
        return read_rotary(config, GPT_OSS_BASE)
    scaling = RotaryScaling(
        kind="yarn",
        factor=32.0,
        truncate=False,
        attention_factor=yarn_attention_factor(32.0),
        original_max_position_embeddings=4096,
    )
    return RotaryConfig(rope_theta=config.number("rope_theta", default=GPT_OSS_BASE), scaling=scaling)
