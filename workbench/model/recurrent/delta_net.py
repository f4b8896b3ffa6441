"""The gated delta rule: linear attention whose state forgets by a factor and corrects what a key stands for.

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
from workbench.batch import TokenBatch
from workbench.kv_cache.states import StateLayer
from workbench.model.linear import Linear
from workbench.model.quantized import WeightFormat
from workbench.model.recurrent.short_conv import CausalConv, rms_norm_rows
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
        beta: how much of the correction is made, in 0..1: [seq, token, head].
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
    """Run the gated delta rule over chunks of `CHUNK_TOKENS` tokens; arguments as of `delta_rule_by_token`.

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


class DeltaNet(nn.Module):
    """Qwen 3 Next's layer: a convolution of queries, keys and values, the gated delta rule, a gated norm."""

    def __init__(self, spec: DeltaNetSpec, hidden_size: int, backend: Backend, format: WeightFormat):
        super().__init__()
        self.spec, self.backend = spec, backend
        stored = backend, format.blocks, format.activations_of(format.blocks)
        self.input = Linear(hidden_size, spec.input_columns, False, *stored)
        self.conv = CausalConv(spec.channels, spec.kernel, False)
        self.log_decay = nn.Parameter(torch.empty(spec.num_value_heads))
        self.decay_bias = nn.Parameter(torch.empty(spec.num_value_heads))
        self.norm_weight = nn.Parameter(torch.empty(spec.value_dim))
        self.output = Linear(spec.o_proj_inputs, hidden_size, False, *stored)

    def mix(self, x: Tensor, batch: TokenBatch, states: StateLayer) -> Tensor:
        """Run the layer up to its output projection, and keep the states: [token, hidden] -> [token, head value]."""
        heads, values = self.spec.num_value_heads, self.spec.o_proj_inputs
        mixed, z, gates = self.input(x).split([self.spec.channels, values, 2 * heads], dim=-1)
        y = states.scan(torch.cat([mixed, gates], dim=-1), batch, self._step)
        by_head = (rearrange(part, "token (head dim) -> token head dim", head=heads) for part in (y, z))
        return rearrange(self._norm(*by_head), "token head dim -> token (head dim)").to(x.dtype)

    def o_proj(self, mixed: Tensor) -> Tensor:
        """Project back: [token, head value] -> [token, hidden]."""
        return self.output(mixed)

    def _norm(self, y: Tensor, z: Tensor) -> Tensor:
        return rms_norm_rows(y, self.norm_weight, self.spec.eps) * silu(z.to(y.dtype))

    def _step(self, rows: Tensor, states: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
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
