"""Capture and replay, with a stand-in for CUDA's graphs: the step runs again on what its buffers hold by then."""

from __future__ import annotations

from typing import Any

import pytest

from compiled_kernels.masks import SlidingWindow
from tests.engine.tiny import Oracle, finals, layer, model_of, request, runner_of, spec_of
from workbench.engine.runner import generate
from workbench.executors.programs.cuda_graph import CudaGraphProgram
from workbench.executors.programs.eager import EagerProgram
from workbench.executors.step_runner import StepRunner
from workbench.kv_cache.attention_layers import GroupedLayer
from workbench.kv_cache.format import parse_cache_format


def replayed(runner, capture):
    """Return a runner's table on CUDA, whose graphs are captured by a stand-in."""
    parts = runner.model, runner.store
    return StepRunner(CudaGraphProgram(*parts, capture), EagerProgram(*parts))


def test_replays_give_the_oracles_rows() -> None:
    runner = runner_of(model_of(spec_of(layer(4, 2), layer(4, 2, sliding_window=5))))
    captures = []

    def capture(step):
        captures.append(step)
        step()  # as a capture warms up: what it writes must be what the replay writes
        return step

    runner.core.executor = executor = replayed(runner, capture)
    program: Any = executor.programs["decode"]
    Oracle(runner)
    generate(runner, [request("a", 5, 20), request("b", 19, 4), request("c", 3, 7)])
    assert executor.compiles == len(captures) > 1
    before = len(captures)
    generate(runner, [request("d", 5, 20), request("e", 19, 4), request("f", 3, 7)])
    assert len(captures) == before, "the same lengths again are no reason to capture again"
    generate(runner, [request("g", 7, 18), request("h", 17, 6), request("i", 4, 6)])
    sizes = {(rows, width) for rows in (1, 2, 4) for width in (2, 4, 8)}
    assert set(program._graphs) <= sizes and len(captures) == len(program._graphs)
    runner.model.blocks[0].attention.mask = SlidingWindow(3)  # type: ignore[union-attr]
    runner.core.executor = executor
    generate(runner, [request("d", 5, 20)])
    assert len(captures) > len(program._graphs), "what was captured of the model as it was is done with"


def test_a_prompt_that_is_read_a_token_at_a_time_has_no_row() -> None:
    runner = runner_of(model_of(spec_of()), max_num_batched_tokens=2)
    runner.core.executor = replayed(runner, lambda step: step)
    Oracle(runner)
    ends = generate(runner, [request("a", 2, 20), request("b", 12, 4)])
    assert {end.reason for end in ends.values()} == {"length"}


@pytest.mark.parametrize("format", ["int8", "int4", "fp8"])
def test_packed_pages_are_quantized_before_the_replay_and_never_in_the_graph(format: str) -> None:
    kinds = layer(2, 1, 8), layer(2, 1, 8, sliding_window=9, num_sink_tokens=2)
    spec = spec_of(*kinds).model_copy(update={"max_position_embeddings": 64})
    cache = parse_cache_format({"format": format, "quant_group": 8, "residual_length": 5, "num_sink_tokens": 2})
    found, settled = {}, []

    def capture(step):
        def replay():
            settled.clear()
            rows = step()
            assert not settled, "a graph cannot hold what depends on lengths"
            return rows

        return replay

    for captured in (False, True):
        runner = runner_of(model_of(spec), cache=cache, page_size=8)
        if captured:
            runner.core.executor = replayed(runner, capture)
            for each in runner.store.layers:
                assert isinstance(each, GroupedLayer)
                each.groups_to_quantize = lambda batch, asked=each.groups_to_quantize: settled.append(1) or asked(batch)  # type: ignore
        found[captured] = finals(runner, [request("a", 5, 30), request("b", 19, 14), request("c", 33, 9)])
    assert found[True] == found[False]
