"""Convert a Hugging Face config.json to a ModelSpec and back. Another family is one row of `FAMILIES`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from workbench.custom import registered
from workbench.errors import WorkbenchError, explain, nearest
from workbench.model.attention_spec import AttentionSpec
from workbench.model.checkpoint_names import LLAMA_NAMES, CheckpointNames
from workbench.model.formats.open import read_config
from workbench.model.hf import layer_norm_families, llama_relatives, mixtures, recurrent
from workbench.model.hf.architectures import gemma2, gemma3_text, gemma3n_text, gpt_oss, llama, mistral, qwen3
from workbench.model.hf.fields import ConfigFields, read_object
from workbench.model.hf.generation import GENERATION_FILE
from workbench.model.hf.rotary import write_rotary
from workbench.model.spec import LayerSpec, ModelSpec, NormSpec


def read_spec(path: str | Path, absent: list[str] | None = None) -> ModelSpec:
    """Read the spec of the model at `path` (a folder or file). End tokens in generation_config.json take precedence
    over config.json's, as in transformers. An id outside of the vocabulary is ignored and added to `absent`. Raises
    WorkbenchError if there is no supported config.
    """
    path = Path(path)
    config = read_config(path)
    spec = spec_from_config(config.values, _name(path), config.source)
    found = [(config.source, spec.eos_token_ids)]
    generation = path / GENERATION_FILE
    if generation.is_file():
        ids = ConfigFields(read_object(generation), str(generation)).token_ids("eos_token_id")
        found.append((str(generation), ids or ()))
    for source, ids in found:
        known = tuple(id for id in ids if 0 <= id < spec.vocab_size)
        if absent is not None:
            absent += [f"{Path(source).name}: eos_token_id {id}" for id in ids if id not in known]
        if known or source == config.source:
            spec = spec.model_copy(update={"eos_token_ids": known})
    return spec


def spec_from_config(config: dict[str, Any], name: str, where: str = "config.json") -> ModelSpec:
    """Convert `config` to a ModelSpec called `name`.

    Args:
        config: the object of config.json; unknown keys are ignored.
        name: the model's name.
        where: the file, for errors.

    Raises:
        WorkbenchError: for missing and wrong fields, and for unsupported keys that change the model.
    """
    fields = ConfigFields(config, where)
    try:
        return find_family(fields).read(fields, name)
    except ValidationError as error:
        raise explain(error, where) from None


def find_family(fields: ConfigFields) -> Family:
    """Return the family of a config by its `model_type`: a built-in family or a registered one (`workbench.register`).

    Raises WorkbenchError if there is none.
    """
    name = fields.get("model_type")
    found = (FAMILIES.get(name) or registered(name)) if isinstance(name, str) else None
    if isinstance(found, Family):
        return found
    given = "is missing" if name is None else f"{name!r} is not supported"
    hint = nearest(name, FAMILIES) if isinstance(name, str) else ""
    own = "; `workbench model new-family` begins one of your own" if isinstance(name, str) else ""
    raise WorkbenchError(f"{fields.source}: model_type {given}; supported: {', '.join(FAMILIES)}{hint}{own}")


def read_names(fields: ConfigFields) -> CheckpointNames:
    """Return the names of the tensors of a model with this config."""
    names = find_family(fields).names
    if fields.get("model_type") == "falcon" and not fields.boolean("new_decoder_architecture"):
        return replace(names, qkv_order="stacked" if fields.boolean("multi_query", default=True) else "by_group")
    if fields.get("model_type") == "falcon" and fields.get("num_ln_in_parallel_attn") in (None, 2):
        return replace(names, attention_norm="ln_attn", feedforward_norm="ln_mlp")
    return names


def config_from_spec(spec: ModelSpec, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """Return a Llama config.json for `spec`, from which `spec_from_config` makes an equal spec. Raises WorkbenchError
    for a spec that the format cannot express: different layers, and features outside of Llama's block.
    """
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
        "rms_norm_eps": spec.norm.eps,
        "attention_bias": attention.qkv_bias,
        "mlp_bias": layer.mlp_bias,
        "tie_word_embeddings": spec.tie_word_embeddings,
        "bos_token_id": None,
        "eos_token_id": _end_ids_to(spec.eos_token_ids),
        "torch_dtype": str(dtype).removeprefix("torch."),
        **write_rotary(spec.rotary),
    }


def _refuse_what_llama_has_not(spec: ModelSpec, attention: AttentionSpec, layer: LayerSpec) -> None:
    """Raise WorkbenchError for every field that the config lacks, unless it has its default."""
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
    sizes = {"name", "vocab_size", "hidden_size", "layers", "max_position_embeddings", "rotary", "norm",
             "tie_word_embeddings", "eos_token_ids"}  # fmt: skip
    if spec.norm != NormSpec(eps=spec.norm.eps):
        raise WorkbenchError(f"{spec.name}: a Llama config has a plain root-mean-square norm, the spec {spec.norm}")
    if spec.rotary.scaling.by_length:
        raise WorkbenchError(f"{spec.name}: {spec.rotary.scaling.kind} rotary scaling cannot be written")
    for name, field in type(spec).model_fields.items():
        if name not in sizes and getattr(spec, name) != field.default:
            raise WorkbenchError(f"{spec.name}: a Llama config has no {name}, the spec has {getattr(spec, name)}")


@dataclass(frozen=True)
class Family:
    """A model family: the reader of its config, and the names of its tensors."""

    read: Callable[[ConfigFields, str], ModelSpec]
    names: CheckpointNames = LLAMA_NAMES


def _named(**names: Any) -> CheckpointNames:
    return replace(LLAMA_NAMES, **names)


POST = {"attention_post_norm": "post_attention_layernorm", "feedforward_post_norm": "post_feedforward_layernorm"}
GEMMA_NAMES = _named(**POST, feedforward_norm="pre_feedforward_layernorm")
H = {"layer": "transformer.h", "embedding": "transformer.wte", "norm": "transformer.ln_f"}
GPT2_NAMES = _named(
    **H, positions="transformer.wpe", attention_norm="ln_1", feedforward_norm="ln_2", qkv="attn.c_attn",
    output="attn.c_proj", up="mlp.c_fc", down="mlp.c_proj", transposed=True,
)  # fmt: skip
GPTJ_NAMES = _named(
    **H, attention_norm="ln_1", queries="attn.q_proj", keys="attn.k_proj", values="attn.v_proj",
    output="attn.out_proj", up="mlp.fc_in", down="mlp.fc_out", interleaved=True,
)  # fmt: skip
NEOX_NAMES = _named(
    layer="gpt_neox.layers", embedding="gpt_neox.embed_in", norm="gpt_neox.final_layer_norm", head="embed_out",
    qkv="attention.query_key_value", qkv_order="by_group", output="attention.dense", up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
)  # fmt: skip
FALCON_NAMES = _named(
    layer="transformer.h", embedding="transformer.word_embeddings", norm="transformer.ln_f",
    qkv="self_attention.query_key_value", qkv_order="by_group", output="self_attention.dense",
    up="mlp.dense_h_to_4h", down="mlp.dense_4h_to_h",
)  # fmt: skip
FUSED = {"qkv": "self_attn.qkv_proj", "gate_up": "mlp.gate_up_proj"}
FAMILIES: dict[str, Family] = {
    "llama": Family(llama),
    "mistral": Family(mistral),
    "ministral": Family(llama_relatives.ministral),
    "qwen2": Family(llama_relatives.qwen2),
    "qwen3": Family(qwen3),
    "gemma": Family(llama_relatives.gemma),
    "gemma2": Family(gemma2, GEMMA_NAMES),
    "gemma3_text": Family(gemma3_text, GEMMA_NAMES),
    "gemma3n_text": Family(gemma3n_text, GEMMA_NAMES),
    "phi": Family(layer_norm_families.phi, _named(
        norm="model.final_layernorm", output="self_attn.dense", query_norm="self_attn.q_layernorm",
        key_norm="self_attn.k_layernorm", up="mlp.fc1", down="mlp.fc2",
    )),
    "phi3": Family(llama_relatives.phi3, _named(**FUSED)),
    "olmo": Family(layer_norm_families.olmo),
    "olmo2": Family(llama_relatives.olmo2, _named(**POST)),
    "olmo3": Family(llama_relatives.olmo3, _named(**POST)),
    "smollm3": Family(llama_relatives.smollm3),
    "granite": Family(llama_relatives.granite),
    "cohere": Family(layer_norm_families.cohere, _named(interleaved=True)),
    "cohere2": Family(layer_norm_families.cohere2, _named(interleaved=True)),
    "starcoder2": Family(layer_norm_families.starcoder2, _named(up="mlp.c_fc", down="mlp.c_proj")),
    "stablelm": Family(layer_norm_families.stablelm, _named(
        query_norm="self_attn.q_layernorm", key_norm="self_attn.k_layernorm", norm_per_head=".norms."
    )),
    "gpt2": Family(layer_norm_families.gpt2, GPT2_NAMES),
    "gpt_neox": Family(layer_norm_families.gpt_neox, NEOX_NAMES),
    "gptj": Family(layer_norm_families.gptj, GPTJ_NAMES),
    "falcon": Family(layer_norm_families.falcon, FALCON_NAMES),
    "opt": Family(layer_norm_families.opt, _named(
        layer="model.decoder.layers", embedding="model.decoder.embed_tokens",
        positions="model.decoder.embed_positions", norm="model.decoder.final_layer_norm",
        attention_norm="self_attn_layer_norm", feedforward_norm="final_layer_norm", output="self_attn.out_proj",
        up="fc1", down="fc2",
    )),
    "bloom": Family(layer_norm_families.bloom, replace(
        FALCON_NAMES, embedding_norm="transformer.word_embeddings_layernorm",
    )),
    "mpt": Family(layer_norm_families.mpt, _named(
        layer="transformer.blocks", embedding="transformer.wte", norm="transformer.norm_f", attention_norm="norm_1",
        feedforward_norm="norm_2", qkv="attn.Wqkv", output="attn.out_proj", up="ffn.up_proj", down="ffn.down_proj",
    )),
    "nemotron": Family(layer_norm_families.nemotron),
    "exaone4": Family(llama_relatives.exaone4, _named(**POST)),
    "glm": Family(llama_relatives.glm, _named(gate_up="mlp.gate_up_proj", interleaved=True)),
    "glm4": Family(llama_relatives.glm4, _named(
        gate_up="mlp.gate_up_proj", interleaved=True, attention_post_norm="post_self_attn_layernorm",
        feedforward_post_norm="post_mlp_layernorm",
    )),
    "ernie4_5": Family(llama_relatives.ernie4_5, _named(interleaved=True)),
    "seed_oss": Family(llama_relatives.seed_oss),
    "helium": Family(llama_relatives.helium, _named(interleaved=True)),
    "ministral3": Family(llama_relatives.ministral3),
    "apertus": Family(llama_relatives.apertus, _named(
        attention_norm="attention_layernorm", feedforward_norm="feedforward_layernorm"
    )),
    "arcee": Family(llama_relatives.arcee),
    "hunyuan_v1_dense": Family(llama_relatives.hunyuan_v1_dense, _named(
        query_norm="self_attn.query_layernorm", key_norm="self_attn.key_layernorm"
    )),
    "mixtral": Family(mixtures.mixtral, _named(
        router="block_sparse_moe.gate", expert_gate="block_sparse_moe.experts.{expert}.w1",
        expert_up="block_sparse_moe.experts.{expert}.w3", expert_down="block_sparse_moe.experts.{expert}.w2",
    )),
    "qwen2_moe": Family(mixtures.qwen2_moe, _named(shared="mlp.shared_expert")),
    "qwen3_moe": Family(mixtures.qwen3_moe),
    "olmoe": Family(mixtures.olmoe),
    "granitemoe": Family(mixtures.granitemoe, _named(
        router="block_sparse_moe.router.layer", experts="fused", expert_gate="block_sparse_moe.input_linear",
        expert_down="block_sparse_moe.output_linear",
    )),
    "phimoe": Family(mixtures.phimoe, _named(
        router="block_sparse_moe.gate", expert_gate="block_sparse_moe.experts.{expert}.w1",
        expert_up="block_sparse_moe.experts.{expert}.w3", expert_down="block_sparse_moe.experts.{expert}.w2",
    )),
    "llama4_text": Family(mixtures.llama4_text, _named(
        interleaved=True, gate="feed_forward.gate_proj", up="feed_forward.up_proj", down="feed_forward.down_proj",
        router="feed_forward.router", experts="fused_transposed", expert_gate="feed_forward.experts.gate_up_proj",
        expert_down="feed_forward.experts.down_proj", shared="feed_forward.shared_expert",
    )),
    "deepseek_v2": Family(mixtures.deepseek_v2),
    "deepseek_v3": Family(mixtures.deepseek_v3),
    "lfm2": Family(recurrent.lfm2, _named(
        norm="model.embedding_norm", attention_norm="operator_norm", feedforward_norm="ffn_norm", recurrent="conv",
        output="self_attn.out_proj", query_norm="self_attn.q_layernorm", key_norm="self_attn.k_layernorm",
        gate="feed_forward.w1", up="feed_forward.w3", down="feed_forward.w2",
    )),
    "mamba2": Family(recurrent.mamba2, _named(
        layer="backbone.layers", embedding="backbone.embeddings", norm="backbone.norm_f", attention_norm="norm",
        recurrent="mixer",
    )),
    "bamba": Family(recurrent.bamba, _named(
        norm="model.final_layernorm", feedforward_norm="pre_ff_layernorm", recurrent="mamba",
        gate="feed_forward.gate_proj", up="feed_forward.up_proj", down="feed_forward.down_proj",
    )),
    "falcon_h1": Family(recurrent.falcon_h1, _named(
        norm="model.final_layernorm", feedforward_norm="pre_ff_layernorm", recurrent="mamba",
        gate="feed_forward.gate_proj", up="feed_forward.up_proj", down="feed_forward.down_proj",
    )),
    "qwen3_next": Family(recurrent.qwen3_next, _named(recurrent="linear_attn", shared="mlp.shared_expert")),
    "gpt_oss": Family(gpt_oss, _named(
        router="mlp.router", experts="woven", expert_gate="mlp.experts.gate_up_proj",
        expert_down="mlp.experts.down_proj",
    )),
}  # fmt: skip


def _end_ids_to(eos_token_ids: tuple[int, ...]) -> int | list[int] | None:
    return None if not eos_token_ids else eos_token_ids[0] if len(eos_token_ids) == 1 else list(eos_token_ids)


def _name(folder: Path) -> str:
    """Return the folder's own name; inside the Hugging Face cache (models--ORG--NAME/snapshots/HASH) the model's."""
    path = folder.resolve()
    cached = path.parent.parent.name
    if path.parent.name == "snapshots" and cached.startswith("models--"):
        return cached.removeprefix("models--").replace("--", "/")
    return path.name
