"""Capture and replay, with a stand-in for CUDA's graphs: the step runs again on what its buffers hold by then."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from tests.engine.tiny import Oracle, layer, model_of, request, runner_of, spec_of
from workbench.engine.captured import CapturedExecutor
from workbench.engine.runner import generate


def test_replays_give_the_oracles_rows() -> None:
    runner = runner_of(model_of(spec_of(layer(4, 2), layer(4, 2, window=5))))
    captures = []

    def capture(step: Callable[[], Tensor]) -> Callable[[], Tensor]:
        captures.append(step)
        step()  # as a capture warms up: what it writes must be what the replay writes
        return step

    executor = CapturedExecutor(runner.model, runner.store, capture)
    runner.executor = executor
    Oracle(runner)
    generate(runner, [request("a", 5, 20), request("b", 19, 4), request("c", 3, 7)])
    assert executor.compiles == len(captures) > 1
    before = len(captures)
    generate(runner, [request("d", 7, 18), request("e", 17, 6), request("f", 4, 6)])
    assert len(captures) <= before + 2, "lengths alone are no reason to capture again"
