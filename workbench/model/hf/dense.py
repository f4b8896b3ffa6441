"""Architectures with one feed-forward a layer, as tables from config.json; each names its source.

A table says what differs from Llama's block: norms, biases, rotary, windows, scales.
"""

from __future__ import annotations

from typing import Any

from workbench.model.hf.family_fields import (
    FULL,
    SLIDING,
    build_spec,
    layer_norm,
    layers_by_type,
    read_activation,
    read_heads,
    read_layer_types,
    read_num_layers,
    read_window,
    refuse_others,
    refuse_unsupported,
    renamed,
    without,
)
from workbench.model.hf.fields import ConfigFields
from workbench.model.hf.rotary import read_layer_rotary, read_rotary, read_rotated_columns
from workbench.model.spec import ActivationSpec, AttentionSpec, LayerSpec, ModelSpec, NormSpec, QKNormSpec

GPT2_NAMES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}


def one_kind(
    config: ConfigFields,
    name: str,
    architecture: str,
    attention: dict[str, Any],
    layer: dict[str, Any] | None = None,
    reads: tuple[str, ...] = (),
    **model: Any,
) -> ModelSpec:
    """Build a model whose layers are all alike.

    Args:
        config: the config.
        name: the model's name.
        architecture: its class in transformers.
        attention: fields of AttentionSpec beside the heads.
        layer: fields of LayerSpec.
        reads: keys of UNSUPPORTED_KEYS that the family reads.
        model: arguments of `build_spec`.
    """
    refuse_unsupported(config, architecture, reads)
    fields = {"intermediate_size": None, "activation": None, **(layer or {})}
    if fields["intermediate_size"] is None:
        fields["intermediate_size"] = config.integer("intermediate_size")
    if fields["activation"] is None:
        fields["activation"] = read_activation(config, "hidden_act", "silu")
    heads = {} if {"num_heads", "num_kv_heads", "head_dim"} <= set(attention) else read_heads(config)
    kind = LayerSpec(attention=AttentionSpec(**{**heads, **attention}), **fields)
    return build_spec(config, name, (kind,) * read_num_layers(config), **model)


def qwen2(config: ConfigFields, name: str) -> ModelSpec:
    """Read Qwen 2 and 2.5 (Yang et al., 2024): biases on queries, keys and values; windows from a layer on."""
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


def phi(config: ConfigFields, name: str) -> ModelSpec:
    """Read Phi 1, 1.5 and 2 (Li et al., 2023): parallel parts under one LayerNorm, half of each head rotated."""
    heads = read_heads(config)
    normed = QKNormSpec(bias=True) if config.boolean("qk_layernorm") else None
    columns = read_rotated_columns(config, heads["head_dim"], 0.5)
    attention = {**heads, "qkv_bias": True, "o_proj_bias": True, "qk_norm": normed, "rotated_columns": columns}
    layer = {
        "activation": read_activation(config, "hidden_act", "gelu_new", gated=False),
        "mlp_bias": True,
        "parallel": "one_norm",
    }
    more = {"norm": layer_norm(config), "rotary": read_rotary(config, reads_partial=True), "head_bias": True}
    return one_kind(config, name, "PhiForCausalLM", attention, layer, **more)


def phi3(config: ConfigFields, name: str) -> ModelSpec:
    """Read Phi 3 and 4 (Abdin et al., 2024): fused projections, a window, part of each head rotated."""
    heads = read_heads(config)
    for inner in (config.nested("rope_scaling"), config.nested("rope_parameters")):
        for key in ("rope_type", "type"):
            refuse_others(inner or config, **{key: ("default",)})  # "yarn" and "su" are LongRoPE here
    window = config.integer("sliding_window", default=None)
    columns = read_rotated_columns(config, heads["head_dim"], 1.0)
    attention = {**heads, "sliding_window": window, "rotated_columns": columns}
    return one_kind(
        config, name, "Phi3ForCausalLM", attention, eps=1e-5, rotary=read_rotary(config, reads_partial=True)
    )


