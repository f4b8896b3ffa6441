"""Blocks that `auto` did not compile beforehand: their failure is reported, and the step is right all the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from compiled_kernels import Backend, BackendError
from tests.engine.tiny import layer, model_of, request, runner_of, spec_of
from workbench.engine.runner import generate
from workbench.errors import WorkbenchError
from workbench.executors import build, step_runner
from workbench.executors.programs.eager import EagerProgram
from workbench.executors.reference import CacheLayout, single_decode_step
from workbench.executors.select import Backends
from workbench.executors.step_runner import StepRunner

EVICT = {"kind": "heavy_hitters", "budget": 16}


class Broken(EagerProgram):
    """Writes half of what it should, to `written` where that is given, then fails."""

    def __init__(self, model, store, error: Exception, written=None):
        super().__init__(model, store)
        self.error, self.attempts, self.written = error, 0, written or store

    def __call__(self, batch, layers=()):
        self.attempts += 1
        EagerProgram(self.model, self.written)(batch)
        for each in self.written.layers:
            each.page_tensors(each.group)[0].mul_(0.5)
        raise self.error


def unchecked(program, **more):
    return StepRunner(program, unchecked=("blocks",), **more)


def made(backend: Backend = Backend.INDUCTOR):
    model = model_of(spec_of(layer(4, 2)), backend=backend)
    held = CacheLayout(model.cache_shapes(), 4, model.dtype)
    return model, *single_decode_step(model, held, 1)


def test_a_block_that_does_not_compile_is_reported_and_runs_as_written() -> None:
    plain_model, plain_store, plan = made(Backend.EAGER)
    expected = StepRunner(EagerProgram(plain_model, plain_store)).forward(plan).clone()
    model, store, plan = made()
    written = single_decode_step(model, CacheLayout(model.cache_shapes(), 4, model.dtype), 1)[0]
    broken = Broken(model, store, RuntimeError("no\n compiler"), written)
    vetted = unchecked(broken)
    with pytest.warns(UserWarning, match="prefill on eager .RuntimeError: no compiler."):
        assert torch.equal(vetted.forward(plan), expected)
    assert torch.equal(vetted.forward(plan), expected) and broken.attempts == 1, "from then on nothing is compiled"
    assert {vars(part)["backend"] for part in model.modules() if "backend" in vars(part)} == {Backend.EAGER}


def test_where_the_plain_run_fails_too_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that no backend can compute, or memory that is short, says nothing of a compiler."""
    model, store, plan = made()
    first, second = Broken(model, store, MemoryError("first")), Broken(model, store, RuntimeError("second"))
    messages: list[str] = []
    monkeypatch.setattr(step_runner, "EagerProgram", lambda model, store: second)
    vetted = unchecked(first, on_fallback=messages.append)
    for calls in (1, 2):
        with pytest.raises(MemoryError, match="first"):
            vetted.forward(plan)
        assert (first.attempts, second.attempts) == (calls, calls), "it is vetted anew each time"
    backends = {vars(part)["backend"] for part in model.modules() if "backend" in vars(part)}
    assert vetted.programs["blocks"] is first and backends == {Backend.INDUCTOR} and not messages


def test_the_runner_says_what_ran_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(spec_of(layer(4, 2)), backend=Backend.INDUCTOR)
    failing = lambda model, store, *_: Broken(model, store, RuntimeError("no compiler"))  # noqa: E731
    monkeypatch.setattr(build, "InductorProgram", failing)
    runner = runner_of(
        model, backends=Backends(Backend.MLIR, Backend.INDUCTOR, Backend.MLIR, "auto: measured", checked=False)
    )
    runner.core.executor.programs["rows"].max_tokens = 0  # type: ignore[attr-defined]
    assert str(runner.core.backends) == "mlir (prefill: inductor, its attention: mlir)"
    with pytest.warns(UserWarning, match="backend auto: inductor does not compile here, prefill on eager"):
        generate(runner, [request("a", 9, 1)])
    assert str(runner.core.backends) == "mlir (prefill: eager)"
    why = "auto: measured; inductor does not compile here, prefill on eager (RuntimeError: no compiler)"
    assert runner.core.backends.reason == why


@pytest.mark.parametrize("error", [WorkbenchError("not this"), BackendError("nor that")])
def test_what_is_refused_stays_refused(error: Exception) -> None:
    model, store, plan = made()
    with pytest.raises(type(error)):
        unchecked(Broken(model, store, error)).forward(plan)


def test_later_failures_are_not_the_compilers() -> None:
    model, store, plan = made()
    vetted = unchecked(EagerProgram(model, store))
    vetted.forward(plan)
    vetted.programs["blocks"] = Broken(model, store, RuntimeError("a fault of its own"))
    with pytest.raises(RuntimeError, match="a fault of its own"):
        vetted.forward(plan)


def test_blocks_whose_queries_are_seen_are_vetted_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads of a failed step are not counted, and the same tokens stay as in the modules as written."""
    asked = [request("a", 40, 6, temperature=0)]
    plain = runner_of(model_of(spec_of(layer(4, 2))), evict=EVICT)
    expected = generate(plain, asked)["a"].token_ids
    failing = lambda model, store, *_: Broken(model, store, RuntimeError("no compiler"))  # noqa: E731
    monkeypatch.setattr(build, "InductorProgram", failing)
    backends = Backends(Backend.MLIR, Backend.INDUCTOR, Backend.MLIR, "auto: measured", checked=False)
    runner = runner_of(model_of(spec_of(layer(4, 2)), backend=Backend.INDUCTOR), backends=backends, evict=EVICT)
    runner.core.executor.programs["rows"].max_tokens = 0  # type: ignore[attr-defined]
    with pytest.warns(UserWarning, match="backend auto: inductor does not compile here, prefill on eager"):
        found = generate(runner, asked)["a"].token_ids
    assert found == expected and runner.core.backends.blocks is Backend.EAGER
    backends = replace(backends, checked=True)
    asked_for = runner_of(model_of(spec_of(layer(4, 2)), backend=Backend.INDUCTOR), backends=backends, evict=EVICT)
    assert "no compiler" in (generate(asked_for, asked)["a"].error or ""), "an explicit backend's failure is reported"
