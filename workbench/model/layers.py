"""Attention and the block of a decoder. Each module is given its backend; none knows which others there are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, cast

import torch
from einops import rearrange
from torch import Tensor, nn

import compiled_kernels
from compiled_kernels import Backend
from compiled_kernels.attention import AttentionParameters
from compiled_kernels.attention_rules import known_rules
from workbench.batch import TokenBatch
from workbench.custom import build_custom
from workbench.errors import WorkbenchError
from workbench.kv_cache.states import StateLayer
from workbench.kv_cache.store import AttentionCache, CacheLayer, HybridLayer
from workbench.model.attention_spec import AnyAttentionSpec, AttentionSpec, MLASpec, QKNormSpec
from workbench.model.custom import build_mask, build_score, build_selection, load_module
from workbench.model.feedforward import build_feedforward
from workbench.model.linear import LayerNorm, Linear, NoNorm, ResidualScale, RMSNorm, build_norm
from workbench.model.mla import MLA
from workbench.model.quantized import WeightFormat
from workbench.model.recurrent.delta_net import DeltaNet
from workbench.model.recurrent.mamba2 import Mamba2
from workbench.model.recurrent.short_conv import ShortConv
from workbench.model.recurrent.spec import DeltaNetSpec, Mamba2Spec, RecurrentSpec, ShortConvSpec
from workbench.model.spec import LayerSpec, NormSpec

PLAIN_NORM = NormSpec()
HEAD_COLUMNS = {"head": "(token head) dim", "projection": "token (head dim)"}
Angles = Tensor | None  # [token, dim / 2]; None where heads are not rotated
SumOverRanks = Callable[[Tensor], Tensor]  # what a rank's share of a layer's matrices gives, to the sum of all ranks
STORED_PARAMETERS = (
    "qkv.",
    "output.",
    "query_norm.",
    "key_norm.",
    "sink_logits",
)  # parameters of attention that a state holds


class Attention(nn.Module):
    """Grouped-query attention (Ainslie et al., 2023): project and rotate, attend to the cache, project back.

    A custom module extends this one. It is built with the same values and `arguments` of its own, may hold
    further parameters, and may give `q` any shape that its `attend` takes; `k` and `v` are what the cache holds.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        hidden_size: int,
        backend: Backend,
        format: WeightFormat,
        norm: NormSpec = PLAIN_NORM,
    ):
        """Build the module; norms of queries and keys are of the kind of `norm`."""
        super().__init__()
        self.spec = spec
        self.backend = backend
        self.scale = spec.head_dim**-0.5 if spec.scale is None else spec.scale
        self.mask, self.score = build_mask(spec), build_score(spec)
        self.rules, self.selection = known_rules(self.mask, self.score), build_selection(spec)
        stored = backend, format.blocks, format.activations_of(format.blocks)
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
            sin: sines, likewise.

        Returns:
            q [token, head, head_dim], k and v [token, kv_head, head_dim]; q and k normed and rotated where the spec
                says so.
        """
        heads, groups = self.spec.num_heads, self.spec.num_kv_heads
        q, k, v = rearrange(self.qkv(x), "token (head dim) -> token head dim", dim=self.spec.head_dim).split(
            [heads, groups, groups], dim=1
        )
        v = v if self.value_norm is None else self.value_norm(v)
        late = self.spec.qk_norm is not None and self.spec.qk_norm.after_rotary
        if late:
            q, k = self.apply_rotary(q, cos, sin), self.apply_rotary(k, cos, sin)
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        if self.spec.qkv_clip:
            q, k, v = (part.clamp(-self.spec.qkv_clip, self.spec.qkv_clip) for part in (q, k, v))
        return (q, k, v) if late else (self.apply_rotary(q, cos, sin), self.apply_rotary(k, cos, sin), v)

    def apply_rotary(self, x: Tensor, cos: Angles, sin: Angles) -> Tensor:
        return x if cos is None or sin is None else compiled_kernels.rotary(x, cos, sin, self.backend)

    def attend(self, q: Tensor, batch: TokenBatch, cache: AttentionCache, backend: Backend | None = None) -> Tensor:
        """Attend to everything written so far: [token, head, head_dim]; on the module's backend unless given."""
        rules = self.spec.softcap, self.sink_logits, self.score, self.rules, self.selection
        parameters = AttentionParameters(self.scale, self.mask, *rules)
        return cache.attend(q, batch, parameters, backend or self.backend)

    def o_proj(self, mixed: Tensor) -> Tensor:
        """Project the result of attention back: [token, head, head_dim] -> [token, hidden]."""
        return self.output(rearrange(mixed, "token head dim -> token (head dim)"))


