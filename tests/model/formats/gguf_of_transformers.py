"""Write a model of transformers as GGUF, by the rules of llama.cpp's converter (conversion/*.py), with the `gguf`
package. It knows nothing of our reader's tables."""

from __future__ import annotations

import builtins
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from workbench.model.formats.gguf.blocks import BLOCK_TYPES

ARCHITECTURES = {
    "llama": "LLAMA", "mistral": "LLAMA", "mixtral": "LLAMA", "qwen2": "QWEN2", "qwen2_moe": "QWEN2MOE",
    "qwen3": "QWEN3", "qwen3_moe": "QWEN3MOE", "gemma": "GEMMA", "gemma2": "GEMMA2", "gemma3_text": "GEMMA3",
    "phi": "PHI2", "phi3": "PHI3", "gpt2": "GPT2", "starcoder2": "STARCODER2", "gpt_neox": "GPTNEOX",
    "falcon": "FALCON", "stablelm": "STABLELM", "nemotron": "NEMOTRON", "olmo": "OLMO", "olmo2": "OLMO2",
    "olmo3": "OLMO2", "olmoe": "OLMOE", "granite": "GRANITE", "granitemoe": "GRANITE_MOE", "smollm3": "SMOLLM3",
    "arcee": "ARCEE", "cohere": "COMMAND_R", "cohere2": "COHERE2", "exaone4": "EXAONE4", "glm4": "GLM4",
    "ernie4_5": "ERNIE4_5", "seed_oss": "SEED_OSS", "hunyuan_v1_dense": "HUNYUAN_DENSE", "gpt_oss": "GPT_OSS",
}  # fmt: skip
PERMUTED = ("llama", "mistral", "mixtral", "granite", "granitemoe", "smollm3", "olmo", "arcee")
NORMS_PLUS_1 = ("gemma", "gemma2", "gemma3_text", "nemotron")
KEYS_OF_ONE_FAMILY = ("gpt2", "gpt_neox", "gemma", "gemma2", "phi")  # their converters do not call the common function
EXPERTS = re.compile(r"(.*(?:mlp|block_sparse_moe)\.experts)\.(\d+)\.(\w+)\.weight")


