"""Read fields that several families share: heads, windows by layer, models with one kind of layer, and unsupported
keys.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from workbench.model.attention_spec import AttentionSpec, RotaryConfig
from workbench.model.hf.fields import ConfigFields
from workbench.model.hf.rotary import read_rotary
from workbench.model.spec import ActivationSpec, LayerSpec, ModelSpec, NormSpec

MAX_LAYERS = 10_000  # a larger number means a damaged file, and would fill the memory
FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"

# Keys that change the computation, with the values that have no effect. A family excludes the keys it reads.
UNSUPPORTED_KEYS: dict[str, tuple[object, ...]] = {
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "num_local_experts": (0, 1),
    "use_qk_norm": (False,),
    "use_bidirectional_attention": (False,),
    "is_causal": (True,),
}


def refuse_unsupported(config: ConfigFields, architecture: str, reads: tuple[str, ...] = ()) -> None:
    """Raise WorkbenchError if the config is of another architecture, or has a key of `UNSUPPORTED_KEYS` that is not in
    `reads`.
    """
    architectures = config.get("architectures")
    if architectures is not None and (not isinstance(architectures, list) or architecture not in architectures):
        raise config.invalid("architectures", architectures, f'["{architecture}"]')
    for key, harmless in UNSUPPORTED_KEYS.items():
        value = config.get(key)
        if key not in reads and value is not None and value not in harmless:
            raise config.invalid(key, value, "absent or null: its effect is not supported")


def refuse_others(config: ConfigFields, **harmless: tuple[object, ...]) -> None:
    """Raise WorkbenchError if one of these keys has an unsupported value: neither null nor one of the values in
    `harmless`.
    """
    for key, values in harmless.items():
        value = config.get(key)
        if value is not None and not any(type(value) is type(each) and value == each for each in values):
            right = " or ".join(["null", *map(json.dumps, values)])
            raise config.invalid(key, value, f"{right}: other values are not supported")


def refuse_activation(config: ConfigFields, key: str, right: str) -> None:
    activation = config.get(key)
    if activation not in (None, right):
        raise config.invalid(key, activation, f'"{right}": other activations are not supported')


def refuse_sliding_windows(config: ConfigFields, family: str) -> None:
    """Raise WorkbenchError if a config gives windows to layers of `family`, whose layers all see the whole context."""
    window = config.get("sliding_window")
    if window is not None and config.get("use_sliding_window") is not False:
        raise config.invalid("sliding_window", window, f"null: {family} layers see the whole context")
    kinds = config.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or any(kind != FULL for kind in kinds)):
        raise config.invalid("layer_types", kinds, f'absent, or "{FULL}" for every layer')


ACTIVATIONS: dict[str, str] = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh", "relu": "relu", "relu2": "relu2",
}  # fmt: skip


def read_activation(config: ConfigFields, key: str, default: str, gated: bool = True) -> ActivationSpec:
    """Read an activation by its name in transformers; `default` is the family's."""
    name = config.get(key) or default
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise config.invalid(key, name, f"one of {', '.join(ACTIVATIONS)}: others are not supported")
    return ActivationSpec(kind=ACTIVATIONS[name], gated=gated)  # type: ignore[arg-type] (a key of ACTIVATIONS)


def layer_norm(config: ConfigFields, key: str = "layer_norm_eps", eps: float = 1e-5, bias: bool = True) -> NormSpec:
    """Read the eps of a LayerNorm, and return its spec."""
    return NormSpec(kind="layer", eps=config.number(key, default=eps), bias=bias)


def renamed(config: ConfigFields, **names: str) -> ConfigFields:
    """Return the config with fields under our names; `names` maps each to the family's name."""
    values = dict(config.values)
    for ours, theirs in names.items():
        if theirs in values and values.get(ours) is None:
            values[ours] = values[theirs]
    return ConfigFields(values, config.source)


def without(config: ConfigFields, *keys: str) -> ConfigFields:
    """Return the config without keys of other families, which this family ignores."""
    return ConfigFields({key: value for key, value in config.values.items() if key not in keys}, config.source)


def as_family(config: ConfigFields, family: str) -> ConfigFields:
    """Return the config without its class name, so that another family's reader accepts it."""
    values = {**config.values, "model_type": family}
    return without(ConfigFields(values, config.source), "architectures")


