"""Read configs of architectures with mixtures of experts; each function names its source."""

from __future__ import annotations

from typing import Any

from workbench.model.attention_spec import AttentionSpec, MLASpec, QKNormSpec, QueryTemperature
from workbench.model.hf.family_fields import (
    CHUNKED,
    FULL,
    SLIDING,
    build_spec,
    layer_norm,
    read_activation,
    read_heads,
    read_layer_types,
    read_num_layers,
    refuse_others,
    refuse_sliding_windows,
    refuse_unsupported,
    renamed,
    without,
)
from workbench.model.hf.fields import ConfigFields
from workbench.model.hf.llama_relatives import granite_scales
from workbench.model.hf.rotary import read_rotary, yarn_score_factor
from workbench.model.spec import LayerSpec, ModelSpec, MoESpec, RouterSpec

SOFTMAX = RouterSpec(score="softmax", softmax_chosen=False)


def mixtral(config: ConfigFields, name: str) -> ModelSpec:
    """Read Mixtral (Jiang et al., 2024): the weights of the chosen experts are divided by their sum."""
    refuse_unsupported(config, "MixtralForCausalLM", ("num_local_experts",))
    experts = read_experts(config, "num_local_experts", 8, 2, SOFTMAX.model_copy(update={"renormalize": True}))
    layer = LayerSpec(
        attention=AttentionSpec(**read_heads(config), sliding_window=config.integer("sliding_window", default=None)),
        intermediate_size=config.integer("intermediate_size"),
        activation=read_activation(config, "hidden_act", "silu"),
        experts=experts,
    )
    rotary = read_rotary(config, 1_000_000.0)
    return build_spec(config, name, (layer,) * read_num_layers(config), eps=1e-5, rotary=rotary)


def qwen2_moe(config: ConfigFields, name: str) -> ModelSpec:
    """Read Qwen 1.5 and 2 MoE (2024): a shared expert with a gate; biases on queries, keys and values."""
    refuse_unsupported(config, "Qwen2MoeForCausalLM")
    router = SOFTMAX.model_copy(update={"renormalize": config.boolean("norm_topk_prob")})
    experts = read_experts(config, "num_experts", 60, 4, router).model_copy(
        update={
            "shared_intermediate_size": config.integer("shared_expert_intermediate_size", default=5632),
            "shared_gate": True,
        }
    )
    attention = AttentionSpec(**read_heads(config), qkv_bias=config.boolean("qkv_bias", default=True))
    layers, window = read_num_layers(config), _window(config)
    first = config.integer("max_window_layers", default=28, minimum=0)
    kinds = tuple(FULL if window is None or index % 2 or index >= first else SLIDING for index in range(layers))
    if window is not None and config.get("layer_types") is not None:
        kinds = read_layer_types(config, period=1)
    return _qwen(config, name, attention, experts, kinds)


def qwen3_moe(config: ConfigFields, name: str) -> ModelSpec:
    """Read Qwen 3 MoE (2025): normed heads; some layers may be dense."""
    refuse_unsupported(config, "Qwen3MoeForCausalLM", ("num_local_experts",))
    router = SOFTMAX.model_copy(update={"renormalize": config.boolean("norm_topk_prob")})
    bias = config.boolean("attention_bias")
    attention = AttentionSpec(**read_heads(config), qk_norm=QKNormSpec(), qkv_bias=bias, o_proj_bias=bias)
    config = renamed(config, num_experts="num_local_experts")
    kinds = (FULL if _window(config) is None else SLIDING,) * read_num_layers(config)
    if config.get("layer_types") not in (None, list(kinds)):
        raise config.invalid("layer_types", config.get("layer_types"), f'absent, or "{kinds[0]}" for every layer')
    return _qwen(config, name, attention, read_experts(config, "num_experts", 128, 8, router), kinds)


def _window(config: ConfigFields) -> int | None:
    """Return the length of windows, or None without windows: `use_sliding_window` is false by default."""
    given = config.boolean("use_sliding_window")
    window: int | None = config.integer("sliding_window", default=4096) if given else None
    return window


