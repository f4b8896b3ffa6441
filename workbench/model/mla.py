"""Compute multi-head latent attention (MLA, DeepSeek-V2, 2024) in absorbed form: many query heads read one cached
key/value head.

A head's score is q · (U c) = (Uᵀ q) · c, and its value V times the weighted sum of the latents c, so keys and values
are never computed for the context: queries are projected to the latent's width, and the result to the values' width.
"""

from __future__ import annotations

import torch
from einops import einsum, rearrange
from torch import Tensor, nn

from compiled_kernels import Backend
from workbench.model.attention_spec import MLASpec
from workbench.model.linear import Linear, RMSNorm
from workbench.model.mixer import Angles, AttentionMixer
from workbench.model.quantized import WeightFormat


class MLA(AttentionMixer[MLASpec]):
    """Multi-head latent attention: project to latents, absorb the key projection into queries, attend to the cache,
    project back. The cached head is the normed latent, then the rotated key; `up` holds U and V of each head, stays
    dense, and multiplies by torch's batched product on every backend."""

    def __init__(self, spec: MLASpec, hidden_size: int, backend: Backend, format: WeightFormat):
        super().__init__(spec, spec.qk_nope_head_dim + spec.qk_rope_head_dim, backend)
        self.sink_logits = None
        stored = backend, format.blocks, format.activations
        self.down = Linear(hidden_size, spec.down_proj_columns, spec.qkv_bias, *stored)
        if spec.q_lora_rank is not None:
            self.query_norm = RMSNorm(spec.q_lora_rank, spec.rms_norm_eps, backend)
            self.query_up = Linear(spec.q_lora_rank, spec.query_columns, False, *stored)
        self.latent_norm = RMSNorm(spec.kv_lora_rank, spec.rms_norm_eps, backend)
        self.up = nn.Parameter(torch.empty(spec.num_heads, spec.qk_nope_head_dim + spec.v_head_dim, spec.kv_lora_rank))
        self.output = Linear(spec.o_proj_inputs, hidden_size, spec.o_proj_bias, *stored)

    def qkv_proj(self, x: Tensor, cos: Angles, sin: Angles) -> tuple[Tensor, Tensor, Tensor]:
        """Project x [token, hidden] to three tensors: the absorbed queries q [token, head, head_dim], the keys k in
        cached form [token, 1, head_dim], and the latent part of k, which serves as values.
        """
        spec = self.spec
        query, latent, key = self.down(x).split(
            [spec.down_proj_columns - spec.head_dim, spec.kv_lora_rank, spec.qk_rope_head_dim], dim=1
        )
        if spec.q_lora_rank is not None:
            query = self.query_up(self.query_norm(query))
        query = rearrange(query, "token (head dim) -> token head dim", head=spec.num_heads)
        plain, rotary_part = query.split([spec.qk_nope_head_dim, spec.qk_rope_head_dim], dim=2)
        key_up = self.up[:, : spec.qk_nope_head_dim]
        absorbed = einsum(plain, key_up, "token head plain, head plain latent -> token head latent")
        latent = self.latent_norm(latent)[:, None]
        k = torch.cat([latent, self.apply_rotary(key[:, None], cos, sin)], dim=2)
        return torch.cat([absorbed, self.apply_rotary(rotary_part, cos, sin)], dim=2), k, latent

    def apply_rotary(self, x: Tensor, cos: Angles, sin: Angles) -> Tensor:
        """Rotate x [token, head, dim] by the angles of its tokens. Interleaved pairs are first reordered to halves, for
        queries and keys alike."""
        if self.spec.rope_interleave:
            x = rearrange(x, "token head (pair two) -> token head (two pair)", two=2)
        return super().apply_rotary(x, cos, sin)

    def o_proj(self, mixed: Tensor) -> Tensor:
        """Project the result of attention back to hidden states: [token, head, latent] -> [token, hidden]."""
        value_up = self.up[:, self.spec.qk_nope_head_dim :]
        values = einsum(mixed, value_up, "token head latent, head value latent -> token head value")
        return self.output(rearrange(values, "token head value -> token (head value)"))
