"""Random layers of every kind that a spec can describe, small enough for the oracle."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from tests.engine.tiny import CONTEXT, VOCAB, layer, layers, spec_of
from workbench.model.attention_spec import AttentionSpec, MLASpec, RotaryConfig, RotaryScaling
from workbench.model.spec import SHARED_KV_SETTINGS, ActivationSpec, LayerSpec, ModelSpec, MoESpec, NormSpec

LATENT = MLASpec(num_heads=3, kv_lora_rank=4, qk_rope_head_dim=4, qk_nope_head_dim=3, v_head_dim=4, q_lora_rank=4)
GEMMA = LayerSpec(
    attention=spec_of().layers[0].attention,
    intermediate_size=12,
    activation=ActivationSpec(kind="gelu_tanh"),
    norms="both",
)
MIXTURE = LayerSpec(
    attention=spec_of().layers[0].attention, intermediate_size=12, experts=MoESpec(num_experts=3, num_experts_per_tok=2)
)


def _wide(hidden: int = 64, bias: bool = False, **slots: Any) -> LayerSpec:
    return layer(4, 2, 16, bias=bias, **slots).model_copy(update={"intermediate_size": hidden})


# Matrices that fit panels, and dot products of pairs.
WIDE = spec_of(
    _wide(bias=True, qk_norm=True),
    _wide(96, sliding_window=9, num_sink_tokens=2, rotary=RotaryConfig(rope_theta=50.0)),
    _wide(bias=True, position="none", sink_logits=True, softcap=1.5),
).model_copy(update={"hidden_size": 64})
WINDOWS = st.sampled_from([None, None, 3, 9])
ROTARIES = st.builds(
    RotaryConfig,
    rope_theta=st.sampled_from([100.0, 10_000.0]),
    scaling=st.sampled_from([
        RotaryScaling(),
        RotaryScaling(kind="linear", factor=3.0),
        RotaryScaling(
            kind="yarn", factor=4.0, beta_fast=3.0, original_max_position_embeddings=16, attention_factor=1.2,
        ),
        RotaryScaling(kind="yarn", factor=4.0, beta_fast=3.0, original_max_position_embeddings=16, truncate=False),
    ]),
)  # fmt: skip
OWN_ROTARIES = st.one_of(st.none(), ROTARIES)


@st.composite
def grouped(draw: st.DrawFn) -> AttentionSpec:
    groups = draw(st.integers(1, 2))
    bias = draw(st.booleans())
    return AttentionSpec(
        num_heads=groups * draw(st.integers(1, 3)), num_kv_heads=groups, head_dim=draw(st.sampled_from([2, 6])),
        sliding_window=draw(WINDOWS), rotary=draw(OWN_ROTARIES), qkv_bias=bias, o_proj_bias=bias,
    )  # fmt: skip


@st.composite
def latent(draw: st.DrawFn) -> MLASpec:
    query, window = draw(st.sampled_from([None, 3, 5])), draw(WINDOWS)
    bias = query is not None and draw(st.booleans())
    return MLASpec(
        num_heads=draw(st.integers(1, 3)), kv_lora_rank=draw(st.integers(1, 6)),
        qk_rope_head_dim=draw(st.sampled_from([2, 4])), qk_nope_head_dim=draw(st.integers(1, 4)),
        v_head_dim=draw(st.integers(1, 5)), q_lora_rank=query, scale=draw(st.sampled_from([None, 0.7])),
        sliding_window=window, num_sink_tokens=0 if window is None else draw(st.integers(0, 2)),
        rotary=draw(OWN_ROTARIES), rope_interleave=draw(st.booleans()), qkv_bias=bias, o_proj_bias=draw(st.booleans()),
    )  # fmt: skip


NORMS = st.one_of(
    st.builds(NormSpec, offset=st.sampled_from([0.0, 1.0])),
    st.builds(NormSpec, kind=st.just("layer"), bias=st.booleans(), offset=st.sampled_from([0.0, 1.0])),
    st.just(NormSpec(kind="layer", weight=False)),
)


def layers_of(experts: st.SearchStrategy[MoESpec | None]) -> st.SearchStrategy[LayerSpec]:
    return st.builds(
        LayerSpec,
        attention=st.one_of(grouped(), latent()),
        intermediate_size=st.sampled_from([3, 12]),
        mlp_bias=st.booleans(),
        activation=st.one_of(
            st.builds(
                ActivationSpec,
                kind=st.sampled_from(["silu", "gelu_tanh", "clamped", "gelu", "relu2"]),
                alpha=st.just(1.3),
                limit=st.just(0.5),
            ),
            st.builds(ActivationSpec, kind=st.sampled_from(["gelu", "gelu_tanh", "relu"]), gated=st.just(False)),
        ),
        experts=experts,
        norms=st.sampled_from(["pre", "both", "post"]),
    ).map(parallel_or_not)


def parallel_or_not(layer: LayerSpec) -> LayerSpec:
    """Every third width makes a layer's parts parallel, where norms and experts allow that."""
    update: dict[str, object] = {}
    if layer.norms == "pre" and layer.intermediate_size == 3:
        update["parallel"] = "one_norm" if layer.mlp_bias else "two_norms"
    if layer.experts is not None and not layer.activation.gated:
        update["activation"] = ActivationSpec()
    return layer.model_copy(update=update)


def models(experts: st.SearchStrategy[MoESpec | None]) -> st.SearchStrategy[ModelSpec]:
    return st.builds(
        ModelSpec,
        name=st.just("tiny"), vocab_size=st.just(VOCAB), hidden_size=st.just(8),
        max_position_embeddings=st.just(CONTEXT),
        layers=st.lists(layers_of(experts), min_size=1, max_size=3).map(tuple),
        rotary=ROTARIES, tie_word_embeddings=st.booleans(), norm=NORMS,
        embedding_scale=st.sampled_from([1.0, 3.0]), final_logit_softcapping=st.sampled_from([0.0, 2.0]),
    )  # fmt: skip


dense_models = models(st.none())
# Which experts are chosen jumps where two scores meet: only float64 is sure to choose as the oracle does.
mixtures = models(
    st.sampled_from(
        [
            MoESpec(num_experts=3, num_experts_per_tok=2),
            MoESpec(num_experts=1, num_experts_per_tok=1),
            MoESpec(num_experts=4, num_experts_per_tok=1),
        ]
    )
)


@st.composite
def sharing_models(draw: st.DrawFn) -> ModelSpec:
    """Layers with keys and values of their own, and one at least that reads them, with slots and heads of its own."""
    kinds = draw(st.lists(layers(own=True), min_size=1, max_size=2))
    for _ in range(draw(st.integers(1, 3))):
        own = [index for index, kind in enumerate(kinds) if kind.attention.kv_shared_with is None]
        source, other = draw(st.sampled_from(own)), draw(layers(own=True))
        read = {name: getattr(kinds[source].attention, name) for name in SHARED_KV_SETTINGS}
        heads = read["num_kv_heads"] * draw(st.integers(1, 3))
        slots = {**dict(other.attention), **read, "num_heads": heads, "kv_shared_with": source}
        kinds.append(other.model_copy(update={"attention": type(other.attention)(**slots)}))
        if draw(st.booleans()):
            kinds.append(draw(layers(own=True)))
    return spec_of(*kinds, tied=draw(st.booleans()))