def _qwen(
    config: ConfigFields, name: str, attention: AttentionSpec, experts: MoESpec, kinds: tuple[str, ...]
) -> ModelSpec:
    """Build a model with layers of `kinds`; `mlp_only_layers`, and all layers except every `decoder_sparse_step`-th,
    are dense.
    """
    layers, step = read_num_layers(config), config.integer("decoder_sparse_step", default=1)
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(not isinstance(each, int) for each in dense):
        raise config.invalid("mlp_only_layers", dense, "a list of layers")
    window = _window(config)
    activation, found = read_activation(config, "hidden_act", "silu"), []
    for index in range(layers):
        sparse = index not in dense and (index + 1) % step == 0
        width = config.integer("moe_intermediate_size" if sparse else "intermediate_size")
        own = attention.model_copy(update={"sliding_window": window if kinds[index] == SLIDING else None})
        found.append(
            LayerSpec(
                attention=own, intermediate_size=width, activation=activation, experts=experts if sparse else None
            )
        )
    return build_spec(config, name, tuple(found))


def olmoe(config: ConfigFields, name: str) -> ModelSpec:
    """Read OLMoE (Muennighoff et al., 2024): norms over all queries and all keys, which are then clamped."""
    refuse_unsupported(config, "OlmoeForCausalLM")
    router = SOFTMAX.model_copy(update={"renormalize": config.boolean("norm_topk_prob")})
    bias = config.boolean("attention_bias")
    clip = config.number("clip_qkv", default=0.0)
    layer = LayerSpec(
        attention=AttentionSpec(
            **read_heads(config),
            qk_norm=QKNormSpec(over="projection"),
            qkv_bias=bias,
            o_proj_bias=bias,
            qkv_clip=clip,
        ),
        intermediate_size=config.integer("intermediate_size"),
        activation=read_activation(config, "hidden_act", "silu"),
        experts=read_experts(config, "num_experts", 64, 8, router),
    )
    return build_spec(config, name, (layer,) * read_num_layers(config), eps=1e-5)


def granitemoe(config: ConfigFields, name: str) -> ModelSpec:
    """Read Granite 3 MoE (IBM, 2024): Granite with the softmax of the chosen experts' logits as their weights."""
    refuse_unsupported(config, "GraniteMoeForCausalLM", ("num_local_experts",))
    bias = config.boolean("attention_bias")
    layer = LayerSpec(
        attention=AttentionSpec(
            **read_heads(config), qkv_bias=bias, o_proj_bias=bias,
            scale=config.number("attention_multiplier", default=1.0),
        ),
        intermediate_size=config.integer("intermediate_size"),
        activation=read_activation(config, "hidden_act", "silu"),
        experts=read_experts(config, "num_local_experts", 8, 2, RouterSpec()),
    )  # fmt: skip
    layers = (layer,) * read_num_layers(config)
    return build_spec(config, name, layers, **granite_scales(config))


