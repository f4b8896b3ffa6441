"""Convert the tensors of a Hugging Face Llama folder to GGUF's names and row order, with numpy only.

llama.cpp rotates neighbouring dimensions (2 i, 2 i + 1) of a head, Hugging Face dimensions i and i + head_dim / 2. The
rows of query and key are permuted so that both compute the same."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from math import pi
from pathlib import Path
from typing import Any

import numpy as np

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """Return the GGUF name of a Hugging Face tensor: `model.layers.3.self_attn.q_proj.weight` becomes
    `blk.3.attn_q.weight`."""
    stem, _, kind = name.rpartition(".")
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", stem)
    return f"blk.{layer[1]}.{NAMES[layer[2]]}.{kind}" if layer else f"{NAMES[stem]}.{kind}"


def permuted(rows: np.ndarray, heads: int) -> np.ndarray:
    """Return the rows of a query or key projection [heads * head_dim, ...] in llama.cpp's order: within each head (half
    pair) becomes (pair half)."""
    return rows.reshape(heads, 2, len(rows) // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def unpermuted(rows: np.ndarray, heads: int) -> np.ndarray:
    """Return rows in llama.cpp's order in Hugging Face's order again: the inverse of `permuted`."""
    return rows.reshape(heads, len(rows) // heads // 2, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def llama_tensors(folder: Path, config: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield every tensor of the folder as (GGUF name, float32 values), with the rows of query and key projections
    permuted."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, values in stored_tensors(folder):
        turned = heads.get(name.split(".")[-2])
        yield gguf_name(name), permuted(values, turned) if turned else values
    if (factors := rotary_factors(config)) is not None:
        yield "rope_freqs.weight", factors


def stored_tensors(folder: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the name and the float32 values of every tensor in the folder's safetensors files."""
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as stream:
            size = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(size))
        data = np.memmap(file, np.uint8, "r", offset=8 + size)
        for name, entry in header.items():
            if name != "__metadata__":
                start, end = entry["data_offsets"]
                yield name, _float32(data[start:end], entry["dtype"]).reshape(entry["shape"])


def _float32(data: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "F32":
        return data.view(np.float32)
    if dtype == "BF16":  # the upper half of a float32
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    raise ValueError(f"tensors of {dtype} are not read here; F32 and BF16 are")


def rotary_scaling(config: dict[str, Any]) -> dict[str, Any]:
    """Return the rotary scaling settings of a config.json, under either key: `rope_scaling` or `rope_parameters`."""
    return config.get("rope_scaling") or config.get("rope_parameters") or {}


def rotary_factors(config: dict[str, Any]) -> np.ndarray | None:
    """Return the divisors of the rotary frequencies that llama.cpp needs for Llama 3.1's scaling, [head_dim / 2]; None
    for any other scaling."""
    rope = rotary_scaling(config)
    if rope.get("rope_type", "default") != "llama3":
        return None
    base = rope.get("rope_theta", config.get("rope_theta", 10_000.0))
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    wavelength = 2 * pi * base ** (np.arange(0, dim, 2) / dim)
    low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
    smooth = (rope["original_max_position_embeddings"] / wavelength - low) / (high - low)
    return (1 / ((1 - smooth.clip(0, 1)) / factor + smooth.clip(0, 1))).astype(np.float32)
