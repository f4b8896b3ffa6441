"""Random Llama specs, small enough to hold."""

from __future__ import annotations

from hypothesis import strategies as st

from workbench.model.attention_spec import AttentionSpec, RotaryConfig, RotaryScaling
from workbench.model.spec import LayerSpec, ModelSpec, NormSpec

_scalings = st.one_of(
    st.just(RotaryScaling()),
    st.builds(RotaryScaling, kind=st.just("linear"), factor=st.floats(1, 64)),
    st.builds(
        RotaryScaling,
        kind=st.just("llama3"),
        factor=st.floats(1, 64),
        low_freq_factor=st.floats(0.5, 2),
        high_freq_factor=st.floats(3, 8),
        original_max_position_embeddings=st.integers(1, 8192),
    ),
    st.builds(
        RotaryScaling,
        kind=st.just("yarn"),
        factor=st.floats(1, 64),
        beta_fast=st.floats(8, 40),
        beta_slow=st.floats(0.5, 2),
        truncate=st.booleans(),
        attention_factor=st.floats(0.5, 2),
        original_max_position_embeddings=st.integers(1, 8192),
    ),
)


@st.composite
def llama_specs(draw: st.DrawFn, multiple: int = 1) -> ModelSpec:
    """Draw a model whose sizes are multiples of `multiple`."""
    groups = draw(st.integers(1, 3))
    biased = draw(st.booleans())
    layer = LayerSpec(
        attention=AttentionSpec(
            num_heads=groups * draw(st.integers(1, 3)),
            num_kv_heads=groups,
            head_dim=max(2, multiple) * draw(st.integers(1, 16 // max(2, multiple))),
            qkv_bias=biased,
            o_proj_bias=biased,
        ),
        intermediate_size=multiple * draw(st.integers(1, 40 // multiple)),
        mlp_bias=draw(st.booleans()),
    )
    vocab_size = draw(st.integers(1, 50))
    return ModelSpec(
        name=draw(st.sampled_from(["one", "two"])),
        vocab_size=vocab_size,
        hidden_size=multiple * draw(st.integers(1, 40 // multiple)),
        layers=(layer,) * draw(st.integers(1, 3)),
        max_position_embeddings=draw(st.integers(1, 100_000)),
        rotary=RotaryConfig(rope_theta=draw(st.floats(1.5, 1e7)), scaling=draw(_scalings)),
        norm=NormSpec(eps=draw(st.floats(1e-8, 1e-3))),
        tie_word_embeddings=draw(st.booleans()),
        eos_token_ids=tuple(draw(st.lists(st.integers(0, vocab_size - 1), max_size=3, unique=True))),
    )
