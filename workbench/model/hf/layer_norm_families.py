"""Read configs of architectures with LayerNorm and one feed-forward in each layer; each function names its source.

Each function lists the differences from Llama's block: norms, parallel parts, positions, biases.
"""

from __future__ import annotations

from workbench.model.attention_spec import AttentionSpec, QKNormSpec
from workbench.model.hf.family_fields import (
    FULL,
    SLIDING,
    build_spec,
    layer_norm,
    layers_by_type,
    one_kind,
    read_activation,
    read_heads,
    read_layer_types,
    read_window,
    refuse_others,
    refuse_unsupported,
    renamed,
    without,
)
from workbench.model.hf.fields import ConfigFields
from workbench.model.hf.rotary import read_rotary, read_rotated_columns
from workbench.model.spec import LayerSpec, ModelSpec, NormSpec

GPT2_NAMES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}


def gpt2(config: ConfigFields, name: str) -> ModelSpec:
    """Read GPT-2 (Radford et al., 2019): learned positions, LayerNorm, a plain feed-forward, biases everywhere."""
    config = renamed(config, **GPT2_NAMES)
    for key, right in (("scale_attn_by_inverse_layer_idx", False), ("add_cross_attention", False)):
        if config.boolean(key) != right:
            raise config.invalid(key, True, "false: it is not supported")
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


def opt(config: ConfigFields, name: str) -> ModelSpec:
    """Read OPT (Zhang et al., 2022): positions learned from row 2 on, ReLU, norms before each part."""
    width = config.integer("hidden_size")
    if config.integer("word_embed_proj_dim", default=width) != width:
        raise config.invalid("word_embed_proj_dim", config.get("word_embed_proj_dim"), f"hidden_size ({width})")
    for key, right in (("do_layer_norm_before", True), ("_remove_final_layer_norm", False),
                       ("layer_norm_elementwise_affine", True)):  # fmt: skip
        if config.boolean(key, default=right) != right:
            raise config.invalid(key, not right, f"{str(right).lower()}: the other value is not supported")
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
        raise config.invalid("apply_residual_connection_post_layernorm", True, "false: it is not supported")
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
            raise inner.invalid(key, not right, f"{str(right).lower()}: the other value is not supported")
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


def falcon(config: ConfigFields, name: str) -> ModelSpec:
    """Read Falcon (Almazrouei et al., 2023): parallel parts, one or few key/value heads."""
    config = renamed(config, ffn_hidden="ffn_hidden_size")
    heads, width = config.integer("num_attention_heads"), config.integer("hidden_size")
    new, multi_query = config.boolean("new_decoder_architecture"), config.boolean("multi_query", default=True)
    groups = config.integer("num_kv_heads", default=heads) if new else 1 if multi_query else heads
    if config.boolean("alibi"):
        raise config.invalid("alibi", True, "false: Falcon's rounded slopes are not supported")
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


def olmo(config: ConfigFields, name: str) -> ModelSpec:
    """Read OLMo (Groeneveld et al., 2024): LayerNorm without parameters, clamped queries, keys and values."""
    bias = config.boolean("attention_bias")
    clip = config.number("clip_qkv", default=0.0)
    attention = {"qkv_bias": bias, "o_proj_bias": bias, "qkv_clip": clip}
    norm = NormSpec(kind="layer", eps=1e-5, weight=False)
    return one_kind(config, name, "OlmoForCausalLM", attention, norm=norm)