def write_gguf(
    model: Any,
    path: Path,
    folder: Path,
    kind: str = "F32",
    eos: int | None = None,
    widened: bool = False,
    changed: dict[str, Any] | None = None,
    tensors_per_file: int = 0,
    own: Mapping[str, str] = {},  # noqa: B006 (read only)
) -> Path:
    """Write `model` to `path`; matrices as `kind`, and what has one axis as float32.

    Args:
        model: of transformers.
        path: the file.
        folder: a place for its safetensors, whose names the converter reads.
        kind: the type of matrices; random blocks where the package does not quantize to it.
        eos: the id of the end token.
        widened: the same numbers, dequantized by the package, in float32.
        changed: metadata that replace or follow the others.
        tensors_per_file: split the file.
        own: types of matrices by a part of their GGUF names, in place of `kind`.
    """
    model.save_pretrained(folder)
    config = model.config.to_dict()
    family = config["model_type"]
    arch = gguf.MODEL_ARCH[ARCHITECTURES[family]]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch], split_max_tensors=tensors_per_file)
    _metadata(writer, config, family)
    if eos is not None:
        writer.add_eos_token_id(eos)
    layers = config.get("num_hidden_layers") or config.get("n_layer")
    names = gguf.get_tensor_name_map(arch, layers)
    dense = {name: tensor.float() for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    for name, tensor in _modified(dense, config, family):
        stem, _, end = name.rpartition(".")
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None, f"{family}: no GGUF name of {name}"
        assert end in ("weight", "bias") and stem
        values = tensor.contiguous().numpy()
        plain = values.ndim == 1 or "ffn_gate_inp" in found or "norm" in found
        stored = next((each for part, each in own.items() if part in found), kind)
        type = gguf.GGMLQuantizationType["F32" if plain else stored]
        data = _blocks(values, type)
        if widened:
            data, type = gguf.dequantize(data, type).reshape(values.shape), gguf.GGMLQuantizationType.F32
        writer.add_tensor(found, data, raw_dtype=type)
    if (factors := _rope_factors(config)) is not None and family in PERMUTED:
        writer.add_tensor("rope_freqs.weight", factors)
    for key, value in (changed or {}).items():
        writer.kv_data[0].pop(key, None)
        add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
        add[type_of(value)](key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


type_of = builtins.type


def _blocks(values: np.ndarray, type: Any) -> np.ndarray:
    """Return `values` as blocks; of a type that the package does not write, random ones with small scales."""
    try:
        return gguf.quants.quantize(values, type)
    except NotImplementedError:
        size, nbytes = gguf.GGML_QUANT_SIZES[type]
    random = np.random.default_rng(values.size)
    blocks = random.integers(0, 256, (values.size // size, nbytes), dtype=np.uint8)
    for at in BLOCK_TYPES[type.value].scales:
        scales = random.uniform(1e-5, 1e-4, (len(blocks), 1)).astype(np.float16)
        blocks[:, at : at + 2] = scales.view(np.uint8)
    return blocks.reshape(*values.shape[:-1], -1)


def _permute(tensor: Tensor, heads: int) -> Tensor:
    return tensor.reshape(heads, 2, len(tensor) // heads // 2, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)


def _modified(stored: dict[str, Tensor], config: dict[str, Any], family: str) -> Iterator[tuple[str, Tensor]]:
    heads = config.get("num_attention_heads") or config.get("n_head") or 0
    groups = config.get("num_key_value_heads") or heads
    experts: dict[str, dict[int, Tensor]] = {}
    per_head: dict[str, dict[int, Tensor]] = {}
    for name, tensor in stored.items():
        if name.endswith((".attn.bias", ".attn.masked_bias", "rotary_emb.inv_freq")):
            continue
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        if family in PERMUTED and name.endswith(("q_proj.weight", "q_proj.bias")):
            tensor = _permute(tensor, heads)
        if family in PERMUTED and name.endswith(("k_proj.weight", "k_proj.bias")):
            tensor = _permute(tensor, groups)
        if family in NORMS_PLUS_1 and name.endswith("norm.weight"):
            tensor = tensor + 1
        if family == "gpt2" and name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")):
            tensor = tensor.T
        if found := EXPERTS.fullmatch(name):
            experts.setdefault(f"{found[1]}.{found[3]}", {})[int(found[2])] = tensor
        elif found := re.fullmatch(r"(.*\.[qk]_layernorm)\.norms\.(\d+)\.weight", name):
            per_head.setdefault(found[1], {})[int(found[2])] = tensor
        elif name.endswith("block_sparse_moe.input_linear.weight"):
            gate, up = tensor.chunk(2, dim=-2)
            layer = name.split(".")[2]
            yield f"model.layers.{layer}.mlp.experts.gate_proj.weight", gate
            yield f"model.layers.{layer}.mlp.experts.up_proj.weight", up
        elif "query_key_value" in name:
            yield name, _stacked(tensor, config, family, heads)
        elif family == "gpt_oss" and ("experts" in name or "sinks" in name):
            yield from _gpt_oss(name, tensor)
        else:
            yield name, tensor
    for name, parts in experts.items():
        name = re.sub(r"model\.(layers\.\d+)\.block_sparse_moe\.", r"\1.feed_forward.", name)
        yield f"{name}.weight", torch.stack([parts[expert] for expert in sorted(parts)])
    for name, parts in per_head.items():
        yield f"{name}.weight", torch.stack([parts[head] for head in sorted(parts)])


def _stacked(tensor: Tensor, config: dict[str, Any], family: str, heads: int) -> Tensor:
    """Put all queries first, then all keys, then all values."""
    dim = config["hidden_size"] // heads
    if family == "gpt_neox":
        parts = tensor.reshape(heads, 3, dim, *tensor.shape[1:])
        return torch.cat([parts[:, index].flatten(0, 1) for index in range(3)])
    groups = config["num_kv_heads"] if config["new_decoder_architecture"] else 1
    parts = tensor.reshape(groups, heads // groups + 2, dim, *tensor.shape[1:])
    return torch.cat([part.flatten(0, 2) for part in (parts[:, :-2], parts[:, -2:-1], parts[:, -1:])])


def _gpt_oss(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    if name.endswith("sinks"):
        yield f"{name}.weight", tensor
    elif name.endswith("down_proj_bias"):
        yield name.replace("_bias", ".bias"), tensor
    elif name.endswith("down_proj"):
        yield f"{name}.weight", tensor.transpose(-1, -2)
    else:
        bias = name.endswith("_bias")
        turned = tensor if bias else tensor.transpose(-1, -2)
        for part, at in (("gate", 0), ("up", 1)):
            ours = name.replace("gate_up_proj_bias", f"{part}_proj.bias").replace("gate_up_proj", f"{part}_proj.weight")
            yield ours, turned[:, at::2]


def _metadata(writer: Any, config: dict[str, Any], family: str) -> None:
    def find(*keys: str) -> Any:
        return next((config[key] for key in keys if config.get(key) is not None), None)

    rope = config.get("rope_parameters") or {}
    full = rope.get("full_attention", rope)
    width, heads = find("hidden_size", "n_embd"), find("num_attention_heads", "n_head")
    writer.add_block_count(find("num_hidden_layers", "n_layer"))
    writer.add_context_length(find("max_position_embeddings", "n_positions"))
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(
        4 * width if family in ("gpt2", "falcon") else find("intermediate_size", "n_inner", "ffn_hidden_size")
    )
    writer.add_head_count(heads)
    if (groups := find("num_key_value_heads", "num_kv_heads")) is not None and family != "falcon":
        writer.add_head_count_kv(groups)
    if family == "falcon":
        writer.add_head_count_kv(config["num_kv_heads"] if config["new_decoder_architecture"] else 1)
    if (dim := config.get("head_dim")) is not None and family not in ("granite", "granitemoe"):
        writer.add_key_length(dim)
        writer.add_value_length(dim)
    if (eps := find("rms_norm_eps")) is not None:
        writer.add_layer_norm_rms_eps(eps)
    if (eps := find("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")) is not None:
        writer.add_layer_norm_eps(eps)
    if family not in KEYS_OF_ONE_FAMILY:
        _rope(writer, rope, full)
        if (count := find("num_local_experts", "num_experts")) is not None and count > 1:
            writer.add_expert_count(count)
        if (used := find("num_experts_per_tok")) is not None:
            writer.add_expert_used_count(used)
    _own(writer, config, family, full, width // heads)


def _rope(writer: Any, rope: dict[str, Any], full: dict[str, Any]) -> None:
    kind = full.get("rope_type")
    if kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(full["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(full["factor"])
        writer.add_rope_scaling_orig_ctx_len(full["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(full["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(full["beta_slow"])
    if "rope_theta" in full:
        writer.add_rope_freq_base(full["rope_theta"])
    if (local := rope.get("sliding_attention", {}).get("rope_theta")) is not None:
        writer.add_rope_freq_base_swa(local)


def _own(writer: Any, config: dict[str, Any], family: str, rope: dict[str, Any], dim: int) -> None:
    """Add what each family's converter adds."""
    share = config.get("partial_rotary_factor") or rope.get("partial_rotary_factor") or 1.0
    if family in ("llama", "mistral", "mixtral", "smollm3", "arcee"):
        writer.add_vocab_size(config["vocab_size"])
        writer.add_rope_dimension_count(config.get("head_dim") or dim)
    if family == "granite" or family == "granitemoe":
        writer.add_vocab_size(config["vocab_size"])
        writer.add_rope_dimension_count(dim)
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    if family in ("qwen2_moe", "qwen3_moe"):
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if family == "qwen2_moe":
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    if family == "gemma3_text" and config["final_logit_softcapping"]:
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if family == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if family in ("gemma2", "gemma3_text", "cohere2", "gpt_oss", "exaone4", "phi3", "olmo3"):
        writer.add_sliding_window(config["sliding_window"] or 0)
    if family == "phi3":
        original = rope.get("original_max_position_embeddings") or config["max_position_embeddings"]
        writer.add_rope_scaling_orig_ctx_len(original)
        if rope.get("long_factor"):
            scale = config["max_position_embeddings"] / original
            writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(original)))
            for name in ("long", "short"):
                writer.add_tensor(f"rope_factors_{name}.weight", np.array(rope[f"{name}_factor"], np.float32))
    if family in ("phi", "phi3", "stablelm", "nemotron", "glm4"):
        writer.add_rope_dimension_count(int(share * (config.get("head_dim") or dim)))
    if family == "gpt_neox":
        writer.add_rope_dimension_count(int((config.get("rotary_pct") or share) * dim))
        writer.add_parallel_residual(config["use_parallel_residual"])
    if family == "stablelm":
        writer.add_parallel_residual(config["use_parallel_residual"])
    if family == "nemotron":
        writer.add_vocab_size(config["vocab_size"])
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    if family == "olmo":
        writer.add_layer_norm_eps(1e-5)
        if config["clip_qkv"] is not None:
            writer.add_clamp_kqv(config["clip_qkv"])
    if family in ("olmo3", "exaone4"):
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    if family in ("cohere", "cohere2"):
        writer.add_logit_scale(config["logit_scale"])
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    if family == "cohere2":
        writer.add_vocab_size(config["vocab_size"])
        writer.add_rope_dimension_count(dim)
    if family == "gpt_oss":
        writer.add_expert_feed_forward_length(config["intermediate_size"])


def _rope_factors(config: dict[str, Any]) -> np.ndarray | None:
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") != "llama3":
        return None
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    frequencies = 1.0 / (rope["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    low, high, old = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
    factors = []
    for frequency in frequencies:
        wavelength = 2 * torch.pi / frequency
        if wavelength < old / high:
            factors.append(1.0)
        elif wavelength > old / low:
            factors.append(rope["factor"])
        else:
            smooth = (old / wavelength - low) / (high - low)
            factors.append(float(1 / ((1 - smooth) / rope["factor"] + smooth)))
    return np.array(factors, np.float32)
