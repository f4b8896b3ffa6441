"""Compute attention and the decoder block. Each module receives its backend and knows no other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from einops import rearrange
from torch import Tensor, nn

from compiled_kernels import Backend
from workbench.batch import TokenBatch
from workbench.custom import build_custom
from workbench.errors import WorkbenchError
from workbench.kv_cache.layer import CacheLayer
from workbench.model.attention_spec import AnyAttentionSpec, AttentionSpec, MLASpec, QKNormSpec
from workbench.model.custom import load_module
from workbench.model.feedforward import build_feedforward
from workbench.model.linear import LayerNorm, Linear, NoNorm, ResidualScale, RMSNorm, build_norm
from workbench.model.mixer import Angles, AttentionMixer, Mixer
from workbench.model.mla import MLA
from workbench.model.quantized import WeightFormat
from workbench.model.recurrent.delta_net import DeltaNet
from workbench.model.recurrent.mamba2 import Mamba2
from workbench.model.recurrent.short_conv import ShortConv
from workbench.model.recurrent.spec import DeltaNetSpec, Mamba2Spec, ShortConvSpec
from workbench.model.spec import LayerSpec, NormSpec

PLAIN_NORM = NormSpec()
HEAD_COLUMNS = {"head": "(token head) dim", "projection": "token (head dim)"}
SumOverRanks = Callable[[Tensor], Tensor]  # maps a rank's partial result to the sum over all ranks
STORED_PARAMETERS = (
    "qkv.",
    "output.",
    "query_norm.",
    "key_norm.",
    "sink_logits",
)  # parameters of attention in a state dict


class Attention(AttentionMixer[AttentionSpec]):
    """Grouped-query attention (Ainslie et al., 2023): project and rotate queries, keys and values, attend to the cache,
    project back.

    With `output_gate` its result is multiplied by the sigmoid of a gate (Qwen 3 Next), which is stored with its head's
    query: q is [token, head, query and gate]. With `kv_shared_with` its cache has the keys and values of an earlier
    layer (Brandon et al., 2024), and its own k and v have no heads.

    A custom module extends this one. It is constructed with the same values and its own `arguments`, may have further
    parameters, and may return `q` in any shape that its `attend` accepts; `k` and `v` are written to the cache.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        hidden_size: int,
        backend: Backend,
        format: WeightFormat,
        norm: NormSpec = PLAIN_NORM,
    ):
        """Build the module; norms of queries and keys have the kind of `norm`."""
        if spec.kv_shared_with is not None:
            spec = spec.model_copy(update={"kv_shared_with": 0})  # the same for all layers: equal ones compile once
        super().__init__(spec, spec.head_dim, backend)
        stored = backend, format.blocks, format.activations
        self.qkv = Linear(hidden_size, spec.num_projected_heads * spec.head_dim, spec.qkv_bias, *stored)
        self.output = Linear(spec.num_heads * spec.head_dim, hidden_size, spec.o_proj_bias, *stored)
        self.query_norm = build_head_norm(spec, spec.num_heads, norm, backend)
        self.key_norm = build_head_norm(spec, spec.num_own_kv_heads, norm, backend)
        plain = {"qk_norm": QKNormSpec(weight="none")}
        values = HeadNorm(spec.num_kv_heads, spec.model_copy(update=plain), norm) if spec.value_norm else None
        self.value_norm = values
        self.sink_logits = nn.Parameter(torch.empty(spec.num_heads)) if spec.sink_logits else None

    def qkv_proj(self, x: Tensor, cos: Angles, sin: Angles) -> tuple[Tensor, Tensor, Tensor]:
        """Project x [token, hidden] to queries, keys and values.

        Args:
            x: normed hidden states.
            cos: cosines [token, head_dim / 2] of the tokens' positions; None where heads are not rotated.
            sin: sines, with the same shape; None where heads are not rotated.

        Returns:
            q [token, head, head_dim], k and v [token, kv_head, head_dim]; q and k are normalized and rotated by the
            spec.
        """
        spec, own = self.spec, self.spec.num_own_kv_heads
        q, gate, k, v = rearrange(self.qkv(x), "token (head dim) -> token head dim", dim=spec.head_dim).split(
            [spec.num_heads, spec.num_heads * spec.output_gate, own, own], dim=1
        )
        v = v if self.value_norm is None else self.value_norm(v)
        q = self._placed(q, self.query_norm, cos, sin)
        k = self._placed(k, self.key_norm, cos, sin) if own else k
        return torch.cat([q, gate], dim=-1) if spec.output_gate else q, k, self._clipped(v)

    def _placed(self, x: Tensor, norm: nn.Module | None, cos: Angles, sin: Angles) -> Tensor:
        """Normalize, clip and rotate queries or keys [token, head, head_dim] in the order of the spec."""
        late = self.spec.qk_norm is not None and self.spec.qk_norm.after_rotary
        x = self.apply_rotary(x, cos, sin) if late else x
        x = self._clipped(x if norm is None else norm(x))
        return x if late else self.apply_rotary(x, cos, sin)

    def _clipped(self, x: Tensor) -> Tensor:
        return x.clamp(-self.spec.qkv_clip, self.spec.qkv_clip) if self.spec.qkv_clip else x

    def attend(self, q: Tensor, batch: TokenBatch, cache: CacheLayer, backend: Backend | None = None) -> Tensor:
        if not self.spec.output_gate:
            return super().attend(q, batch, cache, backend)
        query, gate = q.chunk(2, dim=-1)
        return super().attend(query.contiguous(), batch, cache, backend) * torch.sigmoid(gate)

    def o_proj(self, mixed: Tensor) -> Tensor:
        """Project the result of attention back to hidden states: [token, head, head_dim] -> [token, hidden]."""
        return self.output(rearrange(mixed, "token head dim -> token (head dim)"))


