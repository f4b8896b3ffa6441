"""Random Llama specs, small enough to hold."""

from __future__ import annotations

from hypothesis import strategies as st

from workbench.model.spec import Attention, LayerKind, ModelSpec, Rotary, RotaryScaling

_scalings = st.one_of(
    st.just(RotaryScaling()),
    st.builds(RotaryScaling, kind=st.just("linear"), factor=st.floats(1, 64)),
    st.builds(
        RotaryScaling,
        kind=st.just("llama3"),
        factor=st.floats(1, 64),
        low_factor=st.floats(0.5, 2),
        high_factor=st.floats(3, 8),
        original_context=st.integers(1, 8192),
    ),
    st.builds(
        RotaryScaling,
        kind=st.just("yarn"),
        factor=st.floats(1, 64),
        fast_turns=st.floats(8, 40),
        slow_turns=st.floats(0.5, 2),
        whole_pairs=st.booleans(),
        amplitude=st.floats(0.5, 2),
        original_context=st.integers(1, 8192),
    ),
)


@st.composite
def llama_specs(draw: st.DrawFn) -> ModelSpec:
    groups = draw(st.integers(1, 3))
    biased = draw(st.booleans())
    layer = LayerKind(
        attention=Attention(
            heads=groups * draw(st.integers(1, 3)),
            groups=groups,
            dim=2 * draw(st.integers(1, 8)),
            input_bias=biased,
            output_bias=biased,
        ),
        hidden=draw(st.integers(1, 40)),
        feedforward_bias=draw(st.booleans()),
    )
    return ModelSpec(
        name=draw(st.sampled_from(["one", "two"])),
        vocab=draw(st.integers(1, 50)),
        width=draw(st.integers(1, 40)),
        layers=(layer,) * draw(st.integers(1, 3)),
        context=draw(st.integers(1, 100_000)),
        rotary=Rotary(base=draw(st.floats(1.5, 1e7)), scaling=draw(_scalings)),
        norm_eps=draw(st.floats(1e-8, 1e-3)),
        tied=draw(st.booleans()),
        end_ids=tuple(draw(st.lists(st.integers(0, 49), max_size=3, unique=True))),
    )
