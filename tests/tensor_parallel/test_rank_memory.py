"""Memory of ranks by formula: what their shares have, put together the whole, and stages that leave nothing out."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compiled_kernels import Backend
from tests.tensor_parallel.specs import DENSE, SHARED, weights
from workbench.engine.config import CacheConfig
from workbench.errors import WorkbenchError
from workbench.kv_cache.store import KVStore
from workbench.memory.ranks import rank_memories, ranks_report, stages_of
from workbench.memory.report import estimate_memory, report_for
from workbench.model.attention_spec import AttentionSpec
from workbench.model.memory import cache_shapes
from workbench.model.quantized import WeightFormat, quantize
from workbench.model.shapes import SHAPES, named_shape
from workbench.model.spec import ModelSpec
from workbench.model.transformer import Transformer
from workbench.tensor_parallel.cut import cut_state, spec_of_rank

FLOAT32 = 4


@given(SHARED)
def test_a_rank_takes_what_its_tensors_take(shared: tuple[int, ModelSpec]) -> None:
    """Weights and pages of the real cut, byte by byte."""
    size, spec = shared
    state = weights(spec, torch.float32)
    for found in rank_memories(spec, "float32", DENSE, CacheConfig(), tensor=size):
        own = cut_state(state, spec, found.rank, size)
        assert found.memory.weight_bytes == sum(tensor.nbytes for tensor in own.values())
        store = KVStore(cache_shapes(spec_of_rank(spec, found.rank, size)), (3,) * len(found.parts), 5, torch.float32)
        assert round(sum(part.bytes_per_token for part in found.parts) * 4 * 5) == store.bytes


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_quantized_shares_with_their_scales(kind: str) -> None:
    spec, format = named_shape("tiny"), WeightFormat.parse(kind, quant_group=16)
    state = quantize(weights(spec, torch.float32), spec, format)
    for found in rank_memories(spec, "float32", format, CacheConfig(), tensor=2):
        own = cut_state(state, spec, found.rank, 2)
        share = Transformer.from_state(spec_of_rank(spec, found.rank, 2), own, Backend.EAGER, format)
        assert found.memory.weight_bytes == sum(parameter.nbytes for parameter in share.parameters())


@pytest.mark.parametrize("name", SHAPES)
@given(st.integers(1, 6))
def test_stages_put_together_are_the_model(name: str, pipeline: int) -> None:
    """Each layer is in one stage, with its cache; a tied matrix is in the first stage and in the last."""
    spec = named_shape(name)
    try:
        stages = stages_of(spec, pipeline)
    except WorkbenchError as error:
        assert "layers" in str(error) or "streams" in str(error)
        return
    assert [layer for stage in stages for layer in stage] == list(range(len(spec.layers)))
    assert max(map(len, stages)) - min(map(len, stages)) <= 1
    found = rank_memories(spec, "float32", DENSE, CacheConfig(), pipeline=pipeline, context=100, batch=3)
    whole = estimate_memory(spec, dtype="float32", context=100, batch=3).memory
    twice = spec.vocab_size * spec.hidden_size * FLOAT32 * (spec.tie_word_embeddings and pipeline > 1)
    assert sum(each.memory.weight_bytes for each in found) == whole.weight_bytes + twice
    assert sum(each.memory.sequence_bytes for each in found) == pytest.approx(whole.sequence_bytes, abs=len(found))
    assert max(each.memory.activation_bytes for each in found) <= whole.activation_bytes


def test_one_rank_is_the_whole_model() -> None:
    (found,) = rank_memories(named_shape("tiny"), "bfloat16", DENSE, CacheConfig(), context=50, batch=2)
    assert found.memory == estimate_memory(named_shape("tiny"), context=50, batch=2).memory


def test_shares_are_near_their_part_of_the_whole() -> None:
    """Of a large model norms are little: within 3%."""
    spec = named_shape("llama-3.1-70b")
    whole = estimate_memory(spec).memory
    for each in rank_memories(spec, "bfloat16", DENSE, CacheConfig(), tensor=8):
        assert each.memory.weight_bytes == pytest.approx(whole.weight_bytes / 8, rel=0.03)
        assert each.memory.cache_bytes == whole.cache_bytes / 8


def test_heads_fewer_than_ranks_are_held_several_times() -> None:
    spec = named_shape("llama-3.1-8b")  # of 8 key/value heads
    eight, sixteen = (rank_memories(spec, "bfloat16", DENSE, CacheConfig(), tensor=size)[0].memory for size in (8, 16))
    assert eight.cache_bytes == sixteen.cache_bytes


def test_the_report_says_what_a_device_holds() -> None:
    found = report_for("shape:llama-3.1-70b", tensor=4, pipeline=2, memory="40GB", context=8192)
    assert [(row["stage"], row["rank"]) for row in found["ranks"]] == [(s, r) for s in range(2) for r in range(4)]
    assert found["largest_rank_bytes"] == max(row["total_bytes"] for row in found["ranks"])
    assert found["sequences"] > report_for("shape:llama-3.1-70b", memory="160GB", context=8192)["sequences"]
    alone = report_for("shape:llama-3.1-8b", tensor=2, memory="1GB")
    assert alone["sequences"] == 0 and "weights and activations of one rank alone exceed 954 MiB" in alone["remarks"][0]


@pytest.mark.parametrize(
    ("name", "given", "words"),
    [
        (
            "llama-3.1-8b",
            {"tensor": 3},
            "tensor: 3 ranks cannot share llama-3.1-8b: layer 0: its num_heads of 32 is not a multiple of 3",
        ),
        ("llama-3.1-8b", {"pipeline": 33}, "pipeline 33: llama-3.1-8b has 32 layers, and a stage has at least one"),
        ("tiny", {"tensor": 2, "weights": "int4"}, "32 columns of its heads x dim are not whole groups of 64"),
    ],
)
def test_what_cannot_be_cut_is_refused(name: str, given: dict, words: str) -> None:
    with pytest.raises(WorkbenchError, match=words):
        report_for(f"shape:{name}", **given)


def test_a_layer_that_reads_another_stage_is_refused() -> None:
    spec = named_shape("tiny")
    reader = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=16, kv_shared_with=0)
    layers = (spec.layers[0], spec.layers[1].model_copy(update={"attention": reader}))
    with pytest.raises(WorkbenchError, match="layer 1 of tiny reads the keys and values of layer 0"):
        stages_of(spec.model_copy(update={"layers": layers}), 2)


def test_a_report_of_no_room_has_no_longest_context_beyond_it() -> None:
    found = rank_memories(named_shape("tiny"), "bfloat16", DENSE, CacheConfig(), tensor=2, context=10)
    report = ranks_report(found, 2**24)
    assert report["longest_context"] > 10 and report["sequences"] > 0