class HeadRMSNorm(RMSNorm):
    """RMSNorm of queries or keys [token, head, head_dim], over each head or over all columns of a token."""

    def __init__(self, width: int, over: Literal["head", "projection"], norm: NormSpec, backend: Backend):
        super().__init__(width, norm.eps, backend, norm.offset)
        self.columns = HEAD_COLUMNS[over]

    def forward(self, heads: Tensor) -> Tensor:
        rows = super().forward(rearrange(heads, f"token head dim -> {self.columns}"))
        return rearrange(rows, f"{self.columns} -> token head dim", head=heads.shape[1])


class HeadNorm(nn.Module):
    """A norm of each head [token, head, head_dim] with weights per head, shared weights, or none; in plain torch."""

    def __init__(self, heads: int, spec: AttentionSpec, norm: NormSpec):
        super().__init__()
        assert spec.qk_norm is not None
        shape = (heads, spec.head_dim) if spec.qk_norm.weight == "per_head" else (spec.head_dim,)
        self.kind, self.eps, self.offset = norm.kind, norm.eps, norm.offset
        self.weight = None if spec.qk_norm.weight == "none" else nn.Parameter(torch.empty(shape))
        self.bias = nn.Parameter(torch.empty(shape)) if spec.qk_norm.bias else None

    def forward(self, heads: Tensor) -> Tensor:
        exact = torch.promote_types(heads.dtype, torch.float32)
        rows = heads.to(exact)
        if self.kind == "layer":
            rows = rows - rows.mean(-1, keepdim=True)
        rows = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + self.eps)
        rows = rows if self.weight is None else rows * (self.weight.to(exact) + self.offset)
        return (rows if self.bias is None else rows + self.bias.to(exact)).to(heads.dtype)


def build_head_norm(spec: AttentionSpec, heads: int, norm: NormSpec, backend: Backend) -> HeadRMSNorm | HeadNorm | None:
    """Build the norm of queries or of keys with `heads` heads; None if there is none. Raises WorkbenchError for a
    LayerNorm over a whole projection, which no family has.
    """
    if spec.qk_norm is None or not heads:
        return None
    if norm.kind == "rms" and spec.qk_norm.weight == "shared" and not spec.qk_norm.bias:
        width = spec.head_dim if spec.qk_norm.over == "head" else heads * spec.head_dim
        return HeadRMSNorm(width, spec.qk_norm.over, norm, backend)
    if spec.qk_norm.over == "projection":
        raise WorkbenchError("qk_norm over a whole projection has one weight, no bias, and is a root-mean-square norm")
    return HeadNorm(heads, spec, norm)


def build_mixer(
    spec: AnyAttentionSpec, hidden_size: int, backend: Backend, format: WeightFormat, norm: NormSpec = PLAIN_NORM
) -> Mixer:
    """Build the mixer of one layer: built-in or custom attention, or a recurrence. Raises WorkbenchError if it cannot
    be built.
    """
    if isinstance(spec, ShortConvSpec):
        return ShortConv(spec, hidden_size, backend, format)
    if isinstance(spec, DeltaNetSpec):
        return DeltaNet(spec, hidden_size, backend, format)
    if isinstance(spec, Mamba2Spec):
        return Mamba2(spec, hidden_size, backend, format)
    if isinstance(spec, MLASpec):
        return MLA(spec, hidden_size, backend, format)
    if spec.module is None:
        return Attention(spec, hidden_size, backend, format, norm)
    found, name = load_module(spec.module), f"module {spec.module.path}"
    made = build_custom(found, spec.module.arguments, name, spec, hidden_size, backend, format, norm)
    if not isinstance(made, Attention):
        raise WorkbenchError(f"{name}: is no attention; extend workbench.model.layers.Attention")
    return made


