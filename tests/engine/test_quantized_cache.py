"""Packed caches in a runner: every backend that claims them gives the same rows, and the others refuse in words."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from compiled_kernels import Backend, backend_problems
from tests.engine.tiny import layer, request, runner_of, spec_of
from tests.patience import limit
from tests.thorough import THOROUGH
from workbench.engine.load import load
from workbench.engine.runner import generate
from workbench.errors import WorkbenchError
from workbench.executors.select import Backends
from workbench.experiment.experiment import Experiment
from workbench.kv_cache.format import parse_cache_format
from workbench.model.hf.weights import random_weights
from workbench.model.spec import LayerSpec
from workbench.model.transformer import Transformer
from workbench.testing.attention_scenarios import SampledLogits, sampled_logits

NO_MLIR = backend_problems()[Backend.MLIR]
NO_COMPILER = backend_problems()[Backend.INDUCTOR]
SMALL = {"quant_group": 8, "residual_length": 5}


WINDOWED: dict[str, Any] = {"sliding_window": 20, "num_sink_tokens": 2}
CAPPED: dict[str, Any] = {"softcap": 2.0, "sink_logits": True}
PAIRS = [("int8", "int4"), ("fp8", "fp8"), *([("int8", "int8"), ("int4", "int4"), ("int8", "fp8")] if THOROUGH else [])]
KINDS = layer(6, 2, 16), layer(6, 2, 16, **WINDOWED), layer(6, 2, 16, **CAPPED)


def model(backend: Backend, dtype: torch.dtype = torch.float32, kinds: tuple[LayerSpec, ...] = KINDS) -> Transformer:
    spec = spec_of(*kinds).model_copy(update={"max_position_embeddings": 96})
    return Transformer.from_state(spec, random_weights(spec, dtype, 3), backend)


def rows(model: Transformer, backends: Backends | None = None, **settings) -> SampledLogits:
    asked = {f"{i}": request(f"{i}", length, 1).prompt_ids for i, length in enumerate((60, 33, 7))}
    return sampled_logits(
        model, asked, 12, page_size=8, pages=60, max_num_batched_tokens=16, backends=backends, **settings
    )


def agree(found: SampledLogits, right: SampledLogits, bound: float) -> None:
    shared = [place for place in found if place in right and found[place][0] == right[place][0]]
    assert len(shared) > 20
    for place in shared:
        away = (found[place][1] - right[place][1]).abs().max()
        assert away <= bound * (1 + right[place][1].abs().max()), place


@pytest.mark.skipif(NO_MLIR is not None, reason=str(NO_MLIR))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kinds", PAIRS)
def test_the_compiled_step_gives_the_modules_rows(kinds, dtype: torch.dtype) -> None:
    """Three layers: full, windowed with sinks, soft-capped with sink logits; the second one kept dense."""
    made = {"keys": kinds[0], "values": kinds[1], **SMALL, "layers": {1: {"format": "dense"}}}
    cache, plain = parse_cache_format(made), model(Backend.EAGER, dtype)
    backends = Backends(Backend.MLIR, Backend.EAGER, Backend.EAGER, "")
    agree(rows(plain, backends, cache=cache), rows(plain, cache=cache), 1e-4 if dtype == torch.float32 else 0.06)


@pytest.mark.skipif(NO_MLIR is not None, reason=str(NO_MLIR))
def test_the_compiled_step_reads_windows_over_packed_pages() -> None:
    cache, plain = parse_cache_format({"format": "int4", **SMALL, "num_sink_tokens": 3}), model(Backend.EAGER)
    backends = Backends(Backend.MLIR, Backend.EAGER, Backend.EAGER, "")
    agree(rows(plain, backends, cache=cache), rows(plain, cache=cache), 1e-4)


@pytest.mark.skipif(NO_MLIR is not None, reason=str(NO_MLIR))
def test_rotated_heads_decode_through_modules_on_the_backend() -> None:
    cache = parse_cache_format({"format": "int4", **SMALL, "rotate": True})
    agree(rows(model(Backend.MLIR), cache=cache), rows(model(Backend.EAGER), cache=cache), 1e-4)


@pytest.mark.skipif(NO_COMPILER is not None, reason=str(NO_COMPILER))
@pytest.mark.timeout(limit(240))  # graph after graph, on a machine that never compiled them
def test_compiled_blocks_read_packed_pages_between_their_sides() -> None:
    cache = parse_cache_format({"format": "int4", **SMALL})
    kinds = KINDS if THOROUGH else (layer(6, 2, 16, **WINDOWED, **CAPPED),)  # each kind has graphs of its own
    compiled, plain = (model(backend, kinds=kinds) for backend in (Backend.INDUCTOR, Backend.EAGER))
    agree(rows(compiled, cache=cache), rows(plain, cache=cache), 1e-4)


def test_the_other_lanes_refuse_before_anything_is_computed() -> None:
    refused = (
        "backend 'mlir' cannot carry out this cache: layer 0 has dense keys, int4 values: keys and values are both"
    )
    with pytest.raises(WorkbenchError, match=refused):
        load("shape:tiny", backend="mlir", cache={"keys": "dense", "values": "int4"})
    with pytest.raises(WorkbenchError, match="bfloat16 weights and a float32 cache: it reads both in one type"):
        load("shape:tiny", backend="mlir", cache={"format": "int8", "dtype": "float32"})
    assert (
        load("shape:tiny", backend="eager", cache={"format": "int8", "dtype": "float32"}).store.dtype == torch.float32
    )
    with pytest.raises(WorkbenchError, match="groups of 64 tokens do not divide pages of 16"):
        load("shape:tiny", backend="eager", cache="int4", page_size=16)


@pytest.mark.parametrize("format", ["int8", "int4", "fp8"])
def test_preemptions_and_scarce_pages_change_nothing(format: str) -> None:
    cache, plain = parse_cache_format({"format": format, **SMALL}), model(Backend.EAGER, torch.float64)
    asked = [request(f"r{i}", 20 + 9 * i, 14, temperature=0.9, seed=i) for i in range(4)]

    def finals(pages: int) -> dict[str, tuple[int, ...]]:
        runner = runner_of(plain, page_size=8, pages=pages, cache=cache)
        done = {name: event.token_ids for name, event in generate(runner, asked).items()}
        assert runner.scheduler.pages_in_use == 0
        return done

    assert finals(60) == finals(12)


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
    with pytest.raises(WorkbenchError, match="cache.fromat: unknown key; did you mean 'format'"):
        Experiment.from_yaml(text, ("cache.fromat=int4",))


def test_every_pair_of_kinds_runs() -> None:
    kinds = ("dense", "int8", "int4", "fp8")
    for keys, values in itertools.product(kinds, kinds):
        runner = runner_of(
            model(Backend.EAGER),
            max_num_seqs=2,
            max_num_batched_tokens=64,
            page_size=8,
            cache={"keys": keys, "values": values, **SMALL},
        )
        assert generate(runner, [request("a", 30, 3)])["a"].reason == "length"
