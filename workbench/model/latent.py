"""Multi-head latent attention (MLA, DeepSeek-V2, 2024), absorbed: it reads its cache as many query heads on one
key/value head.

A head's score is q · (U c) = (Uᵀ q) · c, and its value V times the weighted sum of the latents c, so that keys and
values are never made for the context: queries go to the latent's width, what was read comes to the values' width.
"""

from __future__ import annotations

import torch
from einops import einsum, rearrange
from torch import Tensor, nn

import compiled_kernels
from compiled_kernels import Lane
from workbench.batch import TokenBatch
from workbench.cache.store import Layer
from workbench.model.latent_spec import LatentAttention as LatentSpec
from workbench.model.own_parts import mask_of, score_of
from workbench.model.parts import Linear, Norm
from workbench.model.quantized import WeightFormat


class LatentAttention(nn.Module):
    """Multi-head latent attention: project to latents, absorb, attend to the cache, project back. The cached head is
    the normed latent, then the rotated key; `up` holds U and V of each head, stays dense, and multiplies by torch's
    batched product on every backend."""

    def __init__(self, spec: LatentSpec, width: int, lane: Lane, format: WeightFormat):
        super().__init__()
        self.spec = spec
        self.lane = lane
        self.scale = (spec.plain_dim + spec.rope_dim) ** -0.5 if spec.scale is None else spec.scale
        self.mask, self.score = mask_of(spec), score_of(spec)
        stored = lane, format.blocks, format.group, format.activations_of(format.blocks)
        self.down = Linear(width, spec.down, spec.input_bias, *stored)
        if spec.query_latent is not None:
            self.query_norm = Norm(spec.query_latent, spec.norm_eps, lane)
            self.query_up = Linear(spec.query_latent, spec.queries, False, *stored)
        self.latent_norm = Norm(spec.latent, spec.norm_eps, lane)
        self.up = nn.Parameter(torch.empty(spec.heads, spec.plain_dim + spec.value_dim, spec.latent))
        self.output = Linear(spec.mixed, width, spec.output_bias, *stored)

    def project(self, x: Tensor, cos: Tensor | None, sin: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Project x [token, hidden] to q [token, head, head_dim] absorbed, k [token, 1, head_dim] as it is cached, and
        k's latent."""
        spec = self.spec
        query, latent, key = self.down(x).split([spec.down - spec.dim, spec.latent, spec.rope_dim], dim=1)
        if spec.query_latent is not None:
            query = self.query_up(self.query_norm(query))
        query = rearrange(query, "token (head dim) -> token head dim", head=spec.heads)
        plain, turned = query.split([spec.plain_dim, spec.rope_dim], dim=2)
        key_up = self.up[:, : spec.plain_dim]
        absorbed = einsum(plain, key_up, "token head plain, head plain latent -> token head latent")
        latent = self.latent_norm(latent)[:, None]
        k = torch.cat([latent, self.turn(key[:, None], cos, sin)], dim=2)
        return torch.cat([absorbed, self.turn(turned, cos, sin)], dim=2), k, latent

    def turn(self, x: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
        """Rotate x [token, head, dim] by the angles of its tokens; interleaved pairs are brought to halves first, for
        queries and keys alike."""
        assert cos is not None and sin is not None
        if self.spec.interleaved:
            x = rearrange(x, "token head (pair two) -> token head (two pair)", two=2)
        return compiled_kernels.rotary(x, cos, sin, self.lane)

    def read(self, q: Tensor, batch: TokenBatch, cache: Layer, lane: Lane | None = None) -> Tensor:
        """Attend to the cache: weighted sums of latents [token, head, latent]; on the module's backend unless given."""
        rule = self.spec.softcap, None, self.score
        return cache.attend(q, batch, self.scale, self.mask, lane or self.lane, *rule)

    def close(self, mixed: Tensor) -> Tensor:
        """Project the result of attention back: [token, head, latent] -> [token, hidden]."""
        value_up = self.up[:, self.spec.plain_dim :]
        values = einsum(mixed, value_up, "token head latent, head value latent -> token head value")
        return self.output(rearrange(values, "token head value -> token (head value)"))