class GatedAttention(Attention):
    """Attention whose result is multiplied by the sigmoid of a gate (Qwen 3 Next). The gate of a head goes with its
    query: q is [token, head, query and gate]."""

    def qkv_proj(self, x: Tensor, cos: Angles, sin: Angles) -> tuple[Tensor, Tensor, Tensor]:
        heads, groups = self.spec.num_heads, self.spec.num_kv_heads
        q, gate, k, v = rearrange(self.qkv(x), "token (head dim) -> token head dim", dim=self.spec.head_dim).split(
            [heads, heads, groups, groups], dim=1
        )
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        q, k = self.apply_rotary(q, cos, sin), self.apply_rotary(k, cos, sin)
        return torch.cat([q, gate], dim=-1), k, v

    def attend(self, q: Tensor, batch: TokenBatch, cache: AttentionCache, backend: Backend | None = None) -> Tensor:
        query, gate = q.chunk(2, dim=-1)
        return super().attend(query.contiguous(), batch, cache, backend) * torch.sigmoid(gate)


class SharedKVAttention(Attention):
    """Attention of its own queries to the keys and values of an earlier layer (Brandon et al., 2024), which the cache
    that it is given holds. Its k and v have no heads."""

    def __init__(self, spec: AttentionSpec, *built: Any):
        super().__init__(spec.model_copy(update={"kv_shared_with": 0}), *built)  # any layer's: alike ones compile once

    def qkv_proj(self, x: Tensor, cos: Angles, sin: Angles) -> tuple[Tensor, Tensor, Tensor]:
        q = rearrange(self.qkv(x), "token (head dim) -> token head dim", dim=self.spec.head_dim)
        none = q.new_empty((q.shape[0], 0, q.shape[2]))
        late = self.spec.qk_norm is not None and self.spec.qk_norm.after_rotary
        q = self.apply_rotary(q, cos, sin) if late else q
        q = q if self.query_norm is None else self.query_norm(q)
        q = q.clamp(-self.spec.qkv_clip, self.spec.qkv_clip) if self.spec.qkv_clip else q
        return q if late else self.apply_rotary(q, cos, sin), none, none


class HeadRMSNorm(RMSNorm):
    """RMSNorm of queries or keys [token, head, head_dim]: of each head, or of all columns of a token."""

    def __init__(self, width: int, over: Literal["head", "projection"], norm: NormSpec, backend: Backend):
        super().__init__(width, norm.eps, backend, norm.offset)
        self.columns = HEAD_COLUMNS[over]

    def forward(self, heads: Tensor) -> Tensor:
        rows = super().forward(rearrange(heads, f"token head dim -> {self.columns}"))
        return rearrange(rows, f"{self.columns} -> token head dim", head=heads.shape[1])


class HeadNorm(nn.Module):
    """A norm of each head [token, head, head_dim] with weights of its own, one for all heads, or none; plain torch."""

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
    """Build the norm of `heads` queries or keys; None where there is none. Raises WorkbenchError for one that no family
    has: of a whole projection by LayerNorm."""
    if spec.qk_norm is None or not heads:
        return None
    if norm.kind == "rms" and spec.qk_norm.weight == "shared" and not spec.qk_norm.bias:
        width = spec.head_dim if spec.qk_norm.over == "head" else heads * spec.head_dim
        return HeadRMSNorm(width, spec.qk_norm.over, norm, backend)
    if spec.qk_norm.over == "projection":
        raise WorkbenchError("qk_norm over a whole projection has one weight, no bias, and is a root-mean-square norm")
    return HeadNorm(heads, spec, norm)