def olmo(config: ConfigFields, name: str) -> ModelSpec:
    """Read OLMo (Groeneveld et al., 2024): LayerNorm without parameters, clamped queries, keys and values."""
    bias = config.boolean("attention_bias")
    clip = config.number("clip_qkv", default=0.0)
    attention = {"qkv_bias": bias, "o_proj_bias": bias, "qkv_clip": clip}
    norm = NormSpec(kind="layer", eps=1e-5, weight=False)
    return one_kind(config, name, "OlmoForCausalLM", attention, norm=norm)


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


COHERE_KEYS: dict[str, tuple[object, ...]] = {
    "layer_norm_bias": (False,), "position_embedding_type": ("rope_gptj",), "rotary_pct": (1.0, 1),
    "use_parallel_block": (True,), "use_gated_activation": (True,),
    "order_of_interleaved_layers": ("local_attn_first",),
}  # fmt: skip


def cohere(config: ConfigFields, name: str) -> ModelSpec:
    """Read Command R (Cohere, 2024): parallel parts under one LayerNorm without bias, interleaved rotary pairs."""
    bias = config.boolean("attention_bias")
    refuse_others(config, **COHERE_KEYS)
    normed = QKNormSpec(weight="per_head") if config.boolean("use_qk_norm") else None
    attention = {"qkv_bias": bias, "o_proj_bias": bias, "qk_norm": normed}
    more = {
        "norm": layer_norm(config, bias=False),
        "rotary": read_rotary(config, 500_000.0),
        "tied": True,
        "logit_scale": config.number("logit_scale", default=0.0625),
    }
    return one_kind(config, name, "CohereForCausalLM", attention, {"parallel": "one_norm"}, ("use_qk_norm",), **more)


def cohere2(config: ConfigFields, name: str) -> ModelSpec:
    """Read Command A (Cohere, 2025): Command R with windows; the full layers have no positions."""
    refuse_unsupported(config, "Cohere2ForCausalLM")
    refuse_others(config, **COHERE_KEYS)
    kinds = read_layer_types(config, period=config.integer("sliding_window_pattern", default=4))
    bias = config.boolean("attention_bias")
    layers = {
        kind: LayerSpec(
            attention=AttentionSpec(
                **read_heads(config), qkv_bias=bias, o_proj_bias=bias,
                sliding_window=read_window(config, 4096) if kind == SLIDING else None,
                position="rotary" if kind == SLIDING else "none",
            ),
            intermediate_size=config.integer("intermediate_size"),
            activation=read_activation(config, "hidden_act", "silu"),
            parallel="one_norm",
        )
        for kind in (FULL, SLIDING)
    }  # fmt: skip
    more = {"norm": layer_norm(config, bias=False), "tied": True}
    scale = config.number("logit_scale", default=0.0625)
    return build_spec(config, name, layers_by_type(kinds, layers), logit_scale=scale, **more)


def gpt2(config: ConfigFields, name: str) -> ModelSpec:
    """Read GPT-2 (Radford et al., 2019): learned positions, LayerNorm, a plain feed-forward, biases everywhere."""
    config = renamed(config, **GPT2_NAMES)
    for key, right in (("scale_attn_by_inverse_layer_idx", False), ("add_cross_attention", False)):
        if config.boolean(key) != right:
            raise config.invalid(key, True, "false: it is not carried out")
    heads = read_heads(config)
    scaled = config.boolean("scale_attn_weights", default=True)
    attention = {**heads, "qkv_bias": True, "o_proj_bias": True, "position": "none", "scale": None if scaled else 1.0}
    layer = {
        "intermediate_size": config.integer("n_inner", default=4 * config.integer("hidden_size")),
        "activation": read_activation(config, "activation_function", "gelu_new", gated=False),
        "mlp_bias": True,
    }
    norm = layer_norm(config, "layer_norm_epsilon")
    return one_kind(config, name, "GPT2LMHeadModel", attention, layer, norm=norm, tied=True, learned_positions=0)


