"""Compute the gated delta rule: linear attention whose state decays, and is corrected towards the value of each key.

For each head, with state S [key, value]: S <- g S; S <- S + beta k (v - S^T k)^T; y = S^T q (Yang et al., 2025, Gated
Delta Networks, equation 10). `delta_rule_by_token` is the specification, `delta_rule_by_chunk` computes many tokens by
matrix products.
"""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn.functional import silu, softplus

from compiled_kernels import Backend
from workbench.kv_cache.layer import States
from workbench.model.mixer import Angles
from workbench.model.quantized import WeightFormat
from workbench.model.recurrent.mixer import RecurrentMixer, rms_norm_rows
from workbench.model.recurrent.spec import DeltaNetSpec

CHUNK_TOKENS = 32
L2_EPS = 1e-6


def delta_rule_by_token(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Run the gated delta rule token by token.

    Args:
        q: queries [seq, token, head, key].
        k: keys [seq, token, head, key].
        v: values [seq, token, head, value].
        decay: logarithms of the factors by which the state decays, at most 0: [seq, token, head].
        beta: strength of the correction, in 0..1: [seq, token, head].
        state: the state before the tokens, [seq, head, key, value].

    Returns:
        outputs [seq, token, head, value], and the state after the tokens.
    """
    outputs = []
    for t in range(q.shape[1]):
        state = state * decay[:, t, :, None, None].exp()
        stored = (state * k[:, t, :, :, None]).sum(-2)
        change = beta[:, t, :, None] * (v[:, t] - stored)
        state = state + k[:, t, :, :, None] * change[:, :, None]
        outputs.append((state * q[:, t, :, :, None]).sum(-2))
    return torch.stack(outputs, dim=1), state


def delta_rule_by_chunk(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Run the gated delta rule over chunks of `CHUNK_TOKENS` tokens; arguments as for `delta_rule_by_token`.

    Within a chunk the corrections u solve (I + A) u = beta (v - exp(c) S^T k), where A[i, j] = beta_i exp(c_i - c_j)
    k_i k_j for j < i, and c is the sum of decays since the chunk began (the WY form of Yang et al., 2024).
    """
    outputs = []
    for chunk in zip(*(part.split(CHUNK_TOKENS, dim=1) for part in (q, k, v, decay, beta)), strict=True):
        q, k, v, decay, beta = (part.transpose(1, 2) for part in chunk)  # [seq, head, token, ...]
        since = decay.cumsum(-1)
        between = (since[..., :, None] - since[..., None, :]).tril().exp().tril()
        system = (beta[..., None] * (k @ k.mT) * between).tril(-1)
        begun = since.exp()[..., None]
        wanted = beta[..., None] * (v - begun * (k @ state))
        change = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
        outputs.append(begun * (q @ state) + ((q @ k.mT) * between) @ change)
        left = (since[..., -1:] - since).exp()[..., None]
        state = state * since[..., -1, None, None].exp() + (k * left).mT @ change
    return torch.cat(outputs, dim=2).transpose(1, 2), state


class DeltaNet(RecurrentMixer[DeltaNetSpec]):
    """The recurrent layer of Qwen 3 Next: a convolution of queries, keys and values, the gated delta rule, and a gated
    norm.
    """

    def __init__(self, spec: DeltaNetSpec, hidden_size: int, backend: Backend, format: WeightFormat):
        super().__init__(spec, hidden_size, backend, format)
        self.log_decay = nn.Parameter(torch.empty(spec.num_value_heads))
        self.decay_bias = nn.Parameter(torch.empty(spec.num_value_heads))
        self.norm_weight = nn.Parameter(torch.empty(spec.value_dim))

    def project(self, x: Tensor, cos: Angles, sin: Angles) -> tuple[Tensor, ...]:
        widths = [self.spec.channels, self.spec.o_proj_inputs, 2 * self.spec.num_value_heads]
        mixed, z, gates = self.input(x).split(widths, dim=-1)
        return torch.cat([mixed, gates], dim=-1), z

    def gated(self, y: Tensor, gate: Tensor) -> Tensor:
        y, z = (
            rearrange(part, "token (head dim) -> token head dim", head=self.spec.num_value_heads) for part in (y, gate)
        )
        normed = rms_norm_rows(y, self.norm_weight, self.spec.eps) * silu(z.to(y.dtype))
        return rearrange(normed, "token head dim -> token (head dim)")

    def step(self, rows: Tensor, states: States) -> tuple[Tensor, States]:
        spec, (tail, state) = self.spec, states
        mixed, b, a = rows.split([spec.channels, spec.num_value_heads, spec.num_value_heads], dim=-1)
        mixed, tail = self.conv(mixed, tail)
        keys = spec.num_key_heads * spec.key_dim
        q, k, v = silu(mixed).split([keys, keys, spec.o_proj_inputs], dim=-1)
        shared = spec.num_value_heads // spec.num_key_heads
        q, k = (
            _l2_norm(rearrange(part, "seq token (head dim) -> seq token head dim", dim=spec.key_dim))
            .repeat_interleave(shared, dim=2)
            for part in (q, k)
        )  # fmt: skip
        v = rearrange(v, "seq token (head dim) -> seq token head dim", dim=spec.value_dim)
        decay = -self.log_decay.to(v.dtype).exp() * softplus(a.to(v.dtype) + self.decay_bias.to(v.dtype))
        run = delta_rule_by_token if rows.shape[1] == 1 else delta_rule_by_chunk
        y, state = run(q * spec.key_dim**-0.5, k, v, decay, torch.sigmoid(b.to(v.dtype)), state)
        return rearrange(y, "seq token head dim -> seq token (head dim)"), (tail, state)


def _l2_norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)
