"""Models with recurrent layers."""

from __future__ import annotations

from hypothesis import strategies as st

from tests.engine.tiny import layer, spec_of
from workbench.model.recurrent.spec import DeltaNetSpec, Mamba2Spec, ParallelRecurrentSpec, ShortConvSpec
from workbench.model.spec import LayerSpec, ModelSpec

CONVS = st.builds(ShortConvSpec, channels=st.integers(1, 6), kernel=st.integers(2, 5), bias=st.booleans())
DELTA_NETS = st.builds(
    lambda keys, shared, key, value: DeltaNetSpec(
        num_key_heads=keys, num_value_heads=keys * shared, key_dim=key, value_dim=value, kernel=3
    ),
    st.integers(1, 2), st.integers(1, 2), st.integers(1, 4), st.integers(1, 4),
)  # fmt: skip
MAMBAS = st.builds(
    lambda heads, groups, width, state, bias, norm, scales: Mamba2Spec(
        heads=heads * groups, head_width=width, state=state, groups=groups, kernel=3, bias=bias, norm=norm,
        column_scales=scales,
    ),
    st.integers(1, 2), st.integers(1, 2), st.integers(1, 4), st.integers(1, 4), st.booleans(),
    st.sampled_from(["after_gate", "before_gate", "none"]),
    st.sampled_from([(1.0,) * 5, (0.5, 1.2, 0.9, 1.5, 0.7)]),
)  # fmt: skip
SCALES = ("recurrent_input", "recurrent_output", "attention_input", "attention_output")
BESIDE = st.builds(
    ParallelRecurrentSpec, recurrent=st.one_of(CONVS, DELTA_NETS, MAMBAS),
    **{f"{name}_scale": st.sampled_from([1.0, 0.6, 1.5]) for name in SCALES},
)  # fmt: skip
HYBRIDS = st.builds(
    lambda kind, beside, scale: kind.model_copy(update={"beside": beside, "feedforward_scale": scale}),
    st.sampled_from([layer(), layer(4, 2, bias=True), layer(4, 2, sliding_window=5)]), BESIDE,
    st.sampled_from([1.0, 0.7]),
)  # fmt: skip
RECURRENT = st.one_of(
    st.builds(LayerSpec, attention=st.one_of(CONVS, DELTA_NETS, MAMBAS), intermediate_size=st.sampled_from([0, 12])),
    HYBRIDS,
)
ATTENTION = st.sampled_from([layer(), layer(4, 2), layer(sliding_window=5), layer(4, 2, output_gate=True)])


@st.composite
def models(draw: st.DrawFn) -> ModelSpec:
    """One recurrent layer at least, in any place."""
    others = draw(st.lists(st.one_of(RECURRENT, ATTENTION), max_size=2))
    return spec_of(*draw(st.permutations([draw(RECURRENT), *others])))


CONV = ShortConvSpec(channels=6)
SHORT_CONV = LayerSpec(attention=CONV, intermediate_size=12)
HYBRID = spec_of(SHORT_CONV, layer(), SHORT_CONV)