def read_heads(config: ConfigFields, dim: int | None = None) -> dict[str, Any]:
    """Read `num_heads`, `num_kv_heads` and `head_dim`. If the config has no head width, it is `dim`, the family's
    default, or hidden_size / num_heads.
    """
    heads = config.integer("num_attention_heads")
    groups = config.integer("num_key_value_heads", default=heads)
    if heads % groups:
        raise config.invalid("num_key_value_heads", groups, f"a divisor of num_attention_heads ({heads})")
    width = config.integer("hidden_size")
    dim = config.integer("head_dim", default=None if "head_dim" in config.values else dim, minimum=2)
    if dim is None and width % heads:
        raise config.invalid("hidden_size", width, f"a multiple of num_attention_heads ({heads})")
    if (dim or width // heads) % 2:
        raise config.invalid("head_dim", dim or width // heads, "even, because the rotary embedding rotates pairs")
    return {"num_heads": heads, "num_kv_heads": groups, "head_dim": dim or width // heads}


def read_num_layers(config: ConfigFields) -> int:
    return config.integer("num_hidden_layers", maximum=MAX_LAYERS)


def read_window(config: ConfigFields, default: int) -> int:
    """Read the length of sliding windows in tokens; `default` is the family's."""
    return config.integer("sliding_window") if "sliding_window" in config.values else default


def read_layer_types(config: ConfigFields, period: int) -> tuple[str, ...]:
    """Read `layer_types`; if it is missing, all layers except every `period`-th are sliding."""
    layers = read_num_layers(config)
    kinds = config.get("layer_types")
    if kinds is None:
        return tuple(SLIDING if (index + 1) % period else FULL for index in range(layers))
    right = f'a list of {layers} times "{SLIDING}" or "{FULL}"'
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in (SLIDING, FULL) for kind in kinds):
        raise config.invalid("layer_types", kinds, right)
    return tuple(kinds)


def build_spec(
    config: ConfigFields,
    name: str,
    layers: tuple[LayerSpec, ...],
    *,
    tied: bool = False,
    eps: float = 1e-6,
    rotary: RotaryConfig | None = None,
    norm: NormSpec | None = None,
    **more: Any,
) -> ModelSpec:
    """Build the model from `layers`; `tied`, `eps` and the rotary's base are the family's defaults."""
    _refuse_other_layer_types(config, layers)
    rotary = read_rotary(config) if rotary is None else rotary
    context = config.integer("max_position_embeddings")
    if rotary.scaling.kind == "dynamic":
        context = int(context * rotary.scaling.factor)  # transformers has no end token here
    tied = config.boolean("tie_word_embeddings", default=tied)
    if tied and more.get("head_bias"):
        raise config.invalid("tie_word_embeddings", True, "false: a head of its own has the bias")
    return ModelSpec(
        name=name,
        vocab_size=config.integer("vocab_size"),
        hidden_size=config.integer("hidden_size"),
        layers=layers,
        max_position_embeddings=context,
        rotary=rotary,
        norm=norm or NormSpec(eps=config.number("rms_norm_eps", default=eps)),
        tie_word_embeddings=tied,
        eos_token_ids=config.token_ids("eos_token_id") or (),
        **more,
    )


def _refuse_other_layer_types(config: ConfigFields, layers: tuple[LayerSpec, ...]) -> None:
    """Raise WorkbenchError if `layer_types` disagrees with the windows."""
    kinds = config.get("layer_types")
    found = [FULL if layer.attention.sliding_window is None else SLIDING for layer in layers]
    if kinds is not None and kinds != found:
        each = f'"{found[0]}" for every layer' if len(set(found)) == 1 else "of the kinds that the windows give"
        raise config.invalid("layer_types", kinds, f"absent, or {each}")


def read_softcap(config: ConfigFields, key: str, default: float) -> float:
    """Read a softcap: null gives 0, which is none; `default` is the family's."""
    return config.number(key, default=0.0) if key in config.values else default


def layers_by_type(kinds: tuple[str, ...], layers: Mapping[str, LayerSpec]) -> tuple[LayerSpec, ...]:
    return tuple(layers[kind] for kind in kinds)


def one_kind(
    config: ConfigFields,
    name: str,
    architecture: str,
    attention: dict[str, Any],
    layer: dict[str, Any] | None = None,
    reads: tuple[str, ...] = (),
    **model: Any,
) -> ModelSpec:
    """Build the spec of a model whose layers are all equal.

    Args:
        config: the config.
        name: the model's name.
        architecture: its class in transformers.
        attention: fields of AttentionSpec except the heads.
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
