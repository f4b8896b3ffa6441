"""From a Hugging Face config.json to a ModelSpec and back. A further family is one function in `FAMILIES`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from workbench.errors import WorkbenchError, nearest
from workbench.model.config_fields import Fields, read_object
from workbench.model.rotary_config import rotary_from, rotary_to
from workbench.model.spec import Attention, LayerKind, ModelSpec

MOST_LAYERS = 10_000  # a number beyond it is a damaged file, and would only fill the memory

# Keys that change what is computed, with the values under which they change nothing.
NOT_CARRIED_OUT: dict[str, tuple[object, ...]] = {
    "quantization_config": (),
    "compression_config": (),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "num_local_experts": (0, 1),
    "use_qk_norm": (False,),
}


def read_spec(folder: str | Path) -> ModelSpec:
    """The architecture of the model in `folder`. End tokens in generation_config.json outrank config.json's,
    as they do in transformers. Raises WorkbenchError where the folder holds no config that is read here."""
    folder = Path(folder)
    file = folder / "config.json"
    if not file.is_file():
        fault = "no config.json in it" if folder.is_dir() else "no such folder"
        raise WorkbenchError(f"{folder}: {fault}; a model is a folder with config.json and *.safetensors")
    spec = spec_from_config(read_object(file), _name(folder), str(file))
    generation = folder / "generation_config.json"
    if generation.is_file():
        end_ids = Fields(read_object(generation), str(generation)).token_ids("eos_token_id")
        spec = spec if end_ids is None else spec.model_copy(update={"end_ids": end_ids})
    return spec


def spec_from_config(config: dict[str, Any], name: str, where: str = "config.json") -> ModelSpec:
    """`config` as a ModelSpec called `name`.

    Unknown keys are ignored. Missing and wrong fields raise WorkbenchError, and so do keys that are known to
    change what is computed and are not carried out here.
    """
    fields = Fields(config, where)
    family = fields.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        given = "is missing" if family is None else f"{family!r} is not read"
        hint = nearest(family, FAMILIES) if isinstance(family, str) else ""
        raise WorkbenchError(f"{where}: model_type {given}; read now: {', '.join(FAMILIES)}{hint}")
    return FAMILIES[family](fields, name)


def config_from_spec(spec: ModelSpec, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """The Llama config.json of `spec`: `spec_from_config` of it gives an equal spec. Raises WorkbenchError
    for what the format cannot say: layers that differ, windows, biases on one side of attention only."""
    kinds = set(spec.layers)
    if len(kinds) != 1:
        raise WorkbenchError(f"{spec.name}: a Llama config has one kind of layer, the spec {len(kinds)}")
    layer = kinds.pop()
    attention = layer.attention
    if attention.window is not None:
        raise WorkbenchError(f"{spec.name}: a Llama config has no window, the spec has {attention.window}")
    if attention.input_bias != attention.output_bias:
        raise WorkbenchError(f"{spec.name}: a Llama config has biases on all of attention or on none")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": spec.vocab,
        "hidden_size": spec.width,
        "intermediate_size": layer.hidden,
        "num_hidden_layers": len(spec.layers),
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.groups,
        "head_dim": attention.dim,
        "hidden_act": "silu",
        "max_position_embeddings": spec.context,
        "rms_norm_eps": spec.norm_eps,
        "attention_bias": attention.input_bias,
        "mlp_bias": layer.feedforward_bias,
        "tie_word_embeddings": spec.tied,
        "bos_token_id": None,
        "eos_token_id": _end_ids_to(spec.end_ids),
        "torch_dtype": str(dtype).removeprefix("torch."),
        **rotary_to(spec.rotary),
    }


def _llama(config: Fields, name: str) -> ModelSpec:
    _refuse_what_is_not_carried_out(config)
    attention_bias = config.boolean("attention_bias")
    heads = config.integer("num_attention_heads")
    groups = config.integer("num_key_value_heads", default=heads)
    if heads % groups:
        raise config.wrong("num_key_value_heads", groups, f"a divisor of num_attention_heads ({heads})")
    width = config.integer("hidden_size")
    layer = LayerKind(
        attention=Attention(
            heads=heads,
            groups=groups,
            dim=_head_dim(config, width, heads),
            input_bias=attention_bias,
            output_bias=attention_bias,
        ),
        hidden=config.integer("intermediate_size"),
        feedforward_bias=config.boolean("mlp_bias"),
    )
    return ModelSpec(
        name=name,
        vocab=config.integer("vocab_size"),
        width=width,
        layers=(layer,) * config.integer("num_hidden_layers", most=MOST_LAYERS),
        context=config.integer("max_position_embeddings"),
        rotary=rotary_from(config),
        norm_eps=config.number("rms_norm_eps", default=1e-6),
        tied=config.boolean("tie_word_embeddings"),
        end_ids=config.token_ids("eos_token_id") or (),
    )


FAMILIES: dict[str, Callable[[Fields, str], ModelSpec]] = {"llama": _llama}


def _head_dim(config: Fields, width: int, heads: int) -> int:
    dim = config.integer("head_dim", default=None, least=2)
    if dim is None and width % heads:
        raise config.wrong("hidden_size", width, f"a multiple of num_attention_heads ({heads})")
    if (dim or width // heads) % 2:
        raise config.wrong("head_dim", dim or width // heads, "even, because rotary turns pairs")
    return dim or width // heads


def _refuse_what_is_not_carried_out(config: Fields) -> None:
    architectures = config.get("architectures")
    if architectures is not None and (not isinstance(architectures, list) or "LlamaForCausalLM" not in architectures):
        raise config.wrong("architectures", architectures, '["LlamaForCausalLM"]')
    activation = config.get("hidden_act")
    if activation not in (None, "silu"):
        raise config.wrong("hidden_act", activation, '"silu": other activations are not carried out')
    for key, harmless in NOT_CARRIED_OUT.items():
        value = config.get(key)
        if value is not None and value not in harmless:
            raise config.wrong(key, value, "absent or null: what it changes is not carried out")
    window = config.get("sliding_window")
    if window is not None and config.get("use_sliding_window") is not False:
        raise config.wrong("sliding_window", window, "null: Llama layers see the whole context")
    kinds = config.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds)):
        raise config.wrong("layer_types", kinds, 'absent, or "full_attention" for every layer')


def _end_ids_to(end_ids: tuple[int, ...]) -> int | list[int] | None:
    return None if not end_ids else end_ids[0] if len(end_ids) == 1 else list(end_ids)


def _name(folder: Path) -> str:
    """The folder's own name; inside the Hugging Face cache (models--ORG--NAME/snapshots/HASH) the model's."""
    path = folder.resolve()
    cached = path.parent.parent.name
    if path.parent.name == "snapshots" and cached.startswith("models--"):
        return cached.removeprefix("models--").replace("--", "/")
    return path.name