def gptj(config: ConfigFields, name: str) -> ModelSpec:
    """Read GPT-J (Wang and Komatsuzaki, 2021): parallel parts under one norm, interleaved rotary on part of a head."""
    config = renamed(config, **GPT2_NAMES)
    refuse_others(config, rope_theta=(10_000, 10_000.0), rope_scaling=({},), rope_parameters=({},))
    heads = read_heads(config)
    rotated = config.integer("rotary_dim") if "rotary_dim" in config.values else 64
    attention = {**heads, "rotated_columns": None if rotated == heads["head_dim"] else rotated}
    layer = {
        "intermediate_size": config.integer("n_inner", default=4 * config.integer("hidden_size")),
        "activation": read_activation(config, "activation_function", "gelu_new", gated=False),
        "mlp_bias": True,
        "parallel": "one_norm",
    }
    norm = layer_norm(config, "layer_norm_epsilon")
    return one_kind(config, name, "GPTJForCausalLM", attention, layer, norm=norm, head_bias=True)


def gpt_neox(config: ConfigFields, name: str) -> ModelSpec:
    """Read GPT-NeoX and Pythia (Black et al., 2022): parallel parts with a norm each, a quarter of a head rotated."""
    heads = read_heads(without(config, "num_key_value_heads"))
    bias = config.boolean("attention_bias", default=True)
    columns = read_rotated_columns(config, heads["head_dim"], 0.25, ("rotary_pct",))
    attention = {**heads, "qkv_bias": bias, "o_proj_bias": bias, "rotated_columns": columns}
    layer = {
        "activation": read_activation(config, "hidden_act", "gelu", gated=False),
        "mlp_bias": True,
        "parallel": "two_norms" if config.boolean("use_parallel_residual", default=True) else "no",
    }
    base = config.number("rotary_emb_base", default=10_000.0)
    refuse_others(config, rope_theta=(base, int(base)))
    share = config.number("rotary_pct", default=0.25)
    refuse_others(config, partial_rotary_factor=(share, int(share)))
    more = {"norm": layer_norm(config), "rotary": read_rotary(config, base, reads_partial=True)}
    return one_kind(config, name, "GPTNeoXForCausalLM", attention, layer, **more)


def falcon(config: ConfigFields, name: str) -> ModelSpec:
    """Read Falcon (Almazrouei et al., 2023): parallel parts, one or few key/value heads."""
    config = renamed(config, ffn_hidden="ffn_hidden_size")
    heads, width = config.integer("num_attention_heads"), config.integer("hidden_size")
    new, multi_query = config.boolean("new_decoder_architecture"), config.boolean("multi_query", default=True)
    groups = config.integer("num_kv_heads", default=heads) if new else 1 if multi_query else heads
    if config.boolean("alibi"):
        raise config.invalid("alibi", True, "false: Falcon's rounded slopes are not carried out")
    parallel = config.boolean("parallel_attn", default=True)
    if new and not parallel:
        raise config.invalid("parallel_attn", False, "true with new_decoder_architecture")
    refuse_others(config, num_ln_in_parallel_attn=(1, 2) if new else (1,))
    two = parallel and new and config.integer("num_ln_in_parallel_attn", default=2) == 2
    bias = config.boolean("bias")
    attention = {
        "num_heads": heads,
        "num_kv_heads": groups,
        "head_dim": width // heads,
        "qkv_bias": bias,
        "o_proj_bias": bias,
    }
    layer = {
        "intermediate_size": config.integer("ffn_hidden", default=4 * width),
        "activation": read_activation(config, "activation", "gelu", gated=False),
        "mlp_bias": bias,
        "parallel": "two_norms" if two else "one_norm" if parallel else "no",
    }
    norm = layer_norm(config, "layer_norm_epsilon")
    return one_kind(config, name, "FalconForCausalLM", attention, layer, norm=norm, tied=True)


