"""Read configs of architectures near Llama's, with root-mean-square norms and one feed-forward in each layer; each
function names its source.

Each function lists the differences from Llama's block: biases, norms, rotary, windows, scales.
"""

from __future__ import annotations

from typing import Any

from workbench.model.attention_spec import AttentionSpec, QKNormSpec, QueryTemperature
from workbench.model.hf.family_fields import (
    FULL,
    SLIDING,
    build_spec,
    layers_by_type,
    one_kind,
    read_activation,
    read_heads,
    read_layer_types,
    read_num_layers,
    read_window,
    refuse_activation,
    refuse_others,
    refuse_unsupported,
)
from workbench.model.hf.fields import ConfigFields
from workbench.model.hf.rotary import read_layer_rotary, read_rotary, read_rotated_columns
from workbench.model.spec import ActivationSpec, LayerSpec, ModelSpec, NormSpec


def qwen2(config: ConfigFields, name: str) -> ModelSpec:
    """Read Qwen 2 and 2.5 (Yang et al., 2024): biases on queries, keys and values; the later layers may have
    windows.
    """
    refuse_unsupported(config, "Qwen2ForCausalLM")
    layers = read_num_layers(config)
    window = config.integer("sliding_window", default=4096) if config.boolean("use_sliding_window") else None
    first = config.integer("max_window_layers", default=28, minimum=0)
    kinds = tuple(FULL if window is None or index < first else SLIDING for index in range(layers))
    if window is not None and config.get("layer_types") is not None:
        kinds = read_layer_types(config, period=1)
    of_kind = {
        kind: LayerSpec(
            attention=AttentionSpec(**read_heads(config), sliding_window=sliding, qkv_bias=True),
            intermediate_size=config.integer("intermediate_size"),
            activation=read_activation(config, "hidden_act", "silu"),
        )
        for kind, sliding in ((FULL, None), (SLIDING, window))
    }
    return build_spec(config, name, layers_by_type(kinds, of_kind))


def phi3(config: ConfigFields, name: str) -> ModelSpec:
    """Read Phi 3 and 4 (Abdin et al., 2024): fused projections, a window, part of each head rotated, LongRoPE."""
    heads, rotaries = read_heads(config), {}
    for key in ("rope_scaling", "rope_parameters"):
        inner = config.nested(key)
        kind = None if inner is None else inner.get("rope_type") or inner.get("type")
        if inner is not None and kind in ("su", "yarn"):  # early names of LongRoPE
            rotaries[key] = {**inner.values, "rope_type": "longrope"}
        elif inner is not None and kind not in (None, "default", "longrope"):
            raise inner.invalid("rope_type", kind, "default or longrope: Phi 3 has no others")
    config = ConfigFields({**config.values, **rotaries}, config.source)
    window = config.integer("sliding_window", default=None)
    columns = read_rotated_columns(config, heads["head_dim"], 1.0)
    attention = {**heads, "sliding_window": window, "rotated_columns": columns}
    return one_kind(
        config, name, "Phi3ForCausalLM", attention, eps=1e-5, rotary=read_rotary(config, reads_partial=True)
    )


def olmo2(config: ConfigFields, name: str) -> ModelSpec:
    """Read OLMo 2 (2025): norms after each part, and over all queries and all keys."""
    bias = config.boolean("attention_bias")
    attention = {"qkv_bias": bias, "o_proj_bias": bias, "qk_norm": QKNormSpec(over="projection")}
    rotary = read_rotary(config)
    return one_kind(config, name, "Olmo2ForCausalLM", attention, {"norms": "post"}, eps=1e-5, rotary=rotary)


