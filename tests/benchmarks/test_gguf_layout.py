"""Rows for llama.cpp's rotary: laws of the permutation, and that both layouts compute the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from einops import rearrange
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.peers.scripts import gguf_layout
from tests.helpers.refusals import refuses
from workbench.model.hf.families import config_from_spec
from workbench.model.model_parameters import stored_parameters
from workbench.model.rotary import rotary_frequencies
from workbench.model.shapes import SHAPES, named_shape

heads_and_pairs = st.tuples(st.integers(1, 5), st.integers(1, 8))


@given(heads_and_pairs, st.sampled_from([(), (3,)]))
def test_unpermuting_what_was_permuted_is_the_identity(sizes, columns) -> None:
    heads, pairs = sizes
    count = heads * pairs * 2
    rows = np.arange(count * (columns or (1,))[0]).reshape(count, *columns)
    permuted = gguf_layout.permuted(rows, heads)
    assert np.array_equal(gguf_layout.unpermuted(permuted, heads), rows)
    assert np.array_equal(gguf_layout.permuted(gguf_layout.unpermuted(rows, heads), heads), rows)
    expected = rearrange(rows, "(head half pair) ... -> (head pair half) ...", head=heads, half=2)
    assert np.array_equal(permuted, expected)


@given(heads_and_pairs, st.integers(0, 9))
def test_neighbours_turned_after_permuting_are_halves_turned_before(sizes, position) -> None:
    heads, pairs = sizes
    query = np.random.default_rng(0).normal(size=heads * pairs * 2)
    angles = position * rotary_frequencies(named_shape("tiny").rotary, 2 * pairs).numpy()
    first, second = rearrange(query, "(head half pair) -> half head pair", half=2, pair=pairs)
    halves = np.stack(_turn(first, second, angles))
    here = rearrange(halves, "half head pair -> (head half pair)")
    first, second = rearrange(
        gguf_layout.permuted(query, heads), "(head pair half) -> half head pair", half=2, pair=pairs
    )
    there = rearrange(np.stack(_turn(first, second, angles)), "half head pair -> (head pair half)")
    np.testing.assert_allclose(there, gguf_layout.permuted(here, heads))


def _turn(first: np.ndarray, second: np.ndarray, angles: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return first * np.cos(angles) - second * np.sin(angles), second * np.cos(angles) + first * np.sin(angles)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_tensor_has_a_name_of_its_own(shape: str) -> None:
    """Peers are given folders in Llama's form, so a mixture is refused before any tool starts."""
    if any(layer.experts is not None for layer in SHAPES[shape].layers):
        refuses(f"{shape}: a Llama config has no", lambda: config_from_spec(SHAPES[shape]))
        return
    names = [part.name for parameter in stored_parameters(SHAPES[shape]).values() for part in parameter.parts]
    ours = [gguf_layout.gguf_name(name) for name in names]
    assert len(set(ours)) == len(names)
    assert gguf_layout.gguf_name("model.layers.11.self_attn.k_proj.weight") == "blk.11.attn_k.weight"
    assert gguf_layout.gguf_name("lm_head.weight") == "output.weight"


def test_rotary_factors_are_llama_31s() -> None:
    spec = named_shape("llama-3.1-8b")
    factors = gguf_layout.rotary_factors(config_from_spec(spec))
    assert factors is not None
    dim = spec.layers[0].attention.head_dim
    plain = spec.rotary.rope_theta ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    torch.testing.assert_close(
        plain / torch.from_numpy(factors).double(), rotary_frequencies(spec.rotary, dim).double(), rtol=1e-6, atol=0
    )
    assert gguf_layout.rotary_factors(config_from_spec(named_shape("tiny"))) is None
