"""The oracle of recurrent layers: a whole text, token by token, from the published equations."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from workbench.errors import WorkbenchError
from workbench.model.recurrent.spec import DeltaNetSpec, Mamba2Spec, RecurrentSpec, ShortConvSpec

Linear = Callable[[Tensor, str], Tensor]  # applies the layer's projection of this name


def run_recurrent(h: Tensor, w: Mapping[str, Tensor], at: str, spec: RecurrentSpec, linear: Linear) -> Tensor:
    """Return the output of a recurrent layer for the normed rows `h` [token, hidden] of a whole text.

    Args:
        h: the normed rows.
        w: the model's weights.
        at: the prefix of the layer's weight names.
        spec: the layer.
        linear: applies one of the layer's projections, by name.
    """
    if isinstance(spec, ShortConvSpec):
        b, c, x = linear(h, "input").chunk(3, dim=-1)
        return linear(c * _conv(b * x, w, at), "output")
    if isinstance(spec, DeltaNetSpec):
        return _delta_net(linear(h, "input"), w, at, spec, linear)
    if isinstance(spec, Mamba2Spec):
        return _mamba2(linear(h, "input"), w, at, spec, linear)
    raise WorkbenchError(f"the oracle has no {spec}")


def _conv(x: Tensor, w: Mapping[str, Tensor], at: str) -> Tensor:
    """Convolve x [token, channel] causally, by explicit sums over each token and its predecessors."""
    weight, rows = w[at + "conv.weight"], []
    for token in range(len(x)):
        past = x[max(0, token + 1 - weight.shape[1]) : token + 1]
        rows.append((past * weight.T[-len(past) :]).sum(0))
    return torch.stack(rows) + w.get(at + "conv.bias", 0)


def _delta_net(rows: Tensor, w: Mapping[str, Tensor], at: str, spec: DeltaNetSpec, linear: Linear) -> Tensor:
    """Run the gated delta rule head by head (Yang et al., 2025, equation 10)."""
    heads, keys = spec.num_value_heads, spec.num_key_heads * spec.key_dim
    mixed, z, b, a = rows.split([spec.channels, spec.o_proj_inputs, heads, heads], dim=-1)
    q, k, v = _silu(_conv(mixed, w, at)).split([keys, keys, spec.o_proj_inputs], dim=-1)
    head_outputs = []
    for head in range(heads):
        first = head * spec.num_key_heads // heads * spec.key_dim
        columns = slice(head * spec.value_dim, (head + 1) * spec.value_dim)
        query, key = (vector[:, first : first + spec.key_dim] for vector in (q, k))
        query, key = (vector / (vector.square().sum(-1, keepdim=True) + 1e-6).sqrt() for vector in (query, key))
        rate = w[at + "log_decay"][head].exp() * torch.log1p((a[:, head] + w[at + "decay_bias"][head]).exp())
        state, outputs = rows.new_zeros(spec.key_dim, spec.value_dim), []
        for token in range(len(rows)):
            state = state * (-rate[token]).exp()
            missing = v[token, columns] - key[token] @ state
            state = state + b[token, head].sigmoid() * torch.outer(key[token], missing)
            outputs.append(query[token] @ state * spec.key_dim**-0.5)
        y = torch.stack(outputs)
        normed = y / (y.square().mean(-1, keepdim=True) + spec.eps).sqrt() * w[at + "norm_weight"]
        head_outputs.append(normed * _silu(z[:, columns]))
    return linear(torch.cat(head_outputs, dim=-1), "output")


def _mamba2(rows: Tensor, w: Mapping[str, Tensor], at: str, spec: Mamba2Spec, linear: Linear) -> Tensor:
    """Run the state-space recurrence head by head (Dao and Gu, 2024, section 2)."""
    inner, directions = spec.o_proj_inputs, spec.groups * spec.state
    scales = torch.tensor(spec.column_scales, dtype=rows.dtype).repeat_interleave(torch.tensor(spec.column_counts))
    z, mixed, steps = (rows * scales).split([inner, spec.channels, spec.heads], dim=-1)
    x, b, c = _silu(_conv(mixed, w, at)).split([inner, directions, directions], dim=-1)
    head_outputs = []
    for head in range(spec.heads):
        columns = slice(head * spec.head_width, (head + 1) * spec.head_width)
        group = head * spec.groups // spec.heads
        shared = slice(group * spec.state, (group + 1) * spec.state)
        step = torch.log1p((steps[:, head] + w[at + "step_bias"][head]).exp())
        state, outputs = rows.new_zeros(spec.head_width, spec.state), []
        for token in range(len(rows)):
            decay = (-w[at + "log_decay"][head].exp() * step[token]).exp()
            state = decay * state + step[token] * torch.outer(x[token, columns], b[token, shared])
            outputs.append(state @ c[token, shared] + w[at + "skip"][head] * x[token, columns])
        head_outputs.append(torch.stack(outputs))
    y = torch.cat(head_outputs, dim=-1)
    y = y if spec.norm == "before_gate" else y * _silu(z)
    if spec.norm != "none":
        y = y.unflatten(-1, (spec.groups, -1))
        y = (y / (y.square().mean(-1, keepdim=True) + spec.eps).sqrt()).flatten(-2) * w[at + "norm_weight"]
    return linear(y * _silu(z) if spec.norm == "before_gate" else y, "output")


def _silu(x: Tensor) -> Tensor:
    return x / (1 + (-x).exp())