def stablelm(config: ConfigFields, name: str) -> ModelSpec:
    """Read StableLM 2 (Bellagente et al., 2024): LayerNorm, a quarter of each head rotated."""
    heads = read_heads(config)
    normed = QKNormSpec(weight="per_head") if config.boolean("qk_layernorm") else None
    columns = read_rotated_columns(config, heads["head_dim"], 0.25)
    attention = {**heads, "qkv_bias": config.boolean("use_qkv_bias"), "qk_norm": normed, "rotated_columns": columns}
    layer = {"parallel": "one_norm" if config.boolean("use_parallel_residual") else "no"}
    more = {"norm": layer_norm(config), "rotary": read_rotary(config, reads_partial=True)}
    return one_kind(config, name, "StableLmForCausalLM", attention, layer, **more)


def starcoder2(config: ConfigFields, name: str) -> ModelSpec:
    """Read StarCoder 2 (Lozhkov et al., 2024): LayerNorm, a plain feed-forward, a window, biases everywhere."""
    refuse_others(config, norm_type=("layer_norm",), mlp_type=("default",))
    bias = config.boolean("use_bias", default=True)
    window = config.integer("sliding_window", default=None)
    attention = {"qkv_bias": bias, "o_proj_bias": bias, "sliding_window": window}
    layer = {
        "activation": read_activation(config, "hidden_act", "gelu_pytorch_tanh", gated=False),
        "mlp_bias": bias,
    }
    norm = layer_norm(config, "norm_epsilon")
    return one_kind(config, name, "Starcoder2ForCausalLM", attention, layer, norm=norm, tied=True)


def gemma(config: ConfigFields, name: str) -> ModelSpec:
    """Read Gemma (Google, 2024): weights of norms are added to 1, embeddings scaled; its "gelu" is the one by tanh."""
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
                **read_heads(config), qkv_bias=bias, o_proj_bias=bias, position="rotary" if turned else "none",
                sliding_window=window if kind == SLIDING else None,
            ),
            intermediate_size=config.integer("intermediate_size"),
            activation=read_activation(config, "hidden_act", "silu"),
            mlp_bias=config.boolean("mlp_bias"),
        )
        for turned, kind in zip(rotated, kinds, strict=True)
    )  # fmt: skip
    return build_spec(config, name, found, tied=True, rotary=read_rotary(config, 2_000_000.0))


def nemotron(config: ConfigFields, name: str) -> ModelSpec:
    """Read Nemotron 4 and Minitron (NVIDIA, 2024): LayerNorm with weights added to 1, squared ReLU, half rotated."""
    heads, bias = read_heads(config), config.boolean("attention_bias")
    columns = read_rotated_columns(config, heads["head_dim"], 0.5)
    attention = {**heads, "qkv_bias": bias, "o_proj_bias": bias, "rotated_columns": columns}
    layer = {
        "activation": read_activation(config, "hidden_act", "relu2", gated=False),
        "mlp_bias": config.boolean("mlp_bias"),
    }
    norm = NormSpec(kind="layer", eps=config.number("norm_eps", default=1e-5), offset=1.0, bias=True)
    rotary = read_rotary(config, reads_partial=True)
    return one_kind(config, name, "NemotronForCausalLM", attention, layer, norm=norm, rotary=rotary)


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
    """Read ERNIE 4.5 (Baidu, 2025): interleaved rotary pairs, one `use_bias`."""
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


