"""Random tiny models that ranks can share, and their weights."""

from __future__ import annotations

from typing import Literal

import torch
from hypothesis import strategies as st
from torch import Tensor

from workbench.model.attention_spec import AttentionSpec, MLASpec, QKNormSpec
from workbench.model.hf.weights import random_weights
from workbench.model.quantized import WeightFormat
from workbench.model.spec import ActivationSpec, LayerSpec, ModelSpec, MoESpec, NormSpec, RouterSpec
from workbench.request import CustomPart
from workbench.tensor_parallel.ranks import Transport

ORDERS: list[tuple[Literal["pre", "both", "post"], Literal["no", "one_norm", "two_norms"]]] = [
    ("pre", "no"), ("pre", "one_norm"), ("pre", "two_norms"), ("both", "no"), ("post", "no"),
]  # fmt: skip
QK_NORMS = [
    None, QKNormSpec(), QKNormSpec(weight="per_head"), QKNormSpec(weight="none"), QKNormSpec(over="projection"),
]  # fmt: skip
TRANSPORTS: tuple[Transport, ...] = ("shared_memory", "gloo")
SIZES = st.sampled_from([2, 2, 3, 4])


def by_head(score: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """A custom score function, another one of each head."""
    return score - (head % 3).to(score.dtype) * (query - key).to(score.dtype) / 4


@st.composite
def grouped(draw: st.DrawFn, size: int) -> AttentionSpec:
    """Key/value heads may be fewer than ranks: then each is held by several."""
    kv_heads = draw(st.sampled_from([count for count in range(1, size + 1) if size % count == 0] + [2 * size]))
    heads = kv_heads * draw(st.sampled_from([count for count in (1, 2, 3, 4, 6, 8) if kv_heads * count % size == 0]))
    return AttentionSpec(
        num_heads=heads, num_kv_heads=kv_heads, head_dim=4, qkv_bias=draw(st.booleans()),
        o_proj_bias=draw(st.booleans()), sink_logits=draw(st.booleans()), output_gate=draw(st.booleans()),
        sliding_window=draw(st.sampled_from([None, 3])),
        qk_norm=draw(st.sampled_from(QK_NORMS)), position=draw(st.sampled_from(["rotary", "rotary", "alibi", "none"])),
        score=draw(st.sampled_from([None, None, CustomPart(path=f"{__name__}:by_head")])),
    )  # fmt: skip


@st.composite
def latent(draw: st.DrawFn, size: int) -> MLASpec:
    return MLASpec(
        num_heads=size * draw(st.integers(1, 2)), kv_lora_rank=5, qk_rope_head_dim=2, qk_nope_head_dim=3, v_head_dim=4,
        q_lora_rank=draw(st.sampled_from([None, 6])), o_proj_bias=draw(st.booleans()),
    )  # fmt: skip


@st.composite
def mixtures(draw: st.DrawFn, size: int) -> MoESpec:
    experts = size * draw(st.integers(1, 2))
    return MoESpec(
        num_experts=experts, num_experts_per_tok=draw(st.integers(1, min(3, experts))), router_bias=draw(st.booleans()),
        router=draw(st.sampled_from([RouterSpec(), RouterSpec(score="sigmoid", softmax_chosen=False, factor=1.5),
                                     RouterSpec(score="softmax", softmax_chosen=False, weighs_input=True)])),
        shared_intermediate_size=draw(st.sampled_from([None, 2 * size])),
    )  # fmt: skip


@st.composite
def layers(draw: st.DrawFn, size: int) -> LayerSpec:
    experts = draw(st.one_of(st.none(), mixtures(size)))
    gated = experts is not None or draw(st.booleans())
    norms, parallel = draw(st.sampled_from(ORDERS))
    return LayerSpec(
        attention=draw(st.one_of(grouped(size), latent(size))), intermediate_size=size * draw(st.integers(1, 3)),
        mlp_bias=draw(st.booleans()), activation=ActivationSpec(kind="silu" if gated else "gelu", gated=gated),
        experts=experts, norms=norms, parallel=parallel,
    )  # fmt: skip


@st.composite
def models(draw: st.DrawFn, size: int) -> ModelSpec:
    """A vocabulary that ranks do not divide is as good as any."""
    tied = draw(st.booleans())
    layered = tuple(draw(st.lists(layers(size), min_size=1, max_size=2)))
    over = any(isinstance(a := kind.attention, AttentionSpec) and a.qk_norm == QK_NORMS[-1] for kind in layered)
    return ModelSpec(
        name="random", vocab_size=draw(st.sampled_from([24, 29])), hidden_size=8,
        layers=layered, max_position_embeddings=32,
        norm=NormSpec() if over or draw(st.booleans()) else NormSpec(kind="layer", bias=True), tie_word_embeddings=tied,
        head_bias=not tied and draw(st.booleans()), learned_positions=draw(st.sampled_from([None, 2])),
        logit_scale=draw(st.sampled_from([1.0, 0.5])), residual_scale=1.0,
        embedding_scale=draw(st.sampled_from([1.0, 3.0])), final_logit_softcapping=draw(st.sampled_from([0.0, 5.0])),
    )  # fmt: skip


SHARED = SIZES.flatmap(lambda size: st.tuples(st.just(size), models(size)))
DENSE = WeightFormat()
TEXT = [3, 17, 0, 23, 9, 9, 11]


def weights(spec: ModelSpec, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return random parameters, none of them a constant that hides a mistake."""
    drawn = random_weights(spec, dtype, 3)
    noise = torch.Generator().manual_seed(5)
    return {
        name: tensor + 0.3 * torch.randn(tensor.shape, generator=noise, dtype=dtype) for name, tensor in drawn.items()
    }
