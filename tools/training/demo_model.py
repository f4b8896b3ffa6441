"""Define the demo models for training: a plain Llama that computes whole sequences, without a cache.

The parameters have Hugging Face's names, so that the workbench loads a checkpoint unchanged.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TARGET = {
    "hidden_size": 320, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 64, "intermediate_size": 832,
}  # fmt: skip
DRAFT = {  # narrow heads, to have enough of them: copying earlier text takes two in a row
    "hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "intermediate_size": 256,
}  # fmt: skip
COMMON = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 4096,
    "max_position_embeddings": 1024, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
    "tie_word_embeddings": True, "attention_bias": False, "mlp_bias": False, "torch_dtype": "bfloat16",
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
SHAPES = {"target": {**COMMON, **TARGET}, "draft": {**COMMON, **DRAFT}}


class Layer(nn.Module):
    def __init__(self, config: dict):
        super().__init__()
        width, hidden, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
        self.heads, self.groups, self.dim = config["num_attention_heads"], config["num_key_value_heads"], dim
        self.eps = config["rms_norm_eps"]
        self.input_layernorm = _Scale(width)
        query, key = self.heads * dim, self.groups * dim
        self.self_attn = nn.ModuleDict(
            {"q_proj": _Matrix(width, query), "k_proj": _Matrix(width, key), "v_proj": _Matrix(width, key),
             "o_proj": _Matrix(query, width)}
        )  # fmt: skip
        self.post_attention_layernorm = _Scale(width)
        self.mlp = nn.ModuleDict(
            {"gate_proj": _Matrix(width, hidden), "up_proj": _Matrix(width, hidden),
             "down_proj": _Matrix(hidden, width)}
        )  # fmt: skip

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, lengths: list[int] | None = None) -> Tensor:
        """Run one pre-norm block on `x` [seq, token, hidden] in its dtype.

        With `lengths` each sequence consists of several texts of these numbers of tokens, and no text attends to
        another.
        """
        seqs, tokens, _ = x.shape
        attn, mlp = self.self_attn, self.mlp
        h = _rms_norm(x, self.input_layernorm.weight, self.eps)
        qkv = _linear(h, attn["q_proj"], attn["k_proj"], attn["v_proj"])
        qkv = qkv.view(seqs, tokens, -1, self.dim).transpose(1, 2)
        q, k, v = qkv.split([self.heads, self.groups, self.groups], dim=1)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        share = self.heads // self.groups
        k, v = k.repeat_interleave(share, dim=1), v.repeat_interleave(share, dim=1)
        texts = (each.split(lengths or tokens, dim=2) for each in (q, k, v))
        parts = [F.scaled_dot_product_attention(*part, is_causal=True) for part in zip(*texts, strict=True)]
        mixed = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
        x = x + _linear(mixed.transpose(1, 2).reshape(seqs, tokens, -1), attn["o_proj"])
        h = _rms_norm(x, self.post_attention_layernorm.weight, self.eps)
        gate, up = _linear(h, mlp["gate_proj"], mlp["up_proj"]).chunk(2, dim=-1)
        return x + _linear(F.silu(gate) * up, mlp["down_proj"])


class _Body(nn.Module):
    """The whole model, under the one name Hugging Face puts before it."""

    def __init__(self, config: dict):
        super().__init__()
        self.embed_tokens = nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.layers = nn.ModuleList(Layer(config) for _ in range(config["num_hidden_layers"]))
        self.norm = _Scale(config["hidden_size"])


class Learner(nn.Module):
    """A Llama with `config` (Hugging Face's keys); `forward` returns the float32 logits of every position.

    Weights are float32; matrix products are computed in `dtype`.
    """

    def __init__(self, config: dict, seed: int, dtype: torch.dtype = torch.bfloat16):
        super().__init__()
        self.config, self.dtype = config, dtype
        self.model = _Body(config)
        half = config["head_dim"] // 2
        angles = torch.outer(
            torch.arange(config["max_position_embeddings"], dtype=torch.float32),
            config["rope_theta"] ** (-torch.arange(half, dtype=torch.float32) / half),
        )
        self.cos, self.sin = nn.Buffer(angles.cos(), persistent=False), nn.Buffer(angles.sin(), persistent=False)
        self._seed_weights(seed)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits [seq, token, vocab] of `ids` [seq, token]."""
        return self.logits(self.hidden_states(ids))

    def hidden_states(self, ids: Tensor, lengths: list[int] | None = None) -> Tensor:
        """Return the hidden states [seq, token, hidden] that the head reads.

        With `lengths` each sequence of `ids` [seq, token] consists of several texts of these numbers of tokens, each
        from position 0 on.
        """
        tokens = ids.shape[1]
        cos, sin = (torch.cat([table[:n] for n in lengths or [tokens]]) for table in (self.cos, self.sin))
        x = F.embedding(ids, self.model.embed_tokens.weight).to(self.dtype)
        for layer in self.model.layers:
            x = layer(x, cos, sin, lengths)
        return _rms_norm(x, self.model.norm.weight, self.config["rms_norm_eps"])

    def logits(self, hidden_states: Tensor) -> Tensor:
        """Return float32 logits [..., vocab] of `hidden_states` [..., hidden]."""
        return F.linear(hidden_states, self.model.embed_tokens.weight.to(self.dtype)).float()

    def _seed_weights(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(parameter)  # every block begins as the identity
            else:
                std = 0.02 if "embed" in name else 1 / math.sqrt(parameter.shape[1])
                nn.init.normal_(parameter, std=std, generator=generator)


class _Matrix(nn.Module):
    def __init__(self, width: int, out: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out, width))


class _Scale(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x.float(), (x.shape[-1],), weight, eps).to(x.dtype)


def _linear(x: Tensor, *matrices: nn.Module) -> Tensor:
    """Multiply by all `matrices` at once, and concatenate the outputs."""
    weights = [matrix.get_parameter("weight").to(x.dtype) for matrix in matrices]
    return F.linear(x, torch.cat(weights) if len(weights) > 1 else weights[0])


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
