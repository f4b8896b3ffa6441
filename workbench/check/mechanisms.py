"""Describe a model's mechanisms in words: norms, attention, positions, windows, feed-forwards, routers, scales."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from workbench.display import format_ranges
from workbench.model.attention_spec import AttentionSpec, MLASpec, RotaryConfig, RotaryScaling
from workbench.model.spec import ActivationSpec, LayerSpec, ModelSpec, MoESpec, NormSpec
from workbench.units import format_percent

PLACES = {"pre": "before each part", "post": "after each part", "both": "before and after each part"}
PARALLEL = {
    "one_norm": "before both parts, which are parallel",
    "two_norms": "one before each part, which are parallel",
}
ACTIVATIONS = {"silu": "SiLU", "gelu": "GELU", "gelu_tanh": "GELU by its tanh", "relu": "ReLU", "relu2": "squared ReLU",
               "clamped": "clamped SiLU", "xielu": "xIELU"}  # fmt: skip


def describe_mechanisms(spec: ModelSpec) -> dict[str, str]:
    """Return the model's mechanisms in words; if layers differ, the words name them."""
    found = {
        "norm": _norm(spec.norm),
        "place of norms": _by_layer(spec, lambda kind: PARALLEL.get(kind.parallel) or PLACES[kind.norms]),
        "attention": _by_layer(spec, _attention),
        "beside attention": _by_layer(spec, _beside),
        "norm of queries and keys": _by_layer(spec, _qk_norm),
        "positions": _positions(spec),
        "windows": _by_layer(spec, _window),
        "scores": _by_layer(spec, _scores),
        "feed-forward": _by_layer(spec, _feedforward),
        "router": _by_layer(spec, lambda kind: "" if kind.experts is None else _router(kind.experts)),
        "residual streams": _streams(spec),
        "biases": _biases(spec),
        "embedding": _embedding(spec),
        "logits": _logits(spec),
    }
    return {name: words for name, words in found.items() if words}


def _by_layer(spec: ModelSpec, describe: Callable[[LayerSpec], str]) -> str:
    """Join the words of all layers, naming layers if they differ. Empty words are left out."""
    layers: dict[str, list[int]] = {}
    for index, kind in enumerate(spec.layers):
        layers.setdefault(describe(kind), []).append(index)
    if len(layers) == 1:
        return next(iter(layers))
    return "; ".join(f"{words} (layers {format_ranges(which)})" for words, which in layers.items() if words)


def _norm(norm: NormSpec) -> str:
    parts = ["LayerNorm" if norm.kind == "layer" else "root mean square", f"eps {norm.eps:g}"]
    parts += [] if norm.weight else ["without weights"]
    parts += [f"weights + {norm.offset:g}"] if norm.offset else []
    parts += ["biases"] if norm.bias else []
    return ", ".join(parts)


def _attention(kind: LayerSpec) -> str:
    a = kind.attention
    if isinstance(a, MLASpec):
        queries = f", queries from {a.q_lora_rank}" if a.q_lora_rank else ""
        widths = f"{a.kv_lora_rank} + {a.qk_rope_head_dim} cached columns{queries}"
        return f"latent: {a.num_heads} heads of {a.qk_nope_head_dim} + {a.qk_rope_head_dim}, {widths}"
    if not isinstance(a, AttentionSpec):
        return f"recurrent: {str(a.kind).replace('_', ' ')}"
    shared = "" if a.kv_shared_with is None else f", those of layer {a.kv_shared_with}"
    if a.num_kv_heads == a.num_heads:
        return f"multi-head: {a.num_heads} heads of {a.head_dim}" + (shared and f", keys and values{shared[6:]}")
    name = "multi-query" if a.num_kv_heads == 1 else "grouped"
    return f"{name}: {a.num_heads} query heads on {a.num_kv_heads} key/value heads of {a.head_dim}{shared}"


def _beside(kind: LayerSpec) -> str:
    if kind.beside is None:
        return ""
    scales = dict(kind.beside).items() - {("recurrent", kind.beside.recurrent)}
    words = [f"{name.replace('_', ' ')} {scale:g}" for name, scale in sorted(scales) if scale != 1]
    return ", ".join([f"recurrent: {kind.beside.recurrent.kind}", *words])


def _qk_norm(kind: LayerSpec) -> str:
    norm = getattr(kind.attention, "qk_norm", None)
    if norm is None:
        return ""
    weights = {"shared": "", "per_head": ", weights by head", "none": ", without weights"}[norm.weight]
    over = "each head" if norm.over == "head" else "all columns of the projection"
    return over + weights + (", biases" if norm.bias else "") + (", after rotary" if norm.after_rotary else "")


def _positions(spec: ModelSpec) -> str:
    def of_layer(kind: LayerSpec) -> str:
        a = kind.attention
        if isinstance(a, MLASpec):
            pairs = "interleaved pairs" if a.rope_interleave else "halves"
            return f"{_rotary(a.rotary or spec.rotary)}, {a.qk_rope_head_dim} columns in {pairs}"
        if not isinstance(a, AttentionSpec):
            return ""
        if a.position == "none":
            return "none" if spec.learned_positions is None else ""
        if a.position == "alibi":
            return "ALiBi"
        part = f", {a.rotary_dim} of {a.head_dim} columns" if a.rotary_dim != a.head_dim else ""
        return _rotary(a.rotary or spec.rotary) + part

    learned = "a learned table" if spec.learned_positions is not None else ""
    return "; ".join(filter(None, (learned, _by_layer(spec, of_layer))))


