"""`load(attention=...)`: every backend carries a variant out, or says why not; `auto` finds one that can."""

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
from workbench.executors import select as lanes_module
from workbench.model.spec import ModelSpec

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


@without(Backend.MLIR)
@pytest.mark.parametrize("attention", COMPOSITIONS, ids=str)
def test_backend_mlir(attention: dict) -> None:
    rows_are_the_oracles(tiny("mlir", attention, max_num_batched_tokens=40))


@without(Backend.MLIR)
def test_backend_mlir_in_bfloat16() -> None:
    attention = COMPOSITIONS[0] | COMPOSITIONS[1] | {"qk_norm": True}
    rows_are_the_oracles(tiny("mlir", attention, dtype="bfloat16"))


@without(Backend.INDUCTOR)
def test_backend_inductor() -> None:
    """Every slot at once, in one kind of layer: compiling takes its time."""
    attention = COMPOSITIONS[1] | COMPOSITIONS[-1] | {"qk_norm": True, "num_sink_tokens": 1}
    rows_are_the_oracles(tiny("inductor", attention, max_num_batched_tokens=40))


def no_arithmetic(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """The past, by a running sum, of which no kernel has scalar code; torch.compile traces it."""
    return (key <= query) & (torch.cumsum(torch.ones_like(key), -1) > 0)


NO_ARITHMETIC = {"layers": {1: {"mask": "tests.engine.test_attention:no_arithmetic"}}}


@without(Backend.MLIR)
def test_an_explicit_backend_says_what_it_cannot_do() -> None:
    message = "layer 1 has tests.engine.test_attention:no_arithmetic: .*test_attention.py.*cumsum"
    with pytest.raises(WorkbenchError, match=f"backend 'mlir' cannot carry out this model: {message}"):
        tiny("mlir", NO_ARITHMETIC)


@without(Backend.MLIR)
@without(Backend.INDUCTOR)
def test_auto_decodes_with_a_backend_that_can() -> None:
    runner = tiny("auto", NO_ARITHMETIC)
    assert (runner.backends.decode, runner.backends.attention, runner.backends.blocks) == (Backend.INDUCTOR,) * 3
    assert "auto: mlir cannot carry out this model: layer 1 has tests.engine" in runner.backends.reason


def untraceable(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    if int(key.max()) < 0:
        raise ValueError("never")
    return key <= query


@without(Backend.INDUCTOR)
def test_a_part_that_no_compiler_sees_through() -> None:
    attention = {"mask": "tests.engine.test_attention:untraceable"}
    with pytest.raises(
        WorkbenchError, match="layer 0 has mask tests.engine.test_attention:untraceable, which cannot be traced"
    ):
        tiny("inductor", attention)
    runner = tiny("auto", attention)
    assert (
        runner.backends.decode is runner.model.backend is Backend.EAGER and "cannot be traced" in runner.backends.reason
    )
    rows_are_the_oracles(runner)


def test_a_trained_model_with_fewer_groups_and_another_position_still_runs() -> None:
    runner = load(
        "demo",
        backend="eager",
        dtype="float32",
        attention={"num_kv_heads": "multi_query", "sliding_window": 32, "num_sink_tokens": 4},
    )
    spec: ModelSpec = runner.model.spec
    kinds = [kind.attention for kind in spec.layers]
    assert {(kind.num_kv_heads, kind.sliding_window, kind.num_sink_tokens) for kind in kinds} == {(1, 32, 4)}
    assert runner.tokenizer is not None
    ids = runner.tokenizer.encode("def fibonacci(n):\n    return")
    assert runner.model.logits(ids).isfinite().all()
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


@pytest.mark.parametrize(
    ("attention", "message"),
    [
        ({"sliding_windw": 4}, "attention.sliding_windw: unknown key; did you mean 'sliding_window'"),
        ({"mask": "nothing at all"}, "'nothing at all': write package.module:Name or folder/file.py:Name"),
        ({"mask": "no/file.py:mask"}, "there is no file no/file.py"),
        ({"mask": HERE + "farther"}, r"mask tests.engine.tiny:farther: takes .*, must take \(query, key\)"),
        ({"score": HERE + "even"}, r"score tests.engine.tiny:even: takes .*, must take \(score, head, query, key\)"),
        ({"mask": HERE + "VOCAB"}, r"tiny:VOCAB: not callable; it needs __call__\(self, query, key\)"),
        ({"module": HERE + "even"}, "module tests.engine.tiny:even: is no module; extend workbench.model.layers"),
        ({"module": {"path": "torch.nn:Linear"}}, "module torch.nn:Linear: has no qkv_proj"),
        (
            {"module": {"path": "workbench.model.layers:Attention", "arguments": {"depth": 2}}},
            "module workbench.model.layers:Attention: could not be built with depth=2: TypeError",
        ),
        ({"num_kv_heads": 5}, "4 query heads cannot share 5 key/value heads evenly"),
    ],
)
def test_a_composition_that_cannot_be(attention: dict, message: str) -> None:
    with pytest.raises(WorkbenchError, match=message) as caught:
        tiny("eager", attention)
    assert "\n" not in str(caught.value)


def test_what_is_registered_needs_a_plain_name() -> None:
    for name in ("", "a:b"):
        with pytest.raises(WorkbenchError, match="give it a plain name, without a colon"):
            register(name)


def test_auto_without_compilers_runs_as_written(monkeypatch: pytest.MonkeyPatch) -> None:
    problems = {Backend.EAGER: None, **dict.fromkeys((Backend.INDUCTOR, Backend.TRITON, Backend.MLIR), "not here")}
    monkeypatch.setattr(lanes_module, "backend_problems", lambda: problems)
    runner = tiny("auto", {"mask": HERE + "shy"})
    assert runner.backends.decode is Backend.EAGER
    rows_are_the_oracles(runner)