def build_attention(
    spec: AnyAttentionSpec, hidden_size: int, backend: Backend, format: WeightFormat, norm: NormSpec = PLAIN_NORM
) -> Attention | MLA:
    """Build the module of one layer's attention: built-in, or custom; of a `RecurrentBlock` what stands in its place.
    Raises WorkbenchError where that cannot be built."""
    if isinstance(spec, ShortConvSpec):
        return cast(Attention, ShortConv(spec, hidden_size, backend, format))
    if isinstance(spec, DeltaNetSpec):
        return cast(Attention, DeltaNet(spec, hidden_size, backend, format))
    if isinstance(spec, Mamba2Spec):
        return cast(Attention, Mamba2(spec, hidden_size, backend, format))
    if isinstance(spec, MLASpec):
        return MLA(spec, hidden_size, backend, format)
    if spec.module is None:
        built = GatedAttention if spec.output_gate else Attention
        built = built if spec.kv_shared_with is None else SharedKVAttention
        return built(spec, hidden_size, backend, format, norm)
    found, name = load_module(spec.module), f"module {spec.module.path}"
    arguments = (spec, hidden_size, backend, format, norm)
    return cast(Attention, build_custom(found, spec.module.arguments, name, *arguments))


def build_custom_attention(
    spec: AttentionSpec, hidden_size: int, backend: Backend, format: WeightFormat, norm: NormSpec, dtype: torch.dtype
) -> Attention | MLA:
    """Build a custom module in memory: the random numbers that it draws are the same every time."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)
        return build_attention(spec, hidden_size, backend, format, norm).to(dtype).requires_grad_(False)


def one_rank(part: Tensor) -> Tensor:
    """Return what the only rank computed."""
    return part


class TransformerBlock(nn.Module):
    """One layer, one part after the other: attention, then the feed-forward, each normed before, after, or both.

    `before_attention` and `after_attention` are the two sides of the read from the cache.
    """

    def __init__(
        self, kind: LayerSpec, hidden_size: int, backend: Backend, format: WeightFormat,
        norm: NormSpec = PLAIN_NORM, residual_scale: float = 1.0, sum_over_ranks: SumOverRanks = one_rank,
    ):  # fmt: skip
        """Build the block; `residual_scale` multiplies what each part adds, once `sum_over_ranks` has summed it."""
        super().__init__()
        self.sum_over_ranks = sum_over_ranks

        def build(there: bool) -> RMSNorm | LayerNorm | NoNorm:
            return build_norm(hidden_size, norm, backend) if there else NoNorm()

        def build_post(there: bool, scale: float = residual_scale) -> nn.Module:
            return build(True) if there else nn.Identity() if scale == 1 else ResidualScale(scale)

        if kind.norms != "pre" and residual_scale != 1:
            raise WorkbenchError("residual_scale beside norms after a layer's parts is not carried out")
        self.has_two_norms = kind.parallel != "one_norm"
        self.attention_norm = build(kind.norms != "post")
        self.attention = build_attention(kind.attention, hidden_size, backend, format, norm)
        self.feedforward_norm = build(kind.norms != "post" and self.has_two_norms and kind.intermediate_size > 0)
        self.feedforward = build_feedforward(kind, hidden_size, backend, format)
        self.attention_post_norm = build_post(kind.norms != "pre")
        self.feedforward_post_norm = build_post(kind.norms != "pre", residual_scale * kind.feedforward_scale)

    def forward(self, x: Tensor, cos: Angles, sin: Angles, batch: TokenBatch, cache: CacheLayer) -> Tensor:
        q, k, v = self.before_attention(x, cos, sin)
        pages = cast(AttentionCache, cache)
        pages.write(k, v, batch, self.attention.backend)
        return self.after_attention(x, self.attention.attend(q, batch, pages))

    def before_attention(self, x: Tensor, cos: Angles, sin: Angles) -> tuple[Tensor, Tensor, Tensor]:
        return self.attention.qkv_proj(self.attention_norm(x), cos, sin)

    def after_attention(self, x: Tensor, mixed: Tensor) -> Tensor:
        """Add attention's result [token, head, head_dim] to x [token, hidden] and run the feed-forward: [token,
        hidden]."""
        read = self.attention_post_norm(self.sum_over_ranks(self.attention.o_proj(mixed)))
        x, normed = self.feedforward_norm.add_and_norm(x, read)
        return x + self.feedforward_post_norm(self.sum_over_ranks(self.feedforward(normed)))


class ParallelBlock(TransformerBlock):
    """One layer whose attention and feed-forward both read its input and are added together (GPT-J, 2021)."""

    def after_attention(self, x: Tensor, mixed: Tensor) -> Tensor:
        normed = self.feedforward_norm(x) if self.has_two_norms else self.attention_norm(x)
        read = self.attention_post_norm(self.sum_over_ranks(self.attention.o_proj(mixed)))
        return x + read + self.feedforward_post_norm(self.sum_over_ranks(self.feedforward(normed)))


class RecurrentBlock(TransformerBlock):
    """One layer with a recurrent state in place of attention."""

    def forward(self, x: Tensor, cos: Angles, sin: Angles, batch: TokenBatch, cache: CacheLayer) -> Tensor:
        mixer = cast(ShortConv | DeltaNet | Mamba2, self.attention)
        return self.after_attention(x, mixer.mix(self.attention_norm(x), batch, cast(StateLayer, cache)))


class HybridBlock(TransformerBlock):
    """One layer with a recurrent part beside attention (see `ParallelRecurrentSpec`)."""

    def __init__(
        self, kind: LayerSpec, hidden_size: int, backend: Backend, format: WeightFormat,
        norm: NormSpec = PLAIN_NORM, residual_scale: float = 1.0,
    ):  # fmt: skip
        super().__init__(kind, hidden_size, backend, format, norm, residual_scale)
        assert kind.beside is not None
        self.beside = kind.beside
        self.recurrent = build_attention(kind.beside.recurrent, hidden_size, backend, format)
        self.recurrent_post_norm = ResidualScale(residual_scale * kind.beside.recurrent_output_scale)
        self.attention_post_norm = ResidualScale(residual_scale * kind.beside.attention_output_scale)

    def forward(self, x: Tensor, cos: Angles, sin: Angles, batch: TokenBatch, cache: CacheLayer) -> Tensor:
        both, mixer, normed = cast(HybridLayer, cache), cast(Mamba2, self.recurrent), self.attention_norm(x)
        state = mixer.mix(normed * self.beside.recurrent_input_scale, batch, both.states)
        q, k, v = self.attention.qkv_proj(normed * self.beside.attention_input_scale, cos, sin)
        both.attention.write(k, v, batch, self.attention.backend)
        x = x + self.recurrent_post_norm(mixer.o_proj(state))
        return self.after_attention(x, self.attention.attend(q, batch, both.attention))


class MixerBlock(RecurrentBlock):
    """One layer with a recurrent state, and no feed-forward (Mamba-2)."""

    def after_attention(self, x: Tensor, mixed: Tensor) -> Tensor:
        return x + self.attention_post_norm(self.attention.o_proj(mixed))


def build_block(
    kind: LayerSpec, hidden_size: int, backend: Backend, format: WeightFormat, norm: NormSpec, residual_scale: float,
    sum_over_ranks: SumOverRanks = one_rank,
) -> TransformerBlock:  # fmt: skip
    """Build the block of one layer."""
    built = kind, hidden_size, backend, format, norm, residual_scale
    if isinstance(kind.attention, RecurrentSpec):
        return (RecurrentBlock if kind.intermediate_size else MixerBlock)(*built)
    if kind.beside is not None:
        return HybridBlock(*built)
    return (TransformerBlock if kind.parallel == "no" else ParallelBlock)(*built, sum_over_ranks)
