"""Read configs of architectures with recurrent layers, in place of attention or parallel to it; each function names its
source.
"""

from __future__ import annotations

import math

from workbench.model.attention_spec import AnyAttentionSpec, AttentionSpec, QKNormSpec
from workbench.model.hf.family_fields import (
    FULL,
    build_spec,
    read_heads,
    read_num_layers,
    refuse_activation,
    refuse_others,
    refuse_unsupported,
    renamed,
    without,
)
from workbench.model.hf.fields import ConfigFields
from workbench.model.hf.mixtures import SOFTMAX, read_experts
from workbench.model.hf.rotary import read_rotary, read_rotated_columns
from workbench.model.recurrent.spec import DeltaNetSpec, Mamba2Spec, ParallelRecurrentSpec, ShortConvSpec
from workbench.model.spec import ActivationSpec, LayerSpec, ModelSpec, NormSpec

MAMBA_TOKENS = 2**20  # a recurrent state has no maximum length; this stands for the limit that other models have


def lfm2(config: ConfigFields, name: str) -> ModelSpec:
    """Read LFM2 (Liquid AI, 2025): short convolutions, and attention with normed heads in some layers."""
    refuse_unsupported(config, "Lfm2ForCausalLM")
    layers, width = read_num_layers(config), config.integer("hidden_size")
    full = config.get("full_attn_idxs")
    full = list(range(layers)) if full is None else full
    if not isinstance(full, list) or any(not isinstance(each, int) for each in full):
        raise config.invalid("full_attn_idxs", full, "a list of layers")
    kinds = _layer_kinds(config, "conv", tuple(FULL if index in full else "conv" for index in range(layers)))
    conv = ShortConvSpec(
        channels=width,
        kernel=config.integer("conv_L_cache", default=3, minimum=2),
        bias=config.boolean("conv_bias"),
    )
    of_kind: dict[str, AnyAttentionSpec] = {
        FULL: AttentionSpec(**read_heads(config), qk_norm=QKNormSpec()),
        "conv": conv,
    }
    hidden = _lfm2_intermediate_size(config)
    found = tuple(LayerSpec(attention=of_kind[kind], intermediate_size=hidden) for kind in kinds)
    tied = config.boolean("tie_embedding", default=config.boolean("tie_word_embeddings", default=True))
    config = ConfigFields({**config.values, "tie_word_embeddings": tied}, config.source)
    norm = NormSpec(eps=config.number("norm_eps", default=1e-5))
    return build_spec(without(config, "layer_types"), name, found, norm=norm, rotary=read_rotary(config, 1_000_000.0))


