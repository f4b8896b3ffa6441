"""A server's snapshot, from its runner's events: counts add up over any history, and a snapshot is read as written."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.tiny import model_of, request, runner_of, spec_of
from tests.serve.watch.logs import log_of
from tests.thorough import tries
from tests.trace.histories import recorders
from workbench.engine.runner_thread import RunnerThread
from workbench.errors import WorkbenchError
from workbench.runs.metrics import percentile
from workbench.serve.watch import serving_log
from workbench.serve.watch.serving_log import MAX_PENDING, MAX_RECENT, ServingLog
from workbench.serve.watch.snapshot import ACTIVE, ENDED, STATES, LatencyPercentiles, Meter, PageUse, ServerSnapshot
from workbench.trace.events import Decoded, Finished, Prefilled, Submitted
from workbench.trace.recorder import Recorder, row_name


def state_of(row: dict) -> str:
    """Return the state in which a recorder's row ended, or `active`."""
    reason = row["finish_reason"]
    if reason is not None:
        return {"cancelled": "cancelled", "refused": "failed", "error": "failed"}.get(reason, "finished")
    return "active"


@given(recorders(most=6))
@settings(max_examples=tries(100))
def test_every_request_is_counted_once_in_the_state_that_its_events_say(recorder: Recorder) -> None:
    snapshot, rows = log_of(recorder.events).snapshot(traces=True), recorder.requests()
    assert sum(snapshot.requests.values()) == len(rows)
    wanted = Counter(map(state_of, rows))
    assert sum(snapshot.requests[state] for state in ACTIVE) == wanted["active"]
    assert {state: snapshot.requests[state] for state in ENDED} == {state: wanted[state] for state in ENDED}
    by_id = {each.id: each for each in snapshot.recent}
    assert len(by_id) == len(snapshot.recent) == len(rows)
    assert Counter(each.state for each in snapshot.recent) == Counter(snapshot.requests) + Counter()
    for row in rows:
        each = by_id[row_name(row)]
        assert (each.state if each.state in ENDED else "active") == state_of(row)
        assert (each.arrival, each.first_token, each.ended) == (row["arrival"], row["first_token"], row["finished"])
        assert each.first_scheduled == row["first_scheduled"]
        assert each.output_tokens == row["output_tokens"] and len(each.preempted) == row["num_preemptions"]
        assert len(snapshot.traces[each.id].tokens) == each.output_tokens
        open_ones = [begin for begin, end in each.preempted if end is None]
        assert len(open_ones) <= (each.state == "waiting")
    assert [each.arrival for each in snapshot.recent] == sorted(each.arrival for each in snapshot.recent)


@given(recorders(most=6))
@settings(max_examples=tries(60))
def test_tokens_of_the_seconds_are_those_of_the_requests(recorder: Recorder) -> None:
    snapshot = log_of(recorder.events).snapshot()
    assert sum(rate.output_tokens for rate in snapshot.rates) == sum(
        row["output_tokens"] for row in recorder.requests()
    )
    assert sum(rate.prompt_tokens for rate in snapshot.rates) == sum(row["prefill_tokens"] for row in recorder.steps())
    assert [rate.time for rate in snapshot.rates] == sorted({rate.time for rate in snapshot.rates})
    assert snapshot.prompt_tokens >= snapshot.cached_tokens >= 0


@given(recorders(most=6), st.data())
@settings(max_examples=tries(60))
def test_latencies_are_those_of_the_recorder_with_numpys_percentiles(recorder: Recorder, data: st.DataObject) -> None:
    snapshot, rows = log_of(recorder.events).snapshot(), recorder.requests()
    ttft = [row["first_token"] - row["arrival"] for row in rows if row["first_token"] is not None]
    assert snapshot.ttft.count == len(ttft)
    if ttft:
        mine = [snapshot.ttft.p50, snapshot.ttft.p90, snapshot.ttft.p99]
        assert mine == pytest.approx([percentile(ttft, q) for q in (50, 90, 99)], abs=1e-9)
    values = data.draw(st.lists(st.floats(0, 1e3), min_size=1, max_size=50))
    cuts = LatencyPercentiles.over(values)
    assert [cuts.p50, cuts.p90, cuts.p99] == pytest.approx(
        list(np.percentile(values, (50, 90, 99))), rel=1e-9, abs=1e-12
    )
    assert LatencyPercentiles.over([]) == LatencyPercentiles(0, None, None, None)
    of = [row for row in rows if state_of(row) == "finished" and row["output_tokens"] > 1]
    assert snapshot.tpot.count == len(of), "what was cut short has no time a token"


@given(recorders(), st.integers(0, 40))
@settings(max_examples=tries(60))
def test_reading_in_between_changes_nothing(recorder: Recorder, every: int) -> None:
    events = recorder.events
    whole, often = log_of(events), log_of(events[:0] or [], 0.0)
    often.began, often._clock = whole.began, whole._clock
    for number, event in enumerate(events):
        often.record(event)
        if every and number % every == 0:
            often.snapshot()
    assert replace(often.snapshot(True), wall_time=0) == replace(whole.snapshot(True), wall_time=0)


@given(recorders())
@settings(max_examples=tries(30))
def test_a_snapshot_is_read_as_it_was_written(recorder: Recorder) -> None:
    log = log_of(recorder.events)
    log._pages, log._meters = lambda: PageUse(1, 2, 3), lambda: [Meter("a: tokens a minute", 5, 60, "tokens", 2.5)]
    snapshot = log.snapshot(traces=True)
    assert ServerSnapshot.from_dict(json.loads(json.dumps(snapshot.to_dict()))) == snapshot


