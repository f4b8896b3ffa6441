"""The cost model against counting by hand."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from workbench.model.attention_spec import AttentionSpec
from workbench.model.cost import StepCostEstimate, StepCostModel, visible_pairs
from workbench.model.shapes import named_shape
from workbench.model.spec import LayerSpec, ModelSpec


@given(st.integers(0, 40), st.integers(1, 20), st.one_of(st.none(), st.integers(1, 30)), st.integers(0, 9))
def test_what_queries_see(start: int, length: int, window: int | None, sinks: int) -> None:
    pairs = [
        (query, key)
        for query in range(start, start + length)
        for key in range(query + 1)
        if window is None or key > query - window or key < sinks
    ]
    assert visible_pairs(start, length, window, sinks) == (len(pairs), len({key for _, key in pairs}))


def test_a_decode_step_reads_every_weight_once() -> None:
    spec = named_shape("smollm2-135m")
    cost = StepCostModel(spec, 2, 2, 2)([(0, 1)], sampled=1)
    norms = (2 * len(spec.layers) + 1) * spec.hidden_size
    cache = 2 * 30 * 3 * 64 * 2
    assert cost.bytes == 2 * (spec.num_parameters - norms) + 2 * cache  # read its one position, and wrote it
    assert abs(cost.flops / (2 * (spec.num_parameters - norms)) - 1) < 0.001


def test_by_hand() -> None:
    layer = LayerSpec(attention=AttentionSpec(num_heads=2, num_kv_heads=1, head_dim=4), intermediate_size=3)
    spec = ModelSpec(name="hand", vocab_size=11, hidden_size=5, layers=(layer,), max_position_embeddings=99)
    cost = StepCostModel(spec, 4, 4, 2)
    matrices = 5 * 8 + 2 * 5 * 4 + 8 * 5 + 3 * 5 * 3
    # Three tokens after two: they see 3 + 4 + 5 positions, read five, write three.
    flops = 2.0 * 3 * matrices + 2 * 11 * 5 + 4 * 2 * 4 * 12
    assert cost([(2, 3)], 1) == StepCostEstimate(flops, 4 * (matrices + 55) + 2 * 4 * 8 * 2)
    assert cost([(2, 3)], 0).bytes == 4 * matrices + 2 * 4 * 8 * 2


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 9)), min_size=1, max_size=4))
def test_batching_adds_work_and_shares_weights(spans: list[tuple[int, int]]) -> None:
    cost = StepCostModel(named_shape("tiny"), 2, 2, 2)
    together, alone = cost(spans, len(spans)), [cost([span], 1) for span in spans]
    assert abs(together.flops - sum(c.flops for c in alone)) < 1e-6 * together.flops
    shared = (len(spans) - 1) * cost([], 1).bytes  # the weights, read once instead of once for each
    assert together.bytes == sum(c.bytes for c in alone) - shared
