"""Latent attention and mixtures: their caches and weights, and what has no compiled step. Their rows: tests/laws."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.kinds import GEMMA, LATENT, MIXTURE, latent
from tests.engine.tiny import Oracle, model_of, request, runner_of, spec_of, weights_of
from workbench.engine.runner import generate
from workbench.kv_cache.page_formats import DensePages
from workbench.model.attention_spec import MLASpec
from workbench.model.spec import ActivationSpec, LayerSpec, NormSpec
from workbench.model.transformer import Transformer
from workbench.oracle import naive


@given(latent(), st.sampled_from([torch.float32, torch.bfloat16]))
def test_a_token_of_latent_attention_leaves_one_head(attention: MLASpec, dtype: torch.dtype) -> None:
    model = model_of(spec_of(LayerSpec(attention=attention, intermediate_size=1)), dtype=dtype)
    store = runner_of(model).store
    assert store.bytes_per_token == (attention.kv_lora_rank + attention.qk_rope_head_dim) * dtype.itemsize
    (cache,) = store.layers[0].pages.values()
    assert isinstance(cache, DensePages) and store.bytes == store.expected_bytes == cache.keys.nbytes
    assert cache.values.data_ptr() == cache.keys.data_ptr()


def test_deepseek_v3_leaves_70_272_bytes_a_token() -> None:
    """61 layers of 512 + 64 numbers in bfloat16 (DeepSeek-V3, 2024)."""
    attention = MLASpec(
        num_heads=128, kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128, q_lora_rank=1536
    )
    assert 61 * attention.cache_values_per_token * 2 == 70_272
    assert attention.matrix_parameters(7168) == 187_105_280


def test_a_step_reads_only_the_experts_that_a_token_uses() -> None:
    model = model_of(spec_of(MIXTURE))
    every = sum(parameter.nbytes for parameter in model.parameters())
    assert every - model.weight_bytes == 3 * 8 * 12 * 4  # one of three experts, in float32


def test_naive_and_pages_differ_where_a_slot_is_ignored() -> None:
    """The oracle itself reads each new field: changing it changes the logits."""
    spec = spec_of(GEMMA, MIXTURE, LayerSpec(attention=LATENT, intermediate_size=12))
    ids, base = torch.arange(20), weights_of(spec, torch.float64, 0)
    plain = naive.logits(Transformer.from_state(spec, base), ids)

    def last(**update: object) -> dict[str, object]:
        return {"layers": (*spec.layers[:2], spec.layers[2].model_copy(update=update))}

    for update in (
        {"norm": NormSpec(offset=0.5)},
        {"embedding_scale": 2.0},
        {"final_logit_softcapping": 1.0},
        last(attention=LATENT.model_copy(update={"scale": 2.0})),
        last(attention=LATENT.model_copy(update={"sliding_window": 3})),
        last(attention=LATENT.model_copy(update={"rope_interleave": False})),
        last(activation=ActivationSpec(kind="clamped", limit=0.2)),
        last(parallel="two_norms"),
        {"logit_scale": 0.5},
    ):
        other = naive.logits(Transformer.from_state(spec.model_copy(update=update), base), ids)
        assert not torch.allclose(plain, other)


def test_latents_that_are_as_wide_and_parted_otherwise_have_tables_of_their_own() -> None:
    ways = (LATENT.model_copy(update={"kv_lora_rank": latent, "qk_rope_head_dim": 8 - latent}) for latent in (4, 6))
    model = model_of(spec_of(*(LayerSpec(attention=attention, intermediate_size=12) for attention in ways)))
    assert len(model.spec.kv_cache_groups) == 2
    assert model.logits([1, 2, 3]).shape == (3, model.spec.vocab_size)
    Oracle(runner := runner_of(model))
    generate(runner, [request("a", 9, 5), request("b", 19, 4)])