def deepseek_v2(config: ConfigFields, name: str) -> ModelSpec:
    """Read DeepSeek-V2 (2024): latent attention; experts are scored by softmax and chosen within the groups that have
    the best single experts.
    """
    refuse_unsupported(config, "DeepseekV2ForCausalLM")
    method = config.get("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        raise config.invalid("topk_method", method, "greedy or group_limited_greedy")
    refuse_others(config, scoring_func=("softmax",), norm_topk_prob=(False,), mlp_bias=(False,))
    config.integer("num_experts_per_tok")
    sizes = {"first_k_dense_replace": 0, "n_routed_experts": 64, "n_shared_experts": 2, "moe_intermediate_size": 1407}
    given = {key: value for key, value in config.values.items() if value is not None or key not in sizes}
    config = ConfigFields({**sizes, **given}, config.source)
    router = SOFTMAX.model_copy(update=_factor(config))
    if method == "group_limited_greedy":
        router = router.model_copy(update=_groups(config, "max"))
    return _deepseek(config, name, router, interleave=True)


def deepseek_v3(config: ConfigFields, name: str) -> ModelSpec:
    """Read DeepSeek-V3 and R1 (2024): experts are scored by sigmoid with a learned bias, and chosen within the groups
    whose two best experts score highest.
    """
    refuse_unsupported(config, "DeepseekV3ForCausalLM")
    refuse_others(config, topk_method=("noaux_tc",), scoring_func=("sigmoid",))
    router = RouterSpec(
        score="sigmoid",
        softmax_chosen=False,
        selection_bias=True,
        renormalize=config.boolean("norm_topk_prob", default=True),
        **_factor(config, 2.5),
        **_groups(config, "top2", 8, 4),
    )
    return _deepseek(config, name, router, config.boolean("rope_interleave", default=True))


def _deepseek(config: ConfigFields, name: str, router: RouterSpec, interleave: bool) -> ModelSpec:
    refuse_sliding_windows(config, "DeepSeek")
    refuse_others(config, num_key_value_heads=(config.integer("num_attention_heads"),))
    layers, dense = read_num_layers(config), config.integer("first_k_dense_replace", default=3, minimum=0)
    width = config.integer("intermediate_size")
    activation, attention = read_activation(config, "hidden_act", "silu"), _latent(config, interleave)
    plain = LayerSpec(attention=attention, intermediate_size=width, activation=activation)
    if dense >= layers:
        return build_spec(config, name, (plain,) * layers)
    if config.integer("moe_layer_freq", default=1) != 1:
        raise config.invalid("moe_layer_freq", config.get("moe_layer_freq"), "1")
    hidden = config.integer("moe_intermediate_size", default=2048)
    shared = config.integer("n_shared_experts", default=1, minimum=0)
    experts = read_experts(config, "n_routed_experts", 256, 8, router).model_copy(
        update={"shared_intermediate_size": shared * hidden or None}
    )
    sparse = LayerSpec(attention=attention, intermediate_size=hidden, activation=activation, experts=experts)
    return build_spec(config, name, (plain,) * dense + (sparse,) * (layers - dense))


def phimoe(config: ConfigFields, name: str) -> ModelSpec:
    """Read Phi-3.5-MoE (Abdin et al., 2024): LayerNorm, two experts by SparseMixer, LongRoPE.

    transformers 5.23 keeps the short factors for long texts; the published code, and this reader, take the long ones.
    """
    refuse_unsupported(config, "PhimoeForCausalLM", ("num_local_experts",))
    refuse_others(config, num_experts_per_tok=(2,))
    bias, jitter = config.boolean("attention_bias"), config.number("router_jitter_noise", default=0.01, zero=True)
    router = RouterSpec(score="sparsemixer", softmax_chosen=False, jitter=jitter)
    window = config.integer("sliding_window", default=None)
    layer = LayerSpec(
        attention=AttentionSpec(**read_heads(config), qkv_bias=bias, o_proj_bias=bias, sliding_window=window),
        intermediate_size=config.integer("intermediate_size"),
        activation=read_activation(config, "hidden_act", "silu"),
        experts=read_experts(config, "num_local_experts", 16, 2, router),
    )
    more: dict[str, Any] = {
        "norm": layer_norm(config, "rms_norm_eps"),
        "rotary": read_rotary(config, 1_000_000.0),
        "head_bias": config.boolean("lm_head_bias"),
    }
    return build_spec(config, name, (layer,) * read_num_layers(config), **more)


def llama4_text(config: ConfigFields, name: str) -> ModelSpec:
    """Read the text part of Llama 4 (Meta, 2025): layers with rotary attend within chunks, the other layers have a
    temperature; experts scale their inputs, and a shared expert is added.
    """
    refuse_unsupported(config, "Llama4ForCausalLM", ("num_local_experts", "use_qk_norm"))
    layers, interval = read_num_layers(config), config.integer("no_rope_layer_interval", default=4)
    bias, normed = config.boolean("attention_bias"), config.boolean("use_qk_norm", default=True)
    rotated = config.get("no_rope_layers") or [int((index + 1) % interval != 0) for index in range(layers)]
    if not isinstance(rotated, list) or len(rotated) < layers or any(each not in (0, 1) for each in rotated):
        raise config.invalid("no_rope_layers", rotated, f"a list of {layers} times 0 or 1")
    kinds = config.get("layer_types") or [CHUNKED if each else FULL for each in rotated[:layers]]
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in (CHUNKED, FULL) for kind in kinds):
        raise config.invalid("layer_types", kinds, f'a list of {layers} times "{CHUNKED}" or "{FULL}"')
    chunk = config.integer("attention_chunk_size") if config.get("attention_chunk_size") is not None else 8192
    if "attention_chunk_size" in config.values and config.get("attention_chunk_size") is None and CHUNKED in kinds:
        raise config.invalid("attention_chunk_size", None, f'a length, because layer_types has "{CHUNKED}"')
    temperature = QueryTemperature(
        strength=config.number("attn_scale", default=0.1), floor=config.integer("floor_scale", default=8192), offset=1
    )
    tuned = config.boolean("attn_temperature_tuning", default=True)
    step = config.integer("interleave_moe_layer_step", default=1)
    sparse = config.get("moe_layers")
    sparse = list(range(step - 1, layers, step)) if sparse is None else sparse
    if not isinstance(sparse, list) or any(not isinstance(each, int) for each in sparse):
        raise config.invalid("moe_layers", sparse, "a list of layers")
    width = config.integer("intermediate_size")
    router = RouterSpec(score="sigmoid", softmax_chosen=False, weighs_input=True)
    experts = read_experts(config, "num_local_experts", 16, 1, router)
    experts = experts.model_copy(update={"shared_intermediate_size": width})
    found = tuple(
        LayerSpec(
            attention=AttentionSpec(
                **read_heads(config, 128), qkv_bias=bias, o_proj_bias=bias,
                chunk_size=chunk if kind == CHUNKED else None,
                position="rotary" if rotates else "none",
                temperature=None if rotates or not tuned else temperature,
                qk_norm=QKNormSpec(weight="none", after_rotary=True) if rotates and normed else None,
            ),
            intermediate_size=width if index in sparse else config.integer("intermediate_size_mlp", default=16384),
            activation=read_activation(config, "hidden_act", "silu"),
            experts=experts if index in sparse else None,
        )
        for index, (rotates, kind) in enumerate(zip(rotated, kinds, strict=False))
    )  # fmt: skip
    rotary = read_rotary(config, 500_000.0)
    return build_spec(without(config, "layer_types"), name, found, eps=1e-5, rotary=rotary)