def build_custom_attention(
    spec: AttentionSpec, hidden_size: int, backend: Backend, format: WeightFormat, norm: NormSpec, dtype: torch.dtype
) -> Mixer:
    """Build a custom attention module in memory, under a fixed random seed."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)
        return build_mixer(spec, hidden_size, backend, format, norm).to(dtype).requires_grad_(False)


def one_rank(part: Tensor) -> Tensor:
    """Return `part` unchanged: the sum over ranks if there is only one."""
    return part


class TransformerBlock(nn.Module):
    """One layer: attention, a recurrence, or both in parallel, then an optional feed-forward. Each part is normalized
    before, after, or both. If parts are parallel, all of them read the layer's input and their results are added
    (GPT-J, 2021).

    `before_attention` and `after_attention` compute the parts before and after the read from the cache.
    """

    recurrent: Mixer  # parallel to attention, if `beside`

    def __init__(
        self, kind: LayerSpec, hidden_size: int, backend: Backend, format: WeightFormat,
        norm: NormSpec = PLAIN_NORM, residual_scale: float = 1.0, sum_over_ranks: SumOverRanks = one_rank,
    ):  # fmt: skip
        """Build the block; `residual_scale` multiplies each part's result after `sum_over_ranks`."""
        super().__init__()
        self.sum_over_ranks = sum_over_ranks
        self.parallel, self.has_feedforward = kind.parallel, kind.intermediate_size > 0

        def build(there: bool) -> RMSNorm | LayerNorm | NoNorm:
            return build_norm(hidden_size, norm, backend) if there else NoNorm()

        def build_post(scale: float) -> nn.Module:
            return build(True) if kind.norms != "pre" else nn.Identity() if scale == 1 else ResidualScale(scale)

        if kind.norms != "pre" and residual_scale != 1:
            raise WorkbenchError("residual_scale with norms after a layer's parts is not supported")
        self.attention_norm = build(kind.norms != "post")
        self.attention = build_mixer(kind.attention, hidden_size, backend, format, norm)
        normed = kind.norms != "post" and self.parallel != "one_norm" and self.has_feedforward
        self.feedforward_norm = build(normed)
        self.feedforward = build_feedforward(kind, hidden_size, backend, format)
        attention_scale = residual_scale
        if kind.beside is not None:
            self.recurrent = build_mixer(kind.beside.recurrent, hidden_size, backend, format)
            self.recurrent_post_norm = build_post(residual_scale * kind.beside.recurrent_output_scale)
            attention_scale *= kind.beside.attention_output_scale
        self.beside = kind.beside
        self.attention_post_norm = build_post(attention_scale)
        self.feedforward_post_norm = build_post(residual_scale * kind.feedforward_scale)

    def forward(self, x: Tensor, cos: Angles, sin: Angles, batch: TokenBatch, cache: CacheLayer) -> Tensor:
        if self.beside is None:
            projected = self.before_attention(x, cos, sin)
        else:
            normed = self.attention_norm(x)
            entering = self.recurrent.project(normed * self.beside.recurrent_input_scale, cos, sin)
            projected = self.attention.project(normed * self.beside.attention_input_scale, cos, sin)
            state = self.recurrent.write_and_read(entering, batch, cache)
            x = x + self.recurrent_post_norm(self.recurrent.o_proj(state))
        return self.after_attention(x, self.attention.write_and_read(projected, batch, cache))

    def before_attention(self, x: Tensor, cos: Angles, sin: Angles) -> tuple[Tensor, ...]:
        return self.attention.project(self.attention_norm(x), cos, sin)

    def after_attention(self, x: Tensor, mixed: Tensor) -> Tensor:
        """Add the result of attention [token, head, head_dim] to x [token, hidden] and run the feed-forward: [token,
        hidden].
        """
        read = self.attention_post_norm(self.sum_over_ranks(self.attention.o_proj(mixed)))
        if not self.has_feedforward:
            return x + read
        if self.parallel == "no":
            total, normed = self.feedforward_norm.add_and_norm(x, read)
        else:
            total, normed = x + read, (self.attention_norm if self.parallel == "one_norm" else self.feedforward_norm)(x)
        return total + self.feedforward_post_norm(self.sum_over_ranks(self.feedforward(normed)))


def attention_of(block: TransformerBlock) -> Attention:
    """Return the grouped-query attention of a block, which must have one."""
    assert isinstance(block.attention, Attention)
    return block.attention
