"""`Runner.record_experts`: every computed token counts once for each expert that it chose, in every layer, on every
backend; off, there is nothing."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compiled_kernels import Backend, backend_problems
from tests.engine.tiny import mixture_of, model_of, request, runner_of
from tests.helpers.events import of
from tests.thorough import tries
from workbench.engine.runner import Runner
from workbench.executors.select import Backends
from workbench.trace.events import ExpertsUsed, Stepped

HERE = [each for each in (Backend.EAGER, Backend.MLIR) if backend_problems()[each] is None]


def runner(backend: Backend, **settings) -> Runner:
    model = model_of(mixture_of(5, 2), backend=backend)
    model.use_code_panels(backend is Backend.MLIR)
    return runner_of(model, backends=Backends(backend, backend, backend, "x"), pages=80, page_size=8, **settings)


@pytest.mark.parametrize("backend", HERE)
@settings(max_examples=tries(5))
@given(prompts=st.lists(st.integers(1, 30), min_size=1, max_size=4), tokens=st.integers(1, 5), most=st.integers(4, 40))
def test_every_token_counts_once_for_each_of_its_experts(
    backend: Backend, prompts: list[int], tokens: int, most: int
) -> None:
    """Padding does not; and both backends choose alike."""
    counts = {}
    for each in dict.fromkeys((Backend.EAGER, backend)):
        ours = runner(each, max_num_batched_tokens=most, max_num_seqs=3)
        ours.record_experts()
        events = list(ours.stream([request(f"r{i}", length, tokens) for i, length in enumerate(prompts)]))
        steps = {event.step: event for event in of(Stepped, events)}
        used = of(ExpertsUsed, events)
        assert [event.step for event in used] == list(steps)
        for event in used:
            computed = steps[event.step].prefill_tokens + steps[event.step].decode_tokens
            assert [(layer, len(rows), sum(rows)) for layer, rows in event.layers] == [
                (0, 5, 2 * computed),
                (1, 5, 2 * computed),
            ]
        counts[each] = [event.layers for event in used]
    assert len(set(map(str, counts.values()))) == 1


def test_it_is_off_by_default_and_can_be_ended() -> None:
    ours = runner(Backend.EAGER)
    count = lambda: sum(isinstance(event, ExpertsUsed) for event in ours.stream([request("a", 3, 2)]))  # noqa: E731
    assert count() == 0
    ours.record_experts()
    assert count() == 2
    ours.record_experts(False)
    assert count() == 0 and all(name.split(".")[-1] != "chosen" for name, _ in ours.model.named_buffers())


def test_the_listener_gets_it_too() -> None:
    heard: list = []
    ours = runner(Backend.EAGER, listener=heard.append)
    ours.record_experts()
    given_ = of(ExpertsUsed, ours.stream([request("a", 3, 2)]))
    assert of(ExpertsUsed, heard) == given_


def test_compiled_blocks_count_too(as_written: None) -> None:
    if problem := backend_problems()[Backend.INDUCTOR]:
        pytest.skip(f"backend inductor: {problem}")
    found = []
    for backend in (Backend.EAGER, Backend.INDUCTOR):
        ours = runner(backend, max_num_batched_tokens=64)
        ours.record_experts()
        found.append([e.layers for e in of(ExpertsUsed, ours.stream([request("a", 9, 3)]))])
    assert found[0] == found[1] and len(found[0]) == 3