def olmo3(config: ConfigFields, name: str) -> ModelSpec:
    """Read OLMo 3 (2025): OLMo 2 with windows in three of four layers; only full layers scale their rotary."""
    refuse_unsupported(config, "Olmo3ForCausalLM")
    bias, kinds = config.boolean("attention_bias"), read_layer_types(config, period=4)
    refuse_others(config, rope_local_base_freq=())
    if config.nested("rope_parameters") is None:  # versions of transformers differ in the base of windowed layers
        refuse_others(config, rope_theta=(500_000, 500_000.0))
    rotaries = {
        FULL: read_layer_rotary(config, FULL, "rope_theta", 500_000.0, old_scaling=True),
        SLIDING: read_layer_rotary(config, SLIDING, "rope_local_base_freq", 500_000.0, old_scaling=False),
    }
    layers = {
        kind: LayerSpec(
            attention=AttentionSpec(
                **read_heads(config), qkv_bias=bias, o_proj_bias=bias, qk_norm=QKNormSpec(over="projection"),
                sliding_window=read_window(config, 4096) if kind == SLIDING else None,
                rotary=None if rotary == rotaries[FULL] else rotary,
            ),
            intermediate_size=config.integer("intermediate_size"),
            activation=read_activation(config, "hidden_act", "silu"),
            norms="post",
        )
        for kind, rotary in rotaries.items()
    }  # fmt: skip
    return build_spec(config, name, layers_by_type(kinds, layers), eps=1e-5, rotary=rotaries[FULL])


def granite(config: ConfigFields, name: str) -> ModelSpec:
    """Read Granite 3 (IBM, 2024): multipliers of embedding, scores, residual and logits."""
    bias = config.boolean("attention_bias")
    attention = {"qkv_bias": bias, "o_proj_bias": bias, "scale": config.number("attention_multiplier", default=1.0)}
    return one_kind(
        config,
        name,
        "GraniteForCausalLM",
        attention,
        {"mlp_bias": config.boolean("mlp_bias")},
        **granite_scales(config),
    )


def granite_scales(config: ConfigFields) -> dict[str, Any]:
    return {
        "embedding_scale": config.number("embedding_multiplier", default=1.0),
        "residual_scale": config.number("residual_multiplier", default=1.0),
        "logit_scale": 1 / config.number("logits_scaling", default=1.0),
    }


def gemma(config: ConfigFields, name: str) -> ModelSpec:
    """Read Gemma (Google, 2024): norms multiply by 1 + weight, embeddings are scaled, and "gelu" means its tanh
    form.
    """
    bias = config.boolean("attention_bias")
    attention = {**read_heads(config, dim=256), "qkv_bias": bias, "o_proj_bias": bias}
    for key in ("hidden_act", "hidden_activation"):
        refuse_others(config, **{key: ("gelu", "gelu_pytorch_tanh", "gelu_new", "gelu_fast")})
    return one_kind(
        config, name, "GemmaForCausalLM", attention, {"activation": ActivationSpec(kind="gelu_tanh")},
        norm=NormSpec(eps=config.number("rms_norm_eps", default=1e-6), offset=1.0), tied=True,
        embedding_scale=config.integer("hidden_size") ** 0.5,
    )  # fmt: skip


def glm(config: ConfigFields, name: str, architecture: str = "GlmForCausalLM", norms: str = "pre") -> ModelSpec:
    """Read GLM 4 9B (Zhipu, 2024): half of each head rotated, in interleaved pairs; fused gate and up."""
    heads = read_heads(config, dim=128)
    columns = read_rotated_columns(config, heads["head_dim"], 0.5)
    attention = {**heads, "qkv_bias": config.boolean("attention_bias", default=True), "rotated_columns": columns}
    rotary = read_rotary(config, reads_partial=True)
    return one_kind(config, name, architecture, attention, {"norms": norms}, eps=1.5625e-07, rotary=rotary)


def glm4(config: ConfigFields, name: str) -> ModelSpec:
    """Read GLM 4 of 2025: GLM with norms after each part too."""
    return glm(config, name, "Glm4ForCausalLM", "both")


def smollm3(config: ConfigFields, name: str) -> ModelSpec:
    """Read SmolLM 3 (Hugging Face, 2025): each fourth layer has no positions."""
    refuse_unsupported(config, "SmolLM3ForCausalLM")
    layers, bias = read_num_layers(config), config.boolean("attention_bias")
    interval = config.integer("no_rope_layer_interval", default=4)
    rotated = config.get("no_rope_layers") or [int((index + 1) % interval != 0) for index in range(layers)]
    if not isinstance(rotated, list) or len(rotated) != layers or any(each not in (0, 1) for each in rotated):
        raise config.invalid("no_rope_layers", rotated, f"a list of {layers} times 0 or 1")
    window = config.integer("sliding_window", default=None) if config.boolean("use_sliding_window") else None
    kinds = tuple(FULL if window is None or each else SLIDING for each in rotated)
    if config.get("layer_types") is not None:
        kinds = read_layer_types(config, period=1)
        if window is None and SLIDING in kinds:
            raise config.invalid("layer_types", list(kinds), "without windows where use_sliding_window is false")
    found = tuple(
        LayerSpec(
            attention=AttentionSpec(
                **read_heads(config), qkv_bias=bias, o_proj_bias=bias, position="rotary" if rotates else "none",
                sliding_window=window if kind == SLIDING else None,
            ),
            intermediate_size=config.integer("intermediate_size"),
            activation=read_activation(config, "hidden_act", "silu"),
            mlp_bias=config.boolean("mlp_bias"),
        )
        for rotates, kind in zip(rotated, kinds, strict=True)
    )  # fmt: skip
    return build_spec(config, name, found, tied=True, rotary=read_rotary(config, 2_000_000.0))


