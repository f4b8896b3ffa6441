"""Requests of a runner: their ends, arrivals, streams and steps. That tokens equal the oracle's: tests/laws."""

from __future__ import annotations

import itertools
from dataclasses import replace

from tests.engine.tiny import finals, layer, model_of, request, runner_of, spec_of
from tests.helpers.events import of
from workbench.trace.events import Decoded, Finished, Stepped, Submitted

MODEL = model_of(spec_of(layer(4, 2), layer(4, 2, sliding_window=5)))
MODEL_BYTES = 2 * 2 * 2 * 4 * 4  # a token: layers, keys and values, groups, dim, bytes


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
        seen |= {event.request_id: event.token_ids for event in of(Finished, pair)}
    assert seen == alone
    going = runner.stream(request("a", 5, 9))
    next(going)
    assert [e.reason for e in of(Finished, runner.stream(request("a", 3, 2)))] == ["refused"]
    assert [e.token_ids for e in of(Finished, going)] == [alone["a"]]


def test_requests_wait_for_their_arrival() -> None:
    """On a clock that only sleeping moves."""
    now = [100.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    runner = runner_of(MODEL, clock=lambda: now[0], sleep=sleep)
    late, early = replace(request("late", 4, 2), arrival=0.5), replace(request("early", 4, 2), arrival=0.25)
    submitted = of(Submitted, runner.stream([late, early]))
    assert [(e.request_id, e.arrival) for e in submitted] == [("early", 100.25), ("late", 100.5)]
    assert all(abs(e.time - e.arrival) < 0.011 for e in submitted)


def test_the_last_step_counts_its_pages() -> None:
    steps = of(Stepped, runner_of(MODEL).stream(request("a", 5, 1)))
    assert [(s.pages_used, s.phase, s.prefill_tokens) for s in steps] == [(4, "prefill", 5)]  # 2 pages in 2 groups
    assert steps[0].kv_bytes == 2 * 4 * MODEL_BYTES


def test_a_chunk_of_one_prompt_token_is_prefill() -> None:
    steps = of(Stepped, runner_of(MODEL, max_num_batched_tokens=1).stream(request("a", 3, 3)))
    assert [s.phase for s in steps] == ["prefill"] * 3 + ["decode"] * 2
