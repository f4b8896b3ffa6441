"""Conversion of a Hugging Face config.json to a ModelSpec and back. A further family is one function in `FAMILIES`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from workbench.errors import WorkbenchError, nearest
from workbench.model.hf.architectures import deepseek_v3, gemma2, gemma3_text, gpt_oss, llama, mistral, qwen3
from workbench.model.hf.fields import ConfigFields, read_object
from workbench.model.hf.rotary import write_rotary
from workbench.model.spec import AttentionSpec, LayerSpec, ModelSpec


def read_spec(folder: str | Path) -> ModelSpec:
    """Read the architecture of the model in `folder`. End tokens in generation_config.json outrank config.json's, as
    they do in transformers. Raises WorkbenchError where the folder holds no config that is read here."""
    folder = Path(folder)
    file = folder / "config.json"
    if not file.is_file():
        fault = "no config.json in it" if folder.is_dir() else "no such folder"
        raise WorkbenchError(f"{folder}: {fault}; a model is a folder with config.json and *.safetensors")
    spec = spec_from_config(read_object(file), _name(folder), str(file))
    generation = folder / "generation_config.json"
    if generation.is_file():
        eos_token_ids = ConfigFields(read_object(generation), str(generation)).token_ids("eos_token_id")
        spec = spec if eos_token_ids is None else spec.model_copy(update={"eos_token_ids": eos_token_ids})
    return spec


def spec_from_config(config: dict[str, Any], name: str, where: str = "config.json") -> ModelSpec:
    """Convert `config` to a ModelSpec called `name`.

    Args:
        config: the object of config.json; unknown keys are ignored.
        name: the model's name.
        where: the file, for errors.

    Raises:
        WorkbenchError: for missing and wrong fields, and for keys that are known to change the model and are not
            supported.
    """
    fields = ConfigFields(config, where)
    family = fields.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        given = "is missing" if family is None else f"{family!r} is not read"
        hint = nearest(family, FAMILIES) if isinstance(family, str) else ""
        raise WorkbenchError(f"{where}: model_type {given}; read now: {', '.join(FAMILIES)}{hint}")
    return FAMILIES[family](fields, name)


def config_from_spec(spec: ModelSpec, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """Return the Llama config.json of `spec`: `spec_from_config` of it gives an equal spec. Raises WorkbenchError for
    what the format cannot express: layers that differ, and all that is not in Llama's block."""
    kinds = set(spec.layers)
    if len(kinds) != 1:
        raise WorkbenchError(f"{spec.name}: a Llama config has one kind of layer, the spec {len(kinds)}")
    layer = kinds.pop()
    attention = layer.attention
    if not isinstance(attention, AttentionSpec):
        raise WorkbenchError(f"{spec.name}: a Llama config has grouped attention, the spec {attention.kind}")
    if attention.qkv_bias != attention.o_proj_bias:
        raise WorkbenchError(f"{spec.name}: a Llama config has biases on all of attention or on none")
    _refuse_what_llama_has_not(spec, attention, layer)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": layer.intermediate_size,
        "num_hidden_layers": len(spec.layers),
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": spec.max_position_embeddings,
        "rms_norm_eps": spec.rms_norm_eps,
        "attention_bias": attention.qkv_bias,
        "mlp_bias": layer.mlp_bias,
        "tie_word_embeddings": spec.tie_word_embeddings,
        "bos_token_id": None,
        "eos_token_id": _end_ids_to(spec.eos_token_ids),
        "torch_dtype": str(dtype).removeprefix("torch."),
        **write_rotary(spec.rotary),
    }


def _refuse_what_llama_has_not(spec: ModelSpec, attention: AttentionSpec, layer: LayerSpec) -> None:
    """Refuse every field that the config does not hold, unless it is at its default."""
    heads = {"num_heads": 1, "num_kv_heads": 1, "head_dim": 2, "qkv_bias": False, "o_proj_bias": False}
    plain = AttentionSpec(num_heads=1, num_kv_heads=1, head_dim=2)
    for given, right in (
        (attention.model_copy(update=heads), plain),
        (layer.model_copy(update={"attention": plain, "intermediate_size": 1, "mlp_bias": False}),
         LayerSpec(attention=plain, intermediate_size=1)),
    ):  # fmt: skip
        for name in type(right).model_fields:
            if getattr(given, name) != getattr(right, name):
                raise WorkbenchError(f"{spec.name}: a Llama config has no {name}, the spec has {getattr(given, name)}")
    for name, right in (("norm_offset", 0.0), ("embedding_scale", 1.0), ("final_logit_softcapping", 0.0)):
        if getattr(spec, name) != right:
            raise WorkbenchError(f"{spec.name}: a Llama config has no {name}, the spec has {getattr(spec, name)}")


FAMILIES: dict[str, Callable[[ConfigFields, str], ModelSpec]] = {
    "llama": llama,
    "mistral": mistral,
    "qwen3": qwen3,
    "gemma2": gemma2,
    "gemma3_text": gemma3_text,
    "gpt_oss": gpt_oss,
    "deepseek_v3": deepseek_v3,
}


def _end_ids_to(eos_token_ids: tuple[int, ...]) -> int | list[int] | None:
    return None if not eos_token_ids else eos_token_ids[0] if len(eos_token_ids) == 1 else list(eos_token_ids)


def _name(folder: Path) -> str:
    """Return the folder's own name; inside the Hugging Face cache (models--ORG--NAME/snapshots/HASH) the model's."""
    path = folder.resolve()
    cached = path.parent.parent.name
    if path.parent.name == "snapshots" and cached.startswith("models--"):
        return cached.removeprefix("models--").replace("--", "/")
    return path.name