def arcee(config: ConfigFields, name: str) -> ModelSpec:
    """Read AFM (Arcee, 2025): Llama with squared ReLU in a plain feed-forward."""
    bias = config.boolean("attention_bias")
    layer = {
        "activation": read_activation(config, "hidden_act", "relu2", gated=False),
        "mlp_bias": config.boolean("mlp_bias"),
    }
    return one_kind(config, name, "ArceeForCausalLM", {"qkv_bias": bias, "o_proj_bias": bias}, layer, eps=1e-5)


def exaone4(config: ConfigFields, name: str) -> ModelSpec:
    """Read EXAONE 4 (LG, 2025): norms after each part, normed heads; full layers among windows have no positions."""
    refuse_unsupported(config, "Exaone4ForCausalLM")
    layers = read_num_layers(config)
    window = config.integer("sliding_window", default=4096) if "sliding_window" in config.values else 4096
    if "sliding_window" in config.values and config.get("sliding_window") is None:
        window = None
    kinds = (FULL,) * layers if window is None else _exaone4_kinds(config, layers)
    of_kind = {
        kind: LayerSpec(
            attention=AttentionSpec(
                **read_heads(config), qk_norm=QKNormSpec(), sliding_window=window if kind == SLIDING else None,
                position="rotary" if window is None or kind == SLIDING else "none",
            ),
            intermediate_size=config.integer("intermediate_size"),
            activation=read_activation(config, "hidden_act", "silu"),
            norms="post",
        )
        for kind in (FULL, SLIDING)
    }  # fmt: skip
    return build_spec(config, name, layers_by_type(kinds, of_kind), eps=1e-5)


def _exaone4_kinds(config: ConfigFields, layers: int) -> tuple[str, ...]:
    """Read `layer_types`; without it the pattern: every n-th layer is full, or letters L and G (global), repeated, with
    the last layer global."""
    pattern = config.values.get("sliding_window_pattern", 4)
    if config.get("layer_types") is not None:
        return read_layer_types(config, period=1)
    if not isinstance(pattern, str):
        if pattern is None:
            raise config.invalid("sliding_window_pattern", pattern, "a number or a pattern where there are windows")
        return read_layer_types(config, config.integer("sliding_window_pattern", default=4))
    if not pattern or set(pattern) - {"L", "G"}:
        raise config.invalid("sliding_window_pattern", pattern, 'letters "L" (windows) and "G" (full)')
    kinds = [SLIDING if pattern[index % len(pattern)] == "L" else FULL for index in range(layers)]
    return (*kinds[:-1], FULL)


def hunyuan_v1_dense(config: ConfigFields, name: str) -> ModelSpec:
    """Read Hunyuan (Tencent, 2025): heads are normed after rotary."""
    bias = config.boolean("attention_bias")
    refuse_others(config, use_qk_norm=(True,), use_cla=(False,), norm_type=("rms",), num_experts=(1,))
    attention = {"qkv_bias": bias, "o_proj_bias": bias, "qk_norm": QKNormSpec(after_rotary=True)}
    return one_kind(config, name, "HunYuanDenseV1ForCausalLM", attention, reads=("use_qk_norm",), eps=1e-5)


def ernie4_5(config: ConfigFields, name: str) -> ModelSpec:
    """Read ERNIE 4.5 (Baidu, 2025): interleaved rotary pairs, and one `use_bias` for all projections."""
    refuse_others(config, compression_ratio=(1, 1.0))
    bias = config.boolean("use_bias")
    attention = {**read_heads(config, dim=128), "qkv_bias": bias, "o_proj_bias": bias}
    rotary = read_rotary(config, 500_000.0)
    return one_kind(
        config, name, "Ernie4_5ForCausalLM", attention, {"mlp_bias": bias}, eps=1e-5, tied=True, rotary=rotary
    )