def _latent(config: ConfigFields, interleave: bool) -> MLASpec:
    bias = config.boolean("attention_bias")
    plain, rotary_dim = config.integer("qk_nope_head_dim", default=128), config.integer("qk_rope_head_dim", default=64)
    if rotary_dim % 2:
        raise config.invalid("qk_rope_head_dim", rotary_dim, "even, because the rotary embedding rotates pairs")
    latent = config.integer("q_lora_rank", default=None) if "q_lora_rank" in config.values else 1536
    if bias and latent is None:
        raise config.invalid("attention_bias", bias, "false where q_lora_rank is null")
    gain = yarn_score_factor(config)
    return MLASpec(
        num_heads=config.integer("num_attention_heads"),
        kv_lora_rank=config.integer("kv_lora_rank", default=512),
        qk_rope_head_dim=rotary_dim,
        qk_nope_head_dim=plain,
        v_head_dim=config.integer("v_head_dim", default=128),
        q_lora_rank=latent,
        scale=None if gain == 1 else (plain + rotary_dim) ** -0.5 * gain,
        rope_interleave=interleave,
        qkv_bias=bias,
        o_proj_bias=bias,
    )


def read_experts(config: ConfigFields, key: str, count: int, used: int, router: RouterSpec) -> MoESpec:
    """Read the number of experts (from `key`) and of experts per token, and return the mixture's spec; `count` and
    `used` are the family's defaults.
    """
    count, used = config.integer(key, default=count), config.integer("num_experts_per_tok", default=used)
    if used > count:
        raise config.invalid("num_experts_per_tok", used, f"at most {key} ({count})")
    if count % router.groups:
        raise config.invalid("n_group", router.groups, f"a divisor of {key} ({count})")
    return MoESpec(num_experts=count, num_experts_per_tok=used, router=router)


def _factor(config: ConfigFields, default: float = 1.0) -> dict[str, Any]:
    return {"factor": config.number("routed_scaling_factor", default=default)}


def _groups(config: ConfigFields, score: str, groups: int = 1, kept: int = 1) -> dict[str, Any]:
    groups, kept = config.integer("n_group", default=groups), config.integer("topk_group", default=kept)
    if kept > groups:
        raise config.invalid("topk_group", kept, f"at most n_group ({groups})")
    return {"groups": groups, "kept_groups": kept, "group_score": score}
