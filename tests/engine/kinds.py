"""Random layers of every kind that a spec can describe, small enough for the oracle."""

from __future__ import annotations

from hypothesis import strategies as st

from tests.engine.tiny import CONTEXT, VOCAB
from workbench.model.latent_spec import LatentAttention
from workbench.model.spec import Attention, Experts, Gate, LayerKind, ModelSpec, Rotary, RotaryScaling

WINDOWS = st.sampled_from([None, None, 3, 9])
ROTARIES = st.builds(
    Rotary,
    base=st.sampled_from([100.0, 10_000.0]),
    scaling=st.sampled_from([
        RotaryScaling(),
        RotaryScaling(kind="linear", factor=3.0),
        RotaryScaling(kind="yarn", factor=4.0, fast_turns=3.0, original_context=16, amplitude=1.2),
        RotaryScaling(kind="yarn", factor=4.0, fast_turns=3.0, original_context=16, whole_pairs=False),
    ]),
)  # fmt: skip
OWN_ROTARIES = st.one_of(st.none(), ROTARIES)


@st.composite
def grouped(draw: st.DrawFn) -> Attention:
    groups = draw(st.integers(1, 2))
    bias = draw(st.booleans())
    return Attention(
        heads=groups * draw(st.integers(1, 3)), groups=groups, dim=draw(st.sampled_from([2, 6])),
        window=draw(WINDOWS), rotary=draw(OWN_ROTARIES), input_bias=bias, output_bias=bias,
    )  # fmt: skip


@st.composite
def latent(draw: st.DrawFn) -> LatentAttention:
    query, window = draw(st.sampled_from([None, 3, 5])), draw(WINDOWS)
    bias = query is not None and draw(st.booleans())
    return LatentAttention(
        heads=draw(st.integers(1, 3)), latent=draw(st.integers(1, 6)), rope_dim=draw(st.sampled_from([2, 4])),
        plain_dim=draw(st.integers(1, 4)), value_dim=draw(st.integers(1, 5)), query_latent=query,
        window=window, sinks=0 if window is None else draw(st.integers(0, 2)), scale=draw(st.sampled_from([None, 0.7])),
        rotary=draw(OWN_ROTARIES), interleaved=draw(st.booleans()), input_bias=bias, output_bias=draw(st.booleans()),
    )  # fmt: skip


def layers(experts: st.SearchStrategy[Experts | None]) -> st.SearchStrategy[LayerKind]:
    return st.builds(
        LayerKind,
        attention=st.one_of(grouped(), latent()),
        hidden=st.sampled_from([3, 12]),
        feedforward_bias=st.booleans(),
        gate=st.builds(
            Gate, kind=st.sampled_from(["silu", "gelu_tanh", "clamped"]), alpha=st.just(1.3), limit=st.just(0.5)
        ),
        experts=experts,
        post_norms=st.booleans(),
    )


def models(experts: st.SearchStrategy[Experts | None]) -> st.SearchStrategy[ModelSpec]:
    return st.builds(
        ModelSpec,
        name=st.just("tiny"), vocab=st.just(VOCAB), width=st.just(8), context=st.just(CONTEXT),
        layers=st.lists(layers(experts), min_size=1, max_size=3).map(tuple),
        rotary=ROTARIES, tied=st.booleans(), norm_offset=st.sampled_from([0.0, 1.0]),
        embedding_scale=st.sampled_from([1.0, 3.0]), final_softcap=st.sampled_from([0.0, 2.0]),
    )  # fmt: skip


dense_models = models(st.none())
# Which experts are chosen jumps where two scores meet: only float64 is sure to choose as the oracle does.
mixtures = models(st.sampled_from([Experts(count=3, used=2), Experts(count=1, used=1), Experts(count=4, used=1)]))
