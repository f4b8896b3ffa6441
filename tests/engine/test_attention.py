"""`load(attention=...)`: a composition is what the spec then says, and `auto` finds a backend that carries it out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import workbench
from compiled_kernels import Backend, backend_problems
from tests.engine.tiny import HERE, Oracle, in_step
from workbench.custom import register
from workbench.engine.load import load
from workbench.engine.runner import generate
from workbench.errors import WorkbenchError

COMPOSITIONS = [
    {"sliding_window": 7, "num_sink_tokens": 2, "pattern": ["window", "full"]},
    {"softcap": 3.0, "sink_logits": True, "scale": 0.2},
    {"qk_norm": True, "position": "none"},
    {"num_kv_heads": "multi_query", "rotary": {"rope_theta": 100.0}, "layers": {1: {"position": "none"}}},
    {"position": "alibi"},
    {"mask": HERE + "even", "score": HERE + "farther", "sliding_window": 9},
]


def rows_are_the_oracles(runner) -> None:
    oracle = Oracle(runner)
    generate(runner, in_step(5, 19, 11))
    assert oracle.clear


def without(backend: Backend):
    problem = backend_problems()[backend]
    return pytest.mark.skipif(problem is not None, reason=f"backend {backend}: {problem}")


def tiny(backend: str, attention: dict, **settings):
    return load("shape:tiny", backend=backend, attention=attention, **{"dtype": "float32", **settings})


@pytest.mark.parametrize("attention", COMPOSITIONS, ids=str)
def test_as_written(attention: dict) -> None:
    runner = tiny("eager", attention, page_size=5, max_num_batched_tokens=8)
    rows_are_the_oracles(runner)


NO_ARITHMETIC = {"layers": {1: {"mask": "tests.engine.own_rules:no_arithmetic"}}}


@without(Backend.MLIR)
def test_an_explicit_backend_says_what_it_cannot_do() -> None:
    message = "layer 1 has tests.engine.own_rules:no_arithmetic: .*own_rules.py.*cumsum"
    with pytest.raises(WorkbenchError, match=f"backend 'mlir' cannot carry out this model: {message}"):
        tiny("mlir", NO_ARITHMETIC)


@without(Backend.MLIR)
@without(Backend.INDUCTOR)
def test_auto_decodes_with_a_backend_that_can() -> None:
    runner = tiny("auto", NO_ARITHMETIC)
    assert (runner.backends.decode, runner.backends.attention, runner.backends.blocks) == (Backend.INDUCTOR,) * 3
    assert "auto: mlir cannot carry out this model: layer 1 has tests.engine" in runner.backends.reason


@without(Backend.INDUCTOR)
def test_a_part_that_no_compiler_sees_through() -> None:
    attention = {"mask": "tests.engine.own_rules:untraceable"}
    with pytest.raises(
        WorkbenchError, match="layer 0 has mask tests.engine.own_rules:untraceable, which cannot be traced"
    ):
        tiny("inductor", attention)
    runner = tiny("auto", attention)
    assert (
        runner.backends.decode is runner.model.backend is Backend.EAGER and "cannot be traced" in runner.backends.reason
    )
    rows_are_the_oracles(runner)


def test_a_trained_model_with_fewer_groups_and_another_position_still_runs() -> None:
    changes = {"num_kv_heads": "multi_query", "sliding_window": 32, "num_sink_tokens": 4}
    model = load("demo", backend="eager", dtype="float32", attention=changes).model
    kinds = [kind.attention for kind in model.spec.layers]
    assert {(kind.num_kv_heads, kind.sliding_window, kind.num_sink_tokens) for kind in kinds} == {(1, 32, 4)}
    assert model.logits(range(9)).isfinite().all()
    assert load("demo", backend="eager", attention={}).model.spec == load("demo", backend="eager").model.spec


def test_a_variant_in_a_file_and_by_its_registered_name(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def near(query, key, far=3):\n    return (key <= query) & (key > query - far)\n")
    by_file = tiny("eager", {"mask": {"path": f"{file}:near", "arguments": {"far": 5}}})
    by_slot = tiny("eager", {"sliding_window": 5})

    @workbench.register("near five")
    def near(query, key):
        return (key <= query) & (key > query - 5)

    by_name = tiny("eager", {"mask": "near five"})
    ids = list(range(20))
    for runner in (by_file, by_name):
        assert torch.equal(runner.model.logits(ids), by_slot.model.logits(ids))


def test_what_is_registered_needs_a_plain_name() -> None:
    for name in ("", "a:b"):
        with pytest.raises(WorkbenchError, match="give it a plain name, without a colon"):
            register(name)
