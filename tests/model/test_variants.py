"""A trained model's attention changed: pooled heads by hand, copies that change nothing, slots that begin at rest."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.tiny import layer, spec_of, weights_of
from tests.thorough import tries
from workbench.model.attention_config import AttentionConfig
from workbench.model.model_parameters import parameter_shapes
from workbench.model.spec import ModelSpec
from workbench.model.transformer import Transformer
from workbench.model.variants import change_attention, pool_kv_heads
from workbench.oracle import naive

IDS = torch.arange(1, 17)


def varied(spec: ModelSpec, **values: object) -> Transformer:
    return Transformer.from_state(
        *change_attention(spec, weights_of(spec, torch.float64, 3), AttentionConfig.parse(values))
    )


def logits(model: Transformer) -> torch.Tensor:
    rows = model.logits(IDS)
    assert torch.allclose(rows, naive.logits(model, IDS), rtol=0, atol=1e-10)
    return rows


@settings(max_examples=tries(20))
@given(st.sampled_from([1, 2, 3]), st.sampled_from([1, 2, 3]), st.booleans())
def test_more_groups_are_copies_and_change_nothing(groups: int, copies: int, bias: bool) -> None:
    spec = spec_of(layer(6 * groups, groups, bias=bias), layer(6 * groups, groups, sliding_window=4))
    plain, more = varied(spec), varied(spec, num_kv_heads=groups * copies)
    assert {kind.attention.num_kv_heads for kind in more.spec.layers} == {groups * copies}
    assert torch.allclose(logits(plain), logits(more), rtol=0, atol=1e-12)


def test_pooling_is_the_mean_of_neighbouring_heads() -> None:
    """By hand, on the weights' own rows: four heads as two."""
    spec = spec_of(layer(4, 4, dim=2, bias=True))
    state = weights_of(spec, torch.float32, 0)
    new_spec, new = change_attention(spec, state, AttentionConfig(num_kv_heads=2))
    for name in ("qkv.weight", "qkv.bias"):
        old_rows, rows = (each[f"blocks.0.attention.{name}"] for each in (state, new))
        assert torch.equal(rows[:8], old_rows[:8]), "queries stay"
        for kept, first in ((8, 8), (12, 16)):  # keys, values: new rows from `kept` on, old ones from `first` on
            for head in range(2):
                pair = old_rows[first + 4 * head : first + 4 * head + 4]
                assert torch.allclose(rows[kept + 2 * head : kept + 2 * head + 2], (pair[:2] + pair[2:]) / 2)
        assert len(rows) == 16
    assert {name: tuple(values.shape) for name, values in new.items()} == parameter_shapes(new_spec)


def test_equal_heads_pooled_are_themselves() -> None:
    heads = torch.randn(2, 3, 5).repeat_interleave(4, dim=0)
    assert torch.allclose(pool_kv_heads(heads, 2), heads[::4], rtol=1e-6)
    assert torch.equal(pool_kv_heads(heads, 2, "first"), heads[::4])
    assert torch.equal(pool_kv_heads(torch.arange(4.0)[:, None], 2), torch.tensor([[0.5], [2.5]]))


def test_slots_that_are_new_begin_at_rest() -> None:
    spec = spec_of(layer(4, 2))
    state = change_attention(
        spec, weights_of(spec, torch.bfloat16, 0), AttentionConfig.parse({"qk_norm": True, "sink_logits": True})
    )[1]
    assert torch.equal(state["blocks.0.attention.query_norm.weight"], torch.ones(4, dtype=torch.bfloat16))
    assert torch.equal(state["blocks.0.attention.sink_logits"], torch.zeros(4, dtype=torch.bfloat16))


def test_slots_taken_away_take_their_parameters_along() -> None:
    spec = spec_of(layer(qk_norm=True, sink_logits=True), layer(qk_norm=True))
    model = varied(spec, qk_norm=False, layers={0: {"sink_logits": False}})
    assert logits(model).isfinite().all()
    assert model.spec.num_parameters == sum(parameter.numel() for parameter in model.parameters())


def test_a_window_wide_enough_and_no_cap_change_nothing() -> None:
    spec = spec_of(layer(4, 2), layer(4, 2))
    plain = logits(varied(spec))
    assert torch.equal(plain, logits(varied(spec, sliding_window=16)))
    assert torch.equal(plain, logits(varied(spec, sliding_window=3, num_sink_tokens=16)))
    assert torch.equal(plain, logits(varied(spec, softcap=0)))
    others = {"softcap": 1.0}, {"position": "none"}, {"position": "alibi"}, {"scale": 0.1}
    for change in ({"sliding_window": 15}, *others):
        assert not torch.allclose(plain, logits(varied(spec, **change)), atol=1e-6), change