def _lfm2_intermediate_size(config: ConfigFields) -> int:
    """Return the feed-forward's width: two thirds of the configured width, rounded up to a multiple, unless the config
    disables this.
    """
    hidden: int = config.integer("block_ff_dim", default=config.integer("intermediate_size", default=12288))
    if not config.boolean("block_auto_adjust_ff_dim", default=True):
        return hidden
    hidden, multiple = int(2 * hidden / 3), config.integer("block_multiple_of", default=256)
    if "block_ffn_dim_multiplier" in config.values and config.get("block_ffn_dim_multiplier") is None:
        return hidden
    hidden = int(config.number("block_ffn_dim_multiplier", default=1.0) * hidden)
    return -(-hidden // multiple) * multiple


def qwen3_next(config: ConfigFields, name: str) -> ModelSpec:
    """Read Qwen 3 Next (2025): gated delta nets, gated attention in each fourth layer, experts in nearly all."""
    refuse_unsupported(config, "Qwen3NextForCausalLM")
    layers, period = read_num_layers(config), config.integer("full_attention_interval", default=4)
    default = tuple("linear_attention" if (index + 1) % period else FULL for index in range(layers))
    heads, bias = read_heads(config, dim=256), config.boolean("attention_bias")
    eps = config.number("rms_norm_eps", default=1e-6)
    of_kind: dict[str, AnyAttentionSpec] = {
        FULL: AttentionSpec(
            **heads, qk_norm=QKNormSpec(), qkv_bias=bias, o_proj_bias=bias, output_gate=True,
            rotated_columns=read_rotated_columns(config, heads["head_dim"], 0.25),
        ),
        "linear_attention": DeltaNetSpec(
            num_key_heads=config.integer("linear_num_key_heads", default=16),
            num_value_heads=config.integer("linear_num_value_heads", default=32),
            key_dim=config.integer("linear_key_head_dim", default=128),
            value_dim=config.integer("linear_value_head_dim", default=128),
            kernel=config.integer("linear_conv_kernel_dim", default=4, minimum=2),
            eps=eps,
        ),
    }  # fmt: skip
    refuse_activation(config, "hidden_act", "silu")
    dense, step = config.get("mlp_only_layers") or [], config.integer("decoder_sparse_step", default=1)
    if not isinstance(dense, list) or any(not isinstance(each, int) for each in dense):
        raise config.invalid("mlp_only_layers", dense, "a list of layers")
    router = SOFTMAX.model_copy(update={"renormalize": config.boolean("norm_topk_prob", default=True)})
    shared = {
        "shared_intermediate_size": config.integer("shared_expert_intermediate_size", default=512),
        "shared_gate": True,
    }
    experts = read_experts(config, "num_experts", 512, 10, router).model_copy(update=shared)
    found = []
    for index, kind in enumerate(_layer_kinds(config, "linear_attention", default)):
        sparse = index not in dense and (index + 1) % step == 0
        key, width = ("moe_intermediate_size", 512) if sparse else ("intermediate_size", 5632)
        hidden = config.integer(key, default=width)
        found.append(LayerSpec(attention=of_kind[kind], intermediate_size=hidden, experts=experts if sparse else None))
    norm, rotary = NormSpec(eps=eps, offset=1.0), read_rotary(config, reads_partial=True)
    return build_spec(without(config, "layer_types"), name, tuple(found), norm=norm, rotary=rotary)


def bamba(config: ConfigFields, name: str) -> ModelSpec:
    """Read Bamba (IBM, Princeton, CMU, UIUC, 2024): Mamba-2 layers, attention in some, half of each head rotated."""
    refuse_unsupported(config, "BambaForCausalLM")
    refuse_activation(config, "hidden_act", "silu")
    layers, width = read_num_layers(config), config.integer("hidden_size")
    full = config.get("attn_layer_indices") or []
    if not isinstance(full, list) or any(not isinstance(each, int) for each in full):
        raise config.invalid("attn_layer_indices", full, "a list of layers")
    heads, bias = read_heads(config), config.boolean("attention_bias")
    columns = read_rotated_columns(config, heads["head_dim"], 0.5)
    attention = AttentionSpec(**heads, qkv_bias=bias, o_proj_bias=bias, rotated_columns=columns)
    eps = config.number("rms_norm_eps", default=1e-5)
    mamba = _mamba2_spec(_mamba_fields(config), width, heads=128, groups=1, state=256, eps=eps)
    found = tuple(
        LayerSpec(
            attention=attention if index in full else mamba,
            intermediate_size=config.integer("intermediate_size", default=14336),
            mlp_bias=config.boolean("mlp_bias"),
        )
        for index in range(layers)
    )
    rotary = read_rotary(config, reads_partial=True)
    config = without(config, "layer_types", "layers_block_type")
    return build_spec(config, name, found, eps=1e-5, rotary=rotary)


def falcon_h1(config: ConfigFields, name: str) -> ModelSpec:
    """Read Falcon-H1 (TII, 2025): Mamba-2 parallel to attention in each layer, and multipliers on nearly all
    intermediate results.

    The multiplier of keys is applied to the scores, so cached keys are unscaled.
    """
    refuse_unsupported(config, "FalconH1ForCausalLM")
    refuse_activation(config, "hidden_act", "silu")
    refuse_others(config, mamba_use_mlp=(True,))
    for key in ("layer_types", "layers_block_type"):
        if config.get(key) not in (None, ["hybrid"] * read_num_layers(config)):
            raise config.invalid(key, config.get(key), 'absent, or "hybrid" for every layer')
    heads, bias, width = read_heads(config), config.boolean("attention_bias"), config.integer("hidden_size")
    keys, eps = config.number("key_multiplier", default=1.0), config.number("rms_norm_eps", default=1e-5)
    gate, down = _factors(config, "mlp_multipliers", 2)
    inner = config.integer("mamba_d_ssm", default=None if "mamba_d_ssm" in config.values else 1024)
    mamba = _mamba2_spec(_mamba_fields(config), width, 128, 1, 256, eps, inner)
    norm = "none"
    if config.boolean("mamba_rms_norm"):
        norm = "before_gate" if config.boolean("mamba_norm_before_gate", default=True) else "after_gate"
    beside = ParallelRecurrentSpec(
        recurrent=Mamba2Spec(**{
            **dict(mamba), "norm": norm, "column_scales": _factors(config, "ssm_multipliers", 5),
            "o_proj_bias": config.boolean("projectors_bias"),
        }),
        recurrent_input_scale=config.number("ssm_in_multiplier", default=1.0),
        recurrent_output_scale=config.number("ssm_out_multiplier", default=1.0),
        attention_input_scale=config.number("attention_in_multiplier", default=1.0),
        attention_output_scale=config.number("attention_out_multiplier", default=1.0),
    )  # fmt: skip
    layer = LayerSpec(
        attention=AttentionSpec(
            **heads, qkv_bias=bias, o_proj_bias=bias, scale=None if keys == 1 else keys * heads["head_dim"] ** -0.5
        ),
        intermediate_size=config.integer("intermediate_size", default=14336),
        mlp_bias=config.boolean("mlp_bias"),
        activation=ActivationSpec(gate_scale=gate),
        beside=beside,
        feedforward_scale=down,
    )
    return build_spec(
        without(config, "layer_types", "layers_block_type"), name, (layer,) * read_num_layers(config), eps=1e-5,
        embedding_scale=config.number("embedding_multiplier", default=1.0),
        logit_scale=config.number("lm_head_multiplier", default=1.0),
    )  # fmt: skip


def _factors(config: ConfigFields, key: str, count: int) -> tuple[float, ...]:
    """Read a list of `count` factors; default: ones."""
    values = config.get(key)
    if values is None:
        return (1.0,) * count
    if not isinstance(values, list) or len(values) != count:
        raise config.invalid(key, values, f"a list of {count} numbers above 0, or null")
    return tuple(ConfigFields({key: value}, config.source).number(key) for value in values)


def _mamba_fields(config: ConfigFields) -> ConfigFields:
    """Return the config with its Mamba-2 fields renamed to Mamba-2's own names."""
    config = renamed(
        config, num_heads="mamba_n_heads", n_groups="mamba_n_groups", state_size="mamba_d_state",
        conv_kernel="mamba_d_conv", expand="mamba_expand", use_conv_bias="mamba_conv_bias", use_bias="mamba_proj_bias",
    )  # fmt: skip
    if config.get("mamba_d_head") not in (None, "auto"):
        return renamed(config, head_dim="mamba_d_head")
    return without(config, "head_dim")


def mamba2(config: ConfigFields, name: str) -> ModelSpec:
    """Read Mamba-2 (Dao and Gu, 2024): only state-space layers, no feed-forwards."""
    refuse_unsupported(config, "Mamba2ForCausalLM")
    refuse_activation(config, "hidden_act", "silu")
    eps = config.number("layer_norm_epsilon", default=1e-5)
    spec = _mamba2_spec(config, config.integer("hidden_size", default=4096), heads=128, groups=8, state=128, eps=eps)
    layer = LayerSpec(attention=spec, intermediate_size=0)
    sizes = {"max_position_embeddings": MAMBA_TOKENS, **config.values}
    config = without(ConfigFields(sizes, config.source), "layer_types")
    return build_spec(config, name, (layer,) * read_num_layers(config), norm=NormSpec(eps=eps))


def _mamba2_spec(
    config: ConfigFields, width: int, heads: int, groups: int, state: int, eps: float, inner: int | None = None
) -> Mamba2Spec:
    """Read a state-space layer; `heads`, `groups` and `state` are the family's defaults; `inner`, the columns of all
    heads, is by default `expand` times the width.
    """
    stated = "expand times hidden_size" if inner is None else "mamba_d_ssm"
    inner = int(config.number("expand", default=2) * width) if inner is None else inner
    heads = config.integer("num_heads", default=heads)
    dim = config.integer("head_dim", default=inner // heads)
    if heads * dim != inner:
        raise config.invalid("head_dim", dim, f"{stated} ({inner}) over the heads ({heads})")
    limits = config.get("time_step_limit")
    if limits is not None and limits not in ([0.0, math.inf], [0.0, {"__float__": "Infinity"}]):
        raise config.invalid("time_step_limit", limits, "0 to infinity: other limits are not supported")
    groups = config.integer("n_groups", default=groups)
    if heads % groups:
        raise config.invalid("n_groups", groups, f"a divisor of the heads ({heads})")
    return Mamba2Spec(
        heads=heads,
        head_width=dim,
        state=config.integer("state_size", default=state),
        groups=groups,
        kernel=config.integer("conv_kernel", default=4, minimum=2),
        bias=config.boolean("use_bias"),
        conv_bias=config.boolean("use_conv_bias", default=True),
        eps=eps,
    )


def _layer_kinds(config: ConfigFields, recurrent: str, default: tuple[str, ...]) -> tuple[str, ...]:
    """Read `layer_types`: full attention, or `recurrent`."""
    kinds, layers = config.get("layer_types"), read_num_layers(config)
    if kinds is None:
        return default
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in (FULL, recurrent) for kind in kinds):
        raise config.invalid("layer_types", kinds, f'a list of {layers} times "{FULL}" or "{recurrent}"')
    return tuple(kinds)
