"""Packed caches in a runner: preemptions, memory, settings. That backends read them alike: tests/laws."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.engine.tiny import layer, model_of, request, runner_of, spec_of
from tests.helpers.events import of
from workbench.engine.load import load
from workbench.experiment.experiment import Experiment
from workbench.kv_cache.format import FORMATS
from workbench.trace.events import Finished, Preempted

KINDS = layer(6, 2, 16), layer(6, 2, 16, sliding_window=20, num_sink_tokens=2), layer(6, 2, 16, sink_logits=True)
MODEL = model_of(spec_of(*KINDS).model_copy(update={"max_position_embeddings": 96}), dtype=torch.float64)


@pytest.mark.parametrize(("keys", "values"), itertools.product(FORMATS, FORMATS))
def test_preemptions_and_scarce_pages_change_nothing(keys: str, values: str) -> None:
    cache = {"keys": keys, "values": values, "quant_group": 8, "residual_length": 5}
    asked = [request(f"r{i}", 20 + 9 * i, 12, temperature=0.9, seed=i) for i in range(2)]
    found, scarce = [], 7 if keys == values == "dense" else 6  # what is newest has a table of its own
    for pages in (60, scarce):
        runner = runner_of(MODEL, page_size=8, pages=pages, cache=cache)
        events = list(runner.stream(asked))
        assert any(isinstance(event, Preempted) for event in events) == (pages == scarce)
        found.append({event.request_id: event.token_ids for event in of(Finished, events)})
        assert runner.scheduler.pages_in_use == 0
    assert found[0] == found[1]


def test_memory_is_what_the_format_says() -> None:
    """At full context the packed pages of SmolLM2's shape take 0.53 and 0.28 of bfloat16's, the rest beside them."""
    shares = {}
    for name in ("dense", "int8", "int4"):
        runner = load("shape:tiny", backend="eager", cache=name, max_num_seqs=1)
        shares[name] = runner.store.bytes_per_token
        assert runner.store.bytes == runner.store.expected_bytes
    dim = runner.model.spec.layers[0].attention.head_dim
    assert shares["int8"] / shares["dense"] == (8 + 32 / 64 / 2 + 32 / dim / 2) / 16
    assert shares["int4"] / shares["dense"] == (4 + 32 / 64 / 2 + 32 / dim / 2) / 16


def test_an_experiment_holds_a_format_and_reads_it_back() -> None:
    text = """
question: what does INT4 cost?
cache: {format: int4, rotate: true, residual_length: 32, layers: {0: {format: dense}, 1: {keys: int8}}}
workload: {kind: random, requests: 1}
"""
    made = Experiment.from_yaml(text, ("cache.values=int8",))
    assert Experiment.from_yaml(made.to_yaml()) == made
    assert [str(made.cache.for_layer(i)) for i in range(3)] == ["dense", "int8", "int4 keys, int8 values"]
    assert not made.cache.for_layer(0).rotate and made.cache.for_layer(1).rotate
