"""`load(attention=...)`: a composition is what the spec then says, and `auto` finds a backend that carries it out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import workbench
from compiled_kernels import Backend, backend_problems
from tests.engine.tiny import Oracle, in_step, layer, spec_of
from workbench.engine.load import load
from workbench.engine.runner import generate
from workbench.executors.requirements import Requirements
from workbench.executors.select import select_backends
from workbench.request import CustomPart


def rows_are_the_oracles(runner) -> None:
    oracle = Oracle(runner)
    generate(runner, in_step(5, 19, 11))
    assert oracle.clear


def without(backend: Backend):
    problem = backend_problems()[backend]
    return pytest.mark.skipif(problem is not None, reason=f"backend {backend}: {problem}")


def tiny(backend: str, attention: dict, **settings):
    return load("shape:tiny", backend=backend, attention=attention, **{"dtype": "float32", **settings})


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


@without(Backend.INDUCTOR)
def test_auto_runs_as_written_what_no_compiler_sees_through() -> None:
    runner = tiny("auto", {"mask": "tests.engine.own_rules:untraceable"})
    assert runner.core.backends.decode is runner.model.backend is Backend.EAGER
    assert "cannot be traced" in runner.core.backends.reason
    rows_are_the_oracles(runner)


@without(Backend.MLIR)
@without(Backend.INDUCTOR)
def test_auto_decodes_with_a_backend_that_can() -> None:
    rule = CustomPart(path="tests.engine.own_rules:no_arithmetic")
    backends = select_backends("auto", Requirements(spec_of(layer(), layer(mask=rule))))
    assert "auto: mlir does not support this model: layer 1 has tests.engine" in backends.reason
    assert (backends.decode, backends.attention, backends.blocks) == (Backend.INDUCTOR,) * 3