def test_memory_is_bounded_without_a_reader_and_no_count_is_lost() -> None:
    log = ServingLog("m", clock=lambda: 1.0)
    total = MAX_PENDING + 500
    for number in range(total):
        log.record(Submitted(0.0, f"r{number}", prompt_tokens=3))
        log.record(Decoded(0.0, f"r{number}", "x", token_id=1))
        log.record(Finished(0.0, f"r{number}", reason="stop", token_ids=(1,)))
        assert len(log._pending) <= MAX_PENDING
    snapshot = log.snapshot()
    assert snapshot.requests == {**dict.fromkeys(STATES, 0), "finished": total}
    assert len(snapshot.recent) == MAX_RECENT and snapshot.recent[-1].id == f"r{total - 1}"
    assert sum(rate.output_tokens for rate in snapshot.rates) == total
    assert not log._active, "no key of a request that ended stays behind"


def test_what_is_older_than_the_window_is_in_no_latency_and_no_rate() -> None:
    events = [Submitted(0.0, "a", prompt_tokens=3), Decoded(1.0, "a", "x"), Decoded(2.0, "a", "y")]
    events += [Finished(2.0, "a", reason="length", token_ids=(1, 2))]
    early, late = log_of(events, 30.0).snapshot(), log_of(events, 100.0).snapshot()
    assert early.ttft == LatencyPercentiles(1, 1.0, 1.0, 1.0) == early.tpot
    assert sum(rate.output_tokens for rate in early.rates) == 2 and early.output_tokens_per_second == 0
    assert late.ttft.count == late.tpot.count == 0 and not any(rate.output_tokens for rate in late.rates)
    assert len(late.rates) == serving_log.WINDOW_SECONDS and late.requests["finished"] == 1


def test_a_second_request_of_one_id_is_refused_and_the_first_goes_on() -> None:
    events = [Submitted(0.0, "a"), Submitted(1.0, "a"), Finished(1.0, "a", reason="refused", error="taken")]
    snapshot = log_of([*events, Decoded(2.0, "a", "x")]).snapshot()
    assert snapshot.requests == {**dict.fromkeys(STATES, 0), "failed": 1, "decode": 1}
    assert [(each.state, each.reason) for each in snapshot.recent] == [("decode", ""), ("failed", "taken")]


def test_a_runner_is_watched() -> None:
    """A prompt twice: the second time it is in the prefix cache; the rest adds up to what was asked."""
    runner = runner_of(model_of(spec_of()), prefix="radix")
    thread, once = RunnerThread.attach(runner), request("a", 32, 5)
    log = ServingLog("tiny", clock=runner.clock)
    end = thread.listen(log.record)
    for name in ("a", "b"):
        thread.submit(replace(once, request_id=name)).wait()
    snapshot = log.snapshot(traces=True)
    end()
    first, second = snapshot.recent
    assert (first.state, second.state) == ("finished", "finished")
    assert first.cached_tokens == 0 and 0 < second.cached_tokens < 32
    assert snapshot.prompt_tokens == 64 and snapshot.cache_hit_share == second.cached_tokens / 64
    assert [len(snapshot.traces[name].tokens) for name in "ab"] == [5, 5]
    assert snapshot.traces["a"].decisions[0].action == "admitted" and snapshot.traces["a"].decisions[0].reason
    assert first.ttft is not None and first.tpot is not None and first.tpot > 0
    assert sum(rate.prompt_tokens for rate in snapshot.rates) == 64 - second.cached_tokens


def test_a_file_that_is_no_snapshot_is_named(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.json"
    with pytest.raises(WorkbenchError, match="cannot read .*wrong.json: No such file"):
        ServerSnapshot.load(wrong)
    wrong.write_text("{")
    with pytest.raises(WorkbenchError, match="wrong.json is no snapshot of a server: not JSON"):
        ServerSnapshot.load(wrong)
    wrong.write_text('{"time": "soon"}')
    with pytest.raises(WorkbenchError, match="wrong.json is no snapshot of a server: time: "):
        ServerSnapshot.load(wrong)


def test_a_prompt_in_chunks_and_an_answer_without_single_tokens_count_once() -> None:
    events = [Submitted(0.5, "a", prompt_tokens=30), Submitted(0.6, "b", prompt_tokens=8)]
    events += [Prefilled(0.6, "a", tokens=10, computed=20), Prefilled(0.6, "a", tokens=10, computed=30)]
    events += [Prefilled(0.6, "b", tokens=8, computed=8), Finished(0.75, "b", reason="stop", token_ids=(1, 2, 3))]
    snapshot = log_of(events).snapshot()
    assert (snapshot.prompt_tokens, snapshot.cached_tokens) == (38, 10)
    assert [each.output_tokens for each in snapshot.recent] == [0, 3]
    assert [rate.output_tokens for rate in snapshot.rates] == [3]
    assert snapshot.output_tokens_per_second == 3, "not 12: a server's first second is a whole one"


@pytest.mark.parametrize("surplus", [-1, 0, 1, 5])
def test_a_trace_keeps_the_last_and_counts_the_others(surplus: int) -> None:
    total = serving_log.MAX_TRACED + surplus
    events = [Submitted(0.0, "a"), *(Decoded(0.0, "a", "x", token_id=number) for number in range(total))]
    trace = log_of(events).trace("a")
    assert trace is not None and trace.dropped == max(0, surplus)
    assert [each.token_id for each in trace.tokens] == list(range(max(0, surplus), total))