def opt(config: ConfigFields, name: str) -> ModelSpec:
    """Read OPT (Zhang et al., 2022): positions learned from row 2 on, ReLU, norms before each part."""
    width = config.integer("hidden_size")
    if config.integer("word_embed_proj_dim", default=width) != width:
        raise config.invalid("word_embed_proj_dim", config.get("word_embed_proj_dim"), f"hidden_size ({width})")
    for key, right in (("do_layer_norm_before", True), ("_remove_final_layer_norm", False),
                       ("layer_norm_elementwise_affine", True)):  # fmt: skip
        if config.boolean(key, default=right) != right:
            raise config.invalid(key, not right, f"{str(right).lower()}: the other is not carried out")
    bias = config.boolean("enable_bias", default=True)
    heads = read_heads(without(config, "num_key_value_heads"))
    attention = {**heads, "qkv_bias": bias, "o_proj_bias": bias, "position": "none"}
    layer = {
        "intermediate_size": config.integer("ffn_dim"),
        "activation": read_activation(config, "activation_function", "relu", gated=False),
        "mlp_bias": bias,
    }
    norm = NormSpec(kind="layer", eps=1e-5, bias=True)
    return one_kind(config, name, "OPTForCausalLM", attention, layer, norm=norm, tied=True, learned_positions=2)


def bloom(config: ConfigFields, name: str) -> ModelSpec:
    """Read BLOOM (Le Scao et al., 2022): ALiBi, normed embeddings, biases everywhere."""
    config = renamed(config, num_hidden_layers="n_layer", num_attention_heads="n_head", hidden_size="n_embed")
    values = {"max_position_embeddings": config.get("seq_length") or 2048, **config.values}
    config = ConfigFields(values, config.source)
    if config.boolean("apply_residual_connection_post_layernorm"):
        raise config.invalid("apply_residual_connection_post_layernorm", True, "false: it is not carried out")
    attention = {**read_heads(config), "qkv_bias": True, "o_proj_bias": True, "position": "alibi"}
    width = config.integer("hidden_size")
    plain = ConfigFields({}, config.source)
    layer = {
        "intermediate_size": 4 * width,
        "activation": read_activation(plain, "hidden_act", "gelu_new", gated=False),
        "mlp_bias": True,
    }
    norm = layer_norm(config, "layer_norm_epsilon")
    return one_kind(config, name, "BloomForCausalLM", attention, layer, norm=norm, tied=True, embedding_norm=True)


def mpt(config: ConfigFields, name: str) -> ModelSpec:
    """Read MPT (MosaicML, 2023): ALiBi, LayerNorm without bias, no biases at all."""
    config = renamed(config, hidden_size="d_model", num_hidden_layers="n_layers", num_attention_heads="n_heads",
                     max_position_embeddings="max_seq_len")  # fmt: skip
    inner = config.nested("attn_config") or ConfigFields({}, config.source)
    refuse_others(config, no_bias=(True,), logit_scale=(), norm_type=("low_precision_layernorm", "layernorm"),
                  ffn_config=({}, {"ffn_type": "mptmlp"}))  # fmt: skip
    refuse_others(inner, attn_type=("multihead_attention",), rope=(False,), sliding_window_size=(-1,), qk_gn=(False,),
                  kv_n_heads=())  # fmt: skip
    for key, right in (("prefix_lm", False), ("qk_ln", False), ("attn_uses_sequence_id", False), ("alibi", True)):
        if inner.boolean(key, default=right) != right:
            raise inner.invalid(key, not right, f"{str(right).lower()}: the other is not carried out")
    heads = read_heads(config)
    if heads["num_heads"] & (heads["num_heads"] - 1) or inner.integer("alibi_bias_max", default=8) != 8:
        raise config.invalid("n_heads", heads["num_heads"], "a power of two, with alibi_bias_max 8")
    attention = {
        **heads,
        "position": "alibi",
        "qkv_clip": inner.number("clip_qkv", default=0.0),
        "scale": inner.number("softmax_scale", default=None),
    }
    width = config.integer("hidden_size")
    layer = {
        "intermediate_size": config.integer("expansion_ratio", default=4) * width,
        "activation": read_activation(ConfigFields({}, config.source), "hidden_act", "gelu", gated=False),
    }
    norm = layer_norm(config, "layer_norm_epsilon", bias=False)
    return one_kind(config, name, "MptForCausalLM", attention, layer, norm=norm, tied=True)
