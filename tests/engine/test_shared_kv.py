"""Layers that read an earlier layer's keys and values, which the cache holds once. Their tokens: tests/laws."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.kinds import dense_models, mixtures, sharing_models
from tests.engine.tiny import (
    CONTEXT,
    finals,
    layer,
    model_of,
    request,
    runner_of,
    spec_of,
    weights_of,
)
from workbench.kv_cache.eviction import parse_eviction
from workbench.memory.report import estimate_memory
from workbench.model.attention_config import AttentionConfig
from workbench.model.attention_spec import QKNormSpec
from workbench.model.cost import StepCostModel
from workbench.model.model_parameters import parameter_shapes
from workbench.model.recurrent.spec import ParallelRecurrentSpec, ShortConvSpec
from workbench.model.spec import ModelSpec
from workbench.model.variants import change_attention
from workbench.oracle import naive
from workbench.testing.attention_scenarios import require_equal_logits, sampled_logits
from workbench.testing.eviction_oracle import evicted_logits

PAIR = spec_of(layer(4, 2, 6), layer(2, 2, 6, kv_shared_with=0))
FOUR = spec_of(
    layer(4, 2, 8, qk_norm=True), layer(2, 1, 8, sliding_window=5),
    layer(6, 2, 8, qk_norm=True, kv_shared_with=0), layer(1, 1, 8, sliding_window=5, kv_shared_with=1, bias=True),
)  # fmt: skip


FORMATS: tuple[Any, ...] = (
    {"format": "int8"}, {"format": "int4", "rotate": True}, {"keys": "fp8", "values": "int8"},
    {"layers": {0: {"format": "int8"}}}, {"codec": "tests.engine.tiny:Halved"},
)  # fmt: skip
SMALL = {"quant_group": 8, "columns": 8, "residual_length": 6}


# Its first layer has a recurrent state beside the keys and values that the second reads too.
BESIDE = spec_of(
    layer(4, 2, 8).model_copy(update={"beside": ParallelRecurrentSpec(recurrent=ShortConvSpec(channels=6))}),
    layer(2, 2, 8, kv_shared_with=0),
)  # fmt: skip


@pytest.mark.parametrize("spec", [FOUR, BESIDE], ids=["four", "beside"])
@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_every_cache_format_keeps_the_laws(format: dict[str, Any], spec: ModelSpec) -> None:
    """Batched, chunked, one by one, after a prefix: what is stored once is read alike by each layer."""
    model = model_of(spec, dtype=torch.float64)
    cache = {**({} if "codec" in format else SMALL), **format}
    texts = {f"{i}": request(f"{i}", length, 1).prompt_ids for i, length in enumerate((30, 17, 9))}
    texts["again"] = texts["0"][:26]
    shared: dict[str, Any] = {"cache": cache, "page_size": 8, "max_num_seqs": 1}
    whole = sampled_logits(model, texts, 8, max_num_batched_tokens=CONTEXT, **shared)
    for message, changes in {
        "batched": {"max_num_seqs": 4}, "in chunks": {"max_num_batched_tokens": 5}, "one by one":
        {"max_num_batched_tokens": 1}, "after a prefix": {"prefix": "radix"},
    }.items():  # fmt: skip
        found = sampled_logits(model, texts, 8, **{"max_num_batched_tokens": CONTEXT, **shared, **changes})
        require_equal_logits(found, whole, message, format)
    for tokens, row in whole.values():
        exact = naive.logits(model, torch.tensor(tokens))[-1]
        assert (row - exact).abs().max() <= 0.5 * (1 + exact.abs().max()), "quantized, it stays near"


@pytest.mark.parametrize("policy", ["heavy_hitters", "snapkv", "sinks_recent"])
def test_eviction_keeps_what_all_readers_attend_to(policy: str) -> None:
    """Layers that read the same keys and values add their attention, and lose the same tokens."""
    kinds = layer(4, 2, 8), layer(2, 2, 8, kv_shared_with=0), layer(4, 1, 8), layer(3, 1, 8, kv_shared_with=2)
    model, budget = model_of(spec_of(*kinds), dtype=torch.float64), 8
    evict = parse_eviction({"kind": policy, "budget": budget})
    assert evict is not None
    prompt = request("evicted", 24, 1).prompt_ids
    rows = sampled_logits(model, {"a": prompt}, 14, evict=evict, page_size=4, max_num_batched_tokens=7)
    tokens = max((tokens for tokens, _ in rows.values()), key=len)
    exact = evicted_logits(model, evict, evict.budget_for(4, 1), tokens, len(prompt))
    assert len(rows) == 14
    for known, row in rows.values():
        right = exact[len(known) - 1]
        assert (row - right).abs().max() <= 1e-9 * (1 + right.abs().max())


@given(st.one_of(sharing_models(), dense_models, mixtures))
def test_states_and_stores_have_the_shapes_of_the_spec(spec: ModelSpec) -> None:
    model = model_of(spec)
    assert {name: tuple(values.shape) for name, values in model.state_dict().items()} == parameter_shapes(spec)
    assert spec.num_parameters == sum(values.numel() for values in model.parameters())
    assert ModelSpec.model_validate_json(spec.model_dump_json()) == spec
    store = runner_of(model).store
    assert store.bytes == store.expected_bytes


def test_a_layer_that_shares_takes_no_memory() -> None:
    shared, apart = PAIR, spec_of(layer(4, 2, 6), layer(2, 2, 6))
    less, more = (estimate_memory(spec, dtype="float32") for spec in (shared, apart))
    assert 2 * less.memory.sequence_bytes == more.memory.sequence_bytes
    assert less.memory.weight_bytes == more.memory.weight_bytes - 4 * 2 * 2 * 6 * shared.hidden_size
    runner = runner_of(model_of(shared))
    assert runner.store.bytes == runner.store.expected_bytes
    assert runner.store.bytes_per_token == 2 * 2 * 6 * 4
    assert sum(len(runner.store.page_tensors(table)) for table in range(len(runner.store.groups))) == 2
    # A decode of one token after nine others: both layers read ten positions, one writes one.
    costs = [StepCostModel(spec, 0.0, 0.0, 4.0)([(9, 1)], 0) for spec in (shared, apart)]
    assert [cost.bytes for cost in costs] == [(20 + 1) * 2 * 2 * 6 * 4, (20 + 2) * 2 * 2 * 6 * 4]
    assert costs[0].flops == costs[1].flops - 2 * 2 * 2 * 6 * shared.hidden_size


def test_a_trained_model_comes_to_share() -> None:
    """Its own keys and values fall, with their norm; queries stay as they are."""
    kinds = layer(4, 2, 6, qk_norm=True, bias=True), layer(4, 2, 6, qk_norm=True, bias=True, sink_logits=True)
    spec = spec_of(*kinds)
    state = weights_of(spec, torch.float32, 0)
    change = AttentionConfig.parse({"layers": {1: {"kv_shared_with": 0}}})
    changed, found = change_attention(spec, state, change)
    assert changed.layers[1].attention.kv_shared_with == 0
    assert {name: tuple(values.shape) for name, values in found.items()} == parameter_shapes(changed)
    for kind in ("weight", "bias"):
        name = f"blocks.1.attention.qkv.{kind}"
        assert torch.equal(found[name], state[name][: 4 * 6])


def test_norms_of_queries_alone() -> None:
    """A layer that shares has a norm of queries, of any kind, and none of keys."""
    for norm in (QKNormSpec(), QKNormSpec(over="projection"), QKNormSpec(weight="per_head", after_rotary=True)):
        spec = spec_of(layer(4, 2, 6, qk_norm=norm), layer(4, 2, 6, qk_norm=norm, kv_shared_with=0))
        model = model_of(spec, dtype=torch.float64)
        ids = torch.tensor(request("normed", 15, 1).prompt_ids)
        assert (model.logits(ids) - naive.logits(model, ids)).abs().max() <= 1e-12
        assert "blocks.1.attention.key_norm.weight" not in model.state_dict()
    assert finals(runner_of(model), [request("normed", 15, 3)])