def seed_oss(config: ConfigFields, name: str) -> ModelSpec:
    """Read Seed-OSS (ByteDance, 2025): biases on queries, keys and values."""
    attention = {
        **read_heads(config, dim=128),
        "qkv_bias": config.boolean("attention_bias", default=True),
        "o_proj_bias": config.boolean("attention_out_bias"),
    }
    return one_kind(config, name, "SeedOssForCausalLM", attention, {"mlp_bias": config.boolean("mlp_bias")})


def helium(config: ConfigFields, name: str) -> ModelSpec:
    """Read Helium (Kyutai, 2025): interleaved rotary pairs."""
    attention = {**read_heads(config, dim=128), "qkv_bias": config.boolean("attention_bias")}
    rotary = read_rotary(config, 100_000.0)
    return one_kind(
        config, name, "HeliumForCausalLM", attention, {"mlp_bias": config.boolean("mlp_bias")}, eps=1e-8, rotary=rotary
    )


def ministral(config: ConfigFields, name: str) -> ModelSpec:
    """Read Ministral (Mistral, 2024): windows in some layers."""
    refuse_unsupported(config, "MinistralForCausalLM")
    kinds = config.get("layer_types")
    window = config.integer("sliding_window", default=None) if "sliding_window" in config.values else 4096
    plain = (FULL if window is None else SLIDING,) * read_num_layers(config)
    kinds = plain if kinds is None else read_layer_types(config, period=1)
    if window is None and SLIDING in kinds:
        raise config.invalid("sliding_window", None, f'a length, because layer_types has "{SLIDING}"')
    layers = {
        kind: LayerSpec(
            attention=AttentionSpec(**read_heads(config), sliding_window=window if kind == SLIDING else None),
            intermediate_size=config.integer("intermediate_size"),
            activation=read_activation(config, "hidden_act", "silu"),
        )
        for kind in (FULL, SLIDING)
    }
    return build_spec(config, name, layers_by_type(kinds, layers))


def ministral3(config: ConfigFields, name: str) -> ModelSpec:
    """Read Ministral 3 (Mistral, 2025): YaRN, and late queries whose scores have a temperature."""
    published = {
        "rope_type": "yarn", "rope_theta": 1_000_000.0, "factor": 16.0, "original_max_position_embeddings": 16384,
        "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
    }  # fmt: skip
    refuse_others(config, rope_scaling=())
    inner = config.nested("rope_parameters") or ConfigFields(published, f"{config.source}: rope_parameters")
    floor = inner.integer("original_max_position_embeddings")
    temperature = QueryTemperature(strength=inner.number("llama_4_scaling_beta"), floor=floor)
    rotary = {key: value for key, value in inner.values.items() if key != "llama_4_scaling_beta"}
    config = ConfigFields({**config.values, "rope_parameters": rotary}, config.source)
    window = config.integer("sliding_window", default=None)
    attention = {**read_heads(config, 128), "sliding_window": window, "temperature": temperature}
    return one_kind(config, name, "Ministral3ForCausalLM", attention, eps=1e-5, rotary=read_rotary(config))


def apertus(config: ConfigFields, name: str) -> ModelSpec:
    """Read Apertus (Swiss AI, 2025): normed heads, and feed-forwards without a gate, whose activation has learned
    numbers."""
    bias = config.boolean("attention_bias")
    refuse_activation(config, "hidden_act", "xielu")
    published = {
        "rope_type": "llama3", "rope_theta": 12_000_000.0, "factor": 8.0, "original_max_position_embeddings": 8192,
        "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    }  # fmt: skip
    if config.nested("rope_parameters") is None and config.nested("rope_scaling") is None:
        config = ConfigFields({**config.values, "rope_parameters": published}, config.source)
    attention = {"qkv_bias": bias, "o_proj_bias": bias, "qk_norm": QKNormSpec()}
    layer = {"activation": ActivationSpec(kind="xielu", gated=False)}
    rotary = read_rotary(config, 12_000_000.0)
    return one_kind(config, name, "ApertusForCausalLM", attention, layer, eps=1e-5, rotary=rotary)
