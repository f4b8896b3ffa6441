"""Compute Mamba-2, a state-space layer whose decay depends on each token (Dao and Gu, 2024).

For each head, with state S [head_dim, state]: S <- exp(d A) S + d x b^T; y = S c + D x. `scan_by_token` is the
specification, `scan_by_chunk` computes many tokens by matrix products (the paper's listing 1).
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
from workbench.model.recurrent.spec import Mamba2Spec

CHUNK_TOKENS = 64


def scan_by_token(x: Tensor, decay: Tensor, b: Tensor, c: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Run the state-space recurrence token by token.

    Args:
        x: inputs times their step sizes, [seq, token, head, head_dim].
        decay: logarithms of the factors by which the state decays, at most 0: [seq, token, head].
        b: directions in which inputs enter the state, [seq, token, head, state].
        c: directions in which it is read, [seq, token, head, state].
        state: the state before the tokens, [seq, head, head_dim, state].

    Returns:
        outputs [seq, token, head, head_dim], and the state after the tokens.
    """
    outputs = []
    for t in range(x.shape[1]):
        state = state * decay[:, t, :, None, None].exp() + x[:, t, :, :, None] * b[:, t, :, None]
        outputs.append((state * c[:, t, :, None]).sum(-1))
    return torch.stack(outputs, dim=1), state


def scan_by_chunk(x: Tensor, decay: Tensor, b: Tensor, c: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Run the state-space recurrence over chunks of `CHUNK_TOKENS` tokens; arguments as for `scan_by_token`."""
    outputs = []
    for chunk in zip(*(part.split(CHUNK_TOKENS, dim=1) for part in (x, decay, b, c)), strict=True):
        x, decay, b, c = (part.transpose(1, 2) for part in chunk)  # [seq, head, token, ...]
        since = decay.cumsum(-1)
        between = (since[..., :, None] - since[..., None, :]).tril().exp().tril()
        outputs.append(((c @ b.mT) * between) @ x + since.exp()[..., None] * (c @ state.mT))
        left = (since[..., -1:] - since).exp()[..., None]
        state = state * since[..., -1, None, None].exp() + (x * left).mT @ b
    return torch.cat(outputs, dim=2).transpose(1, 2), state


class Mamba2(RecurrentMixer[Mamba2Spec]):
    """The layer of Mamba-2: a convolution of inputs and directions, the recurrence, a gate, and a norm by group."""

    def __init__(self, spec: Mamba2Spec, hidden_size: int, backend: Backend, format: WeightFormat):
        super().__init__(spec, hidden_size, backend, format, (spec.bias, spec.conv_bias, spec.o_proj_has_bias))
        self.log_decay = nn.Parameter(torch.empty(spec.heads))
        self.step_bias = nn.Parameter(torch.empty(spec.heads))
        self.skip = nn.Parameter(torch.empty(spec.heads))
        self.norm_weight = None if spec.norm == "none" else nn.Parameter(torch.empty(spec.o_proj_inputs))

    def project(self, x: Tensor, cos: Angles, sin: Angles) -> tuple[Tensor, ...]:
        z, rows = self._columns(x).split([self.spec.o_proj_inputs, self.spec.channels + self.spec.heads], dim=-1)
        return rows, z

    def gated(self, y: Tensor, gate: Tensor) -> Tensor:
        gate = silu(gate.to(y.dtype))
        return self._norm(y) * gate if self.spec.norm == "before_gate" else self._norm(y * gate)

    def _columns(self, x: Tensor) -> Tensor:
        columns, spec = self.input(x), self.spec
        if set(spec.column_scales) == {1.0}:
            return columns
        parts = zip(columns.split(spec.column_counts, dim=-1), spec.column_scales, strict=True)
        return torch.cat([part * scale for part, scale in parts], dim=-1)

    def _norm(self, y: Tensor) -> Tensor:
        if self.norm_weight is None:
            return y
        y = rearrange(y, "token (group dim) -> token group dim", group=self.spec.groups)
        weight = rearrange(self.norm_weight, "(group dim) -> group dim", group=self.spec.groups)
        return rearrange(rms_norm_rows(y, weight, self.spec.eps), "token group dim -> token (group dim)")

    def step(self, rows: Tensor, states: States) -> tuple[Tensor, States]:
        spec, (tail, state) = self.spec, states
        mixed, steps = rows.split([spec.channels, spec.heads], dim=-1)
        mixed, tail = self.conv(mixed, tail)
        directions = spec.groups * spec.state
        x, b, c = silu(mixed).split([spec.o_proj_inputs, directions, directions], dim=-1)
        x = rearrange(x, "seq token (head dim) -> seq token head dim", head=spec.heads)
        b, c = (
            rearrange(part, "seq token (group state) -> seq token group state", group=spec.groups)
            .repeat_interleave(spec.heads // spec.groups, dim=2)
            for part in (b, c)
        )  # fmt: skip
        steps = softplus(steps.to(x.dtype) + self.step_bias.to(x.dtype))
        run = scan_by_token if rows.shape[1] == 1 else scan_by_chunk
        decay = -self.log_decay.to(x.dtype).exp() * steps
        y, state = run(x * steps[..., None], decay, b, c, state)
        y = y + x * self.skip.to(x.dtype)[:, None]
        return rearrange(y, "seq token head dim -> seq token (head dim)"), (tail, state)
