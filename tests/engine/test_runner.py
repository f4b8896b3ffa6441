"""Requests of a runner: their ends, arrivals, streams and steps. That tokens equal the oracle's: tests/laws."""

from __future__ import annotations

import itertools
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.tiny import CONTEXT, finals, layer, model_of, request, runner_of, spec_of
from tests.thorough import tries
from workbench.engine.runner import generate
from workbench.request import Request, SamplingParameters
from workbench.trace.events import Decoded, Event, Finished, Stepped, Submitted

MODEL = model_of(spec_of(layer(4, 2), layer(4, 2, sliding_window=5)))
MODEL_BYTES = 2 * 2 * 2 * 4 * 4  # a token: layers, keys and values, groups, dim, bytes


@given(st.integers(0, 40), st.integers(0, 3))
@settings(max_examples=tries(40))
def test_cancelling_at_any_event_frees_its_pages(moment: int, which: int) -> None:
    requests = [request(f"r{i}", 6 + i, 8) for i in range(4)]
    alone = finals(runner_of(MODEL), requests)
    runner = runner_of(MODEL, pages=20)
    events: list[Event] = []
    for number, event in enumerate(runner.stream(requests)):
        if number == moment:
            runner.cancel(f"r{which}")
            held = [s for s in (*runner.scheduler.running, *runner.scheduler.waiting) if s.request_id == f"r{which}"]
            assert not held
            held = [page for s in runner.scheduler.running for pages in s.pages for page in pages if page]
            assert runner.scheduler.pages_in_use == len(held)
        events.append(event)
    ends = [e for e in events if isinstance(e, Finished)]
    assert sorted(e.request_id for e in ends) == [f"r{i}" for i in range(4)], "one end each"
    for end in ends:
        if end.reason != "cancelled":
            assert end.token_ids == alone[end.request_id]
    assert runner.scheduler.pages_in_use == 0


def test_closing_the_stream_cancels_the_rest() -> None:
    runner = runner_of(MODEL)
    stream = runner.stream([request("a", 5, 30), request("b", 5, 30)])
    for event in stream:
        if isinstance(event, Decoded):
            break
    stream.close()  # type: ignore[attr-defined]
    assert not runner.has_unfinished_requests and runner.scheduler.pages_in_use == 0


def test_streams_on_one_runner_do_not_touch_each_other() -> None:
    runner = runner_of(MODEL)
    alone = finals(runner_of(MODEL), [request("a", 5, 9), request("b", 7, 6)])
    first, second = runner.stream(request("a", 5, 9)), runner.stream(request("b", 7, 6))
    seen: dict[str, tuple[int, ...]] = {}
    for pair in itertools.zip_longest(first, second):
        seen |= {event.request_id: event.token_ids for event in pair if isinstance(event, Finished)}
    assert seen == alone
    going = runner.stream(request("a", 5, 9))
    next(going)
    assert [e.reason for e in runner.stream(request("a", 3, 2)) if isinstance(e, Finished)] == ["refused"]
    assert [e.token_ids for e in going if isinstance(e, Finished)] == [alone["a"]]


def test_requests_wait_for_their_arrival() -> None:
    """On a clock that only sleeping moves."""
    now = [100.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    runner = runner_of(MODEL, clock=lambda: now[0], sleep=sleep)
    late, early = replace(request("late", 4, 2), arrival=0.5), replace(request("early", 4, 2), arrival=0.25)
    submitted = [event for event in runner.stream([late, early]) if isinstance(event, Submitted)]
    assert [(e.request_id, e.arrival) for e in submitted] == [("early", 100.25), ("late", 100.5)]
    assert all(abs(e.time - e.arrival) < 0.011 for e in submitted)


def test_the_last_step_counts_its_pages() -> None:
    steps = [e for e in runner_of(MODEL).stream(request("a", 5, 1)) if isinstance(e, Stepped)]
    assert [(s.pages_used, s.phase, s.prefill_tokens) for s in steps] == [(4, "prefill", 5)]  # 2 pages in 2 groups
    assert steps[0].kv_bytes == 2 * 4 * MODEL_BYTES


def test_a_chunk_of_one_prompt_token_is_prefill() -> None:
    steps = [e for e in runner_of(MODEL, max_num_batched_tokens=1).stream(request("a", 3, 3)) if isinstance(e, Stepped)]
    assert [s.phase for s in steps] == ["prefill"] * 3 + ["decode"] * 2


def test_the_context_is_the_last_limit() -> None:
    done = generate(runner_of(MODEL), [request("a", CONTEXT - 3, 50)])
    assert done["a"].reason == "length" and len(done["a"].token_ids) == 3


def test_end_tokens_and_their_being_ignored() -> None:
    tokens = finals(runner_of(MODEL), [request("a", 6, 10)])["a"]
    ending = model_of(spec_of(layer(4, 2), layer(4, 2, sliding_window=5), eos_token_ids=(tokens[4],)))
    asked = Request("a", request("a", 6, 10).prompt_ids, SamplingParameters(temperature=0, max_tokens=10))
    done = generate(runner_of(ending), [asked])["a"]
    first = tokens.index(tokens[4])
    assert done.reason == "stop" and done.token_ids == tokens[: first + 1]
    assert finals(runner_of(ending), [request("a", 6, 10)])["a"] == tokens