def _rotary(rotary: RotaryConfig) -> str:
    scaling = rotary.scaling
    return f"rotary of base {rotary.rope_theta:,.10g}{_scaling(scaling)}"


def _scaling(scaling: RotaryScaling) -> str:
    if scaling.kind == "default":
        return ""
    beyond = f" beyond {scaling.original_max_position_embeddings:,} tokens" if scaling.by_length else ""
    if scaling.kind == "longrope":
        how = f", LongRoPE: each of {len(scaling.short_factors)} frequencies by its own factor, another{beyond}"
    else:
        how = f", {scaling.kind} scaling by {scaling.factor:g}{beyond}"
    factors = dict.fromkeys((scaling.attention_factor, scaling.long_attention_factor or scaling.attention_factor))
    return how + (f", scores times {' or '.join(f'{each**2:.4g}' for each in factors)}" if set(factors) != {1} else "")


def _window(kind: LayerSpec) -> str:
    a: Any = kind.attention
    if getattr(a, "chunk_size", None) is not None:
        return f"chunks of {a.chunk_size:,} tokens, each seen from within alone"
    if getattr(a, "sliding_window", None) is None:
        return ""
    return f"{a.sliding_window:,} tokens" + (f" and the first {a.num_sink_tokens}" if a.num_sink_tokens else "")


def _scores(kind: LayerSpec) -> str:
    a: Any = kind.attention
    parts = [f"times {a.scale:.6g}"] if getattr(a, "scale", None) is not None else []
    parts += [f"capped at {a.softcap:g}"] if getattr(a, "softcap", 0) else []
    parts += ["a learned sink logit a head"] if getattr(a, "sink_logits", False) else []
    if (heat := getattr(a, "temperature", None)) is not None:
        place = f"(position + {heat.offset})" if heat.offset else "position"
        parts.append(f"times 1 + {heat.strength:g} log(1 + {place} // {heat.floor:,})")
    clip = getattr(a, "qkv_clip", 0)
    parts += [f"queries, keys and values within ±{clip:g}"] if clip else []
    return ", ".join(parts)


def _feedforward(kind: LayerSpec) -> str:
    if not kind.intermediate_size:
        return "none"
    if kind.experts is None:
        scale = "" if kind.feedforward_scale == 1 else f", its result times {kind.feedforward_scale:g}"
        return f"{_activation(kind.activation)}, {kind.intermediate_size:,} columns{scale}"
    experts = kind.experts
    words = (
        f"{experts.num_experts} experts of {kind.intermediate_size:,} columns, {experts.num_experts_per_tok} a token"
    )
    if experts.shared_intermediate_size:
        gate = ", gated" if experts.shared_gate else ""
        words += f", a shared one of {experts.shared_intermediate_size:,}{gate}"
    return f"{words}, {_activation(kind.activation)}"


def _activation(activation: ActivationSpec) -> str:
    name = ACTIVATIONS.get(activation.kind, activation.kind)
    scale = "" if activation.gate_scale == 1 else f", its gate times {activation.gate_scale:g}"
    scale += f", {format_percent(activation.sparsity)} of its gates 0" if activation.sparsity else ""
    return f"gated {name}{scale}" if activation.gated else name


def _router(experts: MoESpec) -> str:
    router = experts.router
    scores = {"logit": "logits", "softmax": "softmax of all", "sigmoid": "sigmoid", "sparsemixer": "SparseMixer"}
    parts = [scores[router.score]]
    parts += ["a learned bias in the choice"] if router.selection_bias else []
    parts += [f"{router.kept_groups} of {router.groups} groups"] if router.groups > 1 else []
    parts += ["softmax of the chosen"] if router.softmax_chosen else []
    parts += ["weights divided by their sum"] if router.renormalize else []
    parts += [f"times {router.factor:g}"] if router.factor != 1 else []
    parts += ["weighs the input"] if router.weighs_input else []
    return ", ".join(parts)


def _biases(spec: ModelSpec) -> str:
    named = {"qkv_bias": "queries, keys and values", "o_proj_bias": "output projection"}

    def of_layer(kind: LayerSpec) -> str:
        parts = [words for name, words in named.items() if getattr(kind.attention, name, False)]
        parts += ["feed-forward"] if kind.mlp_bias else []
        parts += ["router"] if kind.experts is not None and kind.experts.router_bias else []
        return ", ".join(parts)

    return "; ".join(filter(None, (_by_layer(spec, of_layer), "head" if spec.head_bias else "")))


def _streams(spec: ModelSpec) -> str:
    altup = spec.altup
    if altup is None:
        return ""
    words = f"{altup.streams}, of which layers compute number {altup.active}; a residual of rank {altup.low_rank}"
    return f"{words}; {altup.input_columns} columns of each layer's own from a table of {altup.input_vocab_size:,}"


def _embedding(spec: ModelSpec) -> str:
    parts = ["also the head" if spec.tie_word_embeddings else "apart from the head"]
    parts += [f"times {spec.embedding_scale:.6g}"] if spec.embedding_scale != 1 else []
    parts += ["normed"] if spec.embedding_norm else []
    parts += [f"what a layer adds times {spec.residual_scale:g}"] if spec.residual_scale != 1 else []
    return ", ".join(parts)


def _logits(spec: ModelSpec) -> str:
    parts = [f"times {spec.logit_scale:.6g}"] if spec.logit_scale != 1 else []
    cap = spec.final_logit_softcapping
    return ", ".join(parts + ([f"capped at {cap:g}"] if cap else []))
