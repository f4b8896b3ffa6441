"""A load of many requests: none is lost whatever changes when, and what is shown is what was counted."""

from __future__ import annotations

import random
import re
import threading
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import workbench
from compiled_kernels import Backend, backend_problems
from tests.engine.tiny import model_of, runner_of, spec_of
from tests.patience import limit, until
from tests.thorough import tries
from tests.trace.histories import recorders
from workbench.engine.runner import Runner
from workbench.engine.runner_thread import RunnerThread
from workbench.errors import WorkbenchError
from workbench.request import Request, SamplingParameters
from workbench.runs.metrics import percentile
from workbench.scheduler.policies import parse_policy
from workbench.scheduler.policy import SchedulerDecision, SchedulerState
from workbench.trace.events import (
    Decoded,
    Event,
    Finished,
    Preempted,
    Scheduled,
    SettingsChanged,
    Stepped,
    StepPlanned,
    Submitted,
)
from workbench.trace.recorder import Recorder
from workbench.trace.tracks import Tracks
from workbench.widgets import LiveBench
from workbench.widgets.live_bench.load import LoadGenerator
from workbench.widgets.live_bench.log import BenchLog, TimedValues, merge_changes
from workbench.widgets.live_bench.picture import TimeView, change_words, describe_moment, draw_bench
from workbench.widgets.live_bench.statistics import (
    PERCENTILES,
    WINDOW_SECONDS,
    overload,
    sliding_percentiles,
    window_statistics,
)
from workbench.widgets.live_bench.traffic import LONGEST_REQUEST, LoadSettings, PoissonArrivals, RequestSource
from workbench.widgets.timeline.picture import draw_timeline

SPEC = spec_of().model_copy(update={"max_position_embeddings": 2 * LONGEST_REQUEST})
MODEL = model_of(SPEC)
DOUBLE = model_of(SPEC, dtype=torch.float64)  # what a batch rounds differently decides no token
ENGINE: dict[str, Any] = {"page_size": 16, "pages": 60, "max_num_seqs": 6, "max_num_batched_tokens": 128}
POLICIES = ("fcfs", "prefill_first", "decode_first", "shortest_prompt", "priority", "fair", "deadline")
CHANGES = st.one_of(
    st.sampled_from(POLICIES).map(lambda name: {"policy": name}),
    st.integers(1, 128).map(lambda tokens: {"chunk_tokens": tokens}),
    st.integers(1, 6).map(lambda count: {"max_num_seqs": count}),
    st.sampled_from(["continuous", "static", "padded"]).map(lambda kind: {"kind": kind}),
)


def small_request(number: int, rng: random.Random, most_prompt: int = 90, most_output: int = 12) -> Request:
    prompt = tuple(rng.randrange(31) for _ in range(rng.randint(1, most_prompt)))
    return Request(f"r{number}", prompt, SamplingParameters(max_tokens=rng.randint(1, most_output), temperature=0))


def bench_runner(listener: Any = None, **changed: Any) -> Runner:
    return runner_of(MODEL, **ENGINE | changed, listener=listener)


@settings(max_examples=tries(40), deadline=None)
@given(
    st.lists(st.one_of(st.integers(1, 3), CHANGES, st.just("step"), st.just("cancel")), max_size=24), st.integers(0, 9)
)
def test_no_request_is_lost_whatever_changes_when(moves: list[Any], seed: int) -> None:
    log, rng, bound = BenchLog(), random.Random(seed), 5
    runner = bench_runner(log.record, page_size=4, pages=20)  # few: requests are preempted
    submitted, refused = 0, 0

    def law() -> None:
        scheduler = runner.scheduler
        assert log.num_arrived == submitted + refused
        assert (log.num_waiting, log.num_running) == (len(scheduler.waiting), len(scheduler.running))
        assert log.num_arrived == log.num_refused + log.num_waiting + log.num_running + log.num_ended
        assert log.num_refused == refused

    for move in (3, 2, *moves):
        if isinstance(move, int):
            for _ in range(move):
                if log.num_waiting >= bound:
                    refused += 1
                    log.record(Finished(runner.clock(), f"x{refused}", reason="refused", ended_by="overloaded"))
                else:
                    runner.submit(small_request(submitted, rng, 30, 40))
                    submitted += 1
        elif isinstance(move, dict):
            runner.set_schedule(**move)
        elif move == "cancel" and runner.scheduler.running:
            runner.cancel(runner.scheduler.running[-1].request_id)
        elif runner.has_unfinished_requests:
            runner.step()
        law()
    while runner.has_unfinished_requests:
        runner.step()
        law()
    assert log.num_ended == submitted and not any(pool.num_used for pool in runner.scheduler.pools)


def tokens_of(
    runner: Runner, requests: list[Request], changes: dict[int, dict[str, Any]]
) -> dict[str, tuple[int, ...]]:
    """Return the tokens of each request, one of which comes before each step; changes are made before steps."""
    ends: dict[str, tuple[int, ...]] = {}
    runner.set_listener(
        lambda event: ends.update({event.request_id: event.token_ids}) if isinstance(event, Finished) else None
    )
    runner.set_schedule(policy="fcfs", kind="continuous", chunk_tokens=16, max_num_seqs=ENGINE["max_num_seqs"])
    step = 0
    while step < len(requests) or runner.has_unfinished_requests:
        if step < len(requests):
            runner.submit(requests[step])
        if step in changes:
            runner.set_schedule(**changes[step])
        runner.step()
        step += 1
    return ends


@settings(max_examples=tries(40), deadline=None)
@given(st.dictionaries(st.integers(0, 30), CHANGES, max_size=8), st.integers(0, 9))
def test_changes_leave_each_requests_tokens_as_they_were(changes: dict[int, dict[str, Any]], seed: int) -> None:
    rng = random.Random(seed)
    requests = [small_request(number, rng) for number in range(8)]
    runner = runner_of(DOUBLE, **ENGINE | {"pages": 16})  # few: requests are preempted
    assert tokens_of(runner, requests, changes) == tokens_of(runner, requests, {})


def test_under_batch_invariance_they_are_the_same_in_low_precision() -> None:
    problem = backend_problems()[Backend.MLIR]
    if problem is not None:
        pytest.skip(f"backend mlir: {problem}")
    runner = workbench.load("shape:tiny", backend="mlir", batch_invariant=True, max_num_seqs=6, page_size=16, pages=40)
    rng = random.Random(1)
    requests = [small_request(number, rng, 30) for number in range(5)]
    changes = {
        1: {"chunk_tokens": 8},
        3: {"policy": "shortest_prompt"},
        6: {"max_num_seqs": 2},
        9: {"chunk_tokens": 64},
    }
    assert tokens_of(runner, requests, changes) == tokens_of(runner, requests, {})


def test_limits_hold_from_the_next_step_on() -> None:
    events: list[Event] = []
    runner = bench_runner(events.append)
    rng = random.Random(0)
    for number in range(6):
        runner.submit(Request(f"r{number}", tuple(rng.randrange(31) for _ in range(60)),
                              SamplingParameters(max_tokens=12, ignore_eos=True)))  # fmt: skip
    for _ in range(4):
        runner.step()
    assert len(runner.scheduler.running) == 6
    runner.set_schedule(max_num_seqs=2, chunk_tokens=16)
    events.clear()
    runner.step()
    assert len(runner.scheduler.running) > 2, "those that run go on"
    while runner.has_unfinished_requests:
        runner.step()
        assert all(step.prefill_tokens <= 16 for step in events if isinstance(step, Stepped))
    for number in (90, 91, 92):
        runner.submit(small_request(number, rng))
    most = 0
    while runner.has_unfinished_requests:
        runner.step()
        most = max(most, len(runner.scheduler.running))
    assert most == 2
    changed = [(each.name, each.old, each.new) for each in events if isinstance(each, SettingsChanged)]
    assert changed == []
    seen: set[tuple[int, int]] = set()
    fcfs = parse_policy("fcfs")

    def watching(state: SchedulerState) -> SchedulerDecision:
        seen.add((state.max_num_seqs, state.max_prefill_tokens))
        return fcfs(state)

    runner.scheduler.set_policy(watching)
    runner.set_schedule(max_num_seqs=3, chunk_tokens=24)
    sampling = SamplingParameters(max_tokens=8, n=5, ignore_eos=True)
    runner.submit(Request("samples", tuple(range(30)), sampling))
    while runner.has_unfinished_requests:
        runner.step()
        assert len(runner.scheduler.running) <= 3
    assert seen == {(3, 24)}
    runner.set_schedule(chunk_tokens=16)
    events.clear()
    runner.set_schedule(policy="priority", chunk_tokens=None)
    changed = [(each.name, each.old, each.new) for each in events if isinstance(each, SettingsChanged)]
    assert changed == [("policy", "fcfs", "priority"), ("chunk_tokens", "16", "none")]


def test_running_requests_keep_their_pages_in_the_new_policys_order() -> None:
    """A steady decode takes no view of them: the order that the policy before had made is not taken for this one's."""
    events: list[Event] = []
    runner = bench_runner(events.append, pages=7)
    for number, priority in enumerate((2, 0, 1)):
        runner.submit(Request(f"r{number}", tuple(range(20)), SamplingParameters(max_tokens=60, ignore_eos=True),
                              priority=priority))  # fmt: skip
    runner.submit(Request("waits", tuple(range(20)), SamplingParameters(max_tokens=4), priority=9))
    for _ in range(4):
        runner.step()
    events.clear()
    runner.set_schedule(policy="priority")
    runner.step()
    (planned,) = [each for each in events if isinstance(each, StepPlanned)]
    named = [name for name, _ in planned.policy_decisions[0].num_scheduled_tokens]
    assert named == ["r1", "r2", "r0", "waits"]
    while not (gone := [each.request_id for each in events if isinstance(each, Preempted)]):
        runner.step()
    assert gone[0] == "r0", "the largest number is preempted first"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_num_seqs": 7}, "made for 6"),
        ({"max_num_batched_tokens": 129}, "made for 128"),
        ({"chunk_tokens": 0}, "chunk_tokens"),
        ({"chunk_tokens": 500}, "chunk_tokens must be within"),
        ({"policy": "fcsf"}, "policy"),
        ({"chunk": 4}, "did you mean 'chunk_tokens'"),
        ({"preemption_mode": "recompute"}, "fixed once"),
        ({"chunked_prefill": False, "max_num_batched_tokens": 16}, "r0: 40 prompt tokens"),
    ],
)
def test_a_change_that_cannot_be_made_changes_nothing(change: dict[str, Any], words: str) -> None:
    runner = bench_runner()
    runner.submit(Request("r0", tuple(range(20)) * 2, SamplingParameters(max_tokens=4)))
    runner.step()
    before = runner.schedule, runner.scheduler.limits, runner.scheduler.policy
    with pytest.raises(WorkbenchError, match=re.escape(words)):
        runner.set_schedule(**change)
    assert (runner.schedule, runner.scheduler.limits, runner.scheduler.policy) == before
    while runner.has_unfinished_requests:
        runner.step()


@given(recorders(), st.data())
def test_statistics_are_a_recount_of_the_events(recorder: Recorder, data: st.DataObject) -> None:
    moments = st.sampled_from([0.0, *(event.time for event in recorder.events)]) | st.floats(-1, 20)
    begin, end = sorted((data.draw(moments), data.draw(moments)))
    log = BenchLog(kept_seconds=1e9)
    for event in recorder.events:
        log.record(event)
    found = window_statistics(log, begin, end)
    inside = [event for event in recorder.events if begin <= event.time < end]
    arrivals = {each.request_id: each.arrival for each in recorder.events if isinstance(each, Submitted)}
    admitted: dict[str, list[Event]] = defaultdict(list)
    times: dict[str, list[float]] = defaultdict(list)
    ttft, itl = [], []
    for event in recorder.events:
        if isinstance(event, Scheduled) and event.action == "admitted" and not times[event.request_id]:
            admitted[event.request_id].append(event)
        if isinstance(event, Decoded):
            mine = times[event.request_id]
            since = mine[-1] if mine else arrivals[event.request_id]
            if begin <= event.time < end:
                (itl if mine else ttft).append(event.time - since)
            mine.append(event.time)
    ends = [event for event in inside if isinstance(event, Finished)]
    steps = [event for event in inside if isinstance(event, Stepped)]
    assert found.arrived == sum(isinstance(event, Submitted) for event in inside)
    assert found.refused == sum(event.reason == "refused" for event in ends)
    assert found.cancelled == sum(event.reason in ("cancelled", "error") for event in ends)
    assert found.ended == len(ends) - found.refused - found.cancelled
    assert found.started == sum(begin <= event.time < end for mine in admitted.values() for event in mine)
    assert found.preemptions == sum(isinstance(event, Preempted) for event in inside)
    assert found.output_tokens == sum(isinstance(event, Decoded) for event in inside) == len(ttft) + len(itl)
    assert (found.steps, found.prefill_tokens) == (len(steps), sum(step.prefill_tokens for step in steps))
    assert found.max_pages == max((step.pages_used for step in steps), default=None)
    assert found.ttft == pytest.approx(tuple(percentile(ttft, q) for q in PERCENTILES))
    assert found.itl == pytest.approx(tuple(percentile(itl, q) for q in PERCENTILES))
    assert found.csv().count("\n") == len(found.rows()) + 1


@given(st.lists(st.tuples(st.floats(0, 9), st.floats(0.001, 4)), max_size=30), st.lists(st.floats(-1, 12), max_size=6))
def test_percentiles_slide_over_the_seconds_before(values: list[tuple[float, float]], moments: list[float]) -> None:
    series = TimedValues()
    for time, value in sorted(values):
        series.add(time, value)
    found = sliding_percentiles(series, moments, 2.0)
    for place, moment in enumerate(moments):
        known = [value for time, value in values if moment - 2.0 < time <= moment]
        expected = [percentile(known, q) if known else np.nan for q in PERCENTILES]
        assert found[:, place] == pytest.approx(expected, nan_ok=True)


@given(st.lists(st.tuples(st.floats(0.01, 3), st.floats(0, 40)), min_size=1, max_size=12), st.integers(0, 99))
def test_arrivals_are_the_same_however_often_the_clock_is_read(parts: list[tuple[float, float]], seed: int) -> None:
    coarse, fine = (PoissonArrivals(0.0, random.Random(seed)) for _ in range(2))
    now, some, others = 0.0, [], []
    for seconds, rate in parts:
        now += seconds
        some += coarse.advance(now, rate)
        for share in (0.3, 0.31, 0.9, 1.0):
            others += fine.advance(now - seconds * (1 - share), rate)
    assert len(some) == len(others) and others == pytest.approx(some)
    assert some == sorted(some) and all(0 <= time <= now for time in some)


def test_the_rate_of_arrivals_is_the_one_that_is_set() -> None:
    arrivals = PoissonArrivals(0.0, random.Random(3))
    counts = [len(arrivals.advance(1000.0 * (n + 1), rate)) for n, rate in enumerate((2.0, 0.0, 10.0))]
    assert abs(counts[0] - 2000) < 5 * 2000**0.5 and counts[1] == 0 and abs(counts[2] - 10_000) < 5 * 10_000**0.5


def test_a_mix_is_what_it_says() -> None:
    source = RequestSource(31, seed=1)
    made = [source.next_request(LoadSettings(long_share=0.25)) for _ in range(400)]
    assert 60 < sum("long" in each.request_id for each in made) < 140
    assert all(len(each.prompt_ids) + each.sampling.max_output_tokens <= LONGEST_REQUEST for each in made)
    shared = [source.next_request(LoadSettings(shared_prefix=True)).prompt_ids[:32] for _ in range(4)]
    assert len(set(shared)) == 1 and len({each.prompt_ids[:32] for each in made}) == 400
    wrongs: tuple[dict[str, Any], ...] = ({"rate": -1.0}, {"rate": float("nan")}, {"long_share": 1.5})
    for wrong in wrongs:
        with pytest.raises(WorkbenchError, match="must be"):
            LoadSettings(**wrong)


def stepped(time: float, step: int, **values: Any) -> list[Event]:
    return [StepPlanned(time - 0.01, step=step), Stepped(time, step=step, phase="decode", wall_seconds=0.01, **values)]


def test_old_events_are_dropped_and_those_in_progress_stay() -> None:
    log = BenchLog(kept_seconds=10.0)
    log.record(Submitted(0.0, "stays", arrival=0.0))
    for number in range(400):
        time = number / 8
        log.record(Submitted(time, f"r{number}", arrival=time))
        log.record(Scheduled(time, f"r{number}", action="admitted"))
        log.record(Decoded(time + 0.05, f"r{number}"))
        log.record(Finished(time + 0.06, f"r{number}", reason="stop"))
        for event in stepped(time + 0.07, number, requests=1):
            log.record(event)
        log.record(SettingsChanged(time + 0.08, name="rate", old=str(number), new=str(number + 1)))
    tracks = log.tracks
    assert 80 <= len(log.steps) <= 102 and len(tracks.steps) == len(log.steps) and len(log.tokens) <= 102
    assert 80 < len(tracks.requests) <= 103 and tracks.requests[0].row["request_id"] == "stays"
    assert len(tracks.changes) <= 103 and len(log._rows) == len(tracks.requests)
    assert (log.num_arrived, log.num_ended, log.num_waiting) == (401, 400, 1)
    assert log.begin >= log.end - 12.5


def test_the_queue_and_the_cursor_say_what_was_then() -> None:
    log = BenchLog()
    for name, time in (("a", 1.0), ("b", 1.1), ("c", 1.2)):
        log.record(Submitted(time, name, arrival=time))
    log.record(Scheduled(1.29, "a", action="admitted"))
    for event in stepped(1.3, 7, requests=1, pages_used=5, decode_tokens=1):
        log.record(event)
    log.record(Decoded(1.3, "a"))
    assert "step 7: queue 2, batch 1, 5 pages in use" in describe_moment(log, 1.295)
    assert "after step 7" in describe_moment(log, 1.4) and "TTFT 300 ms" in describe_moment(log, 1.4)
    assert "no step yet" in describe_moment(log, 1.1)
    assert log.next_step(1.0, 1) == pytest.approx(1.29) and log.next_step(1.3, -1) == pytest.approx(1.29)
    assert log.next_step(1.3, 1) == log.end and log.next_step(1.0, -1) == log.begin


def test_overload_is_said() -> None:
    log = BenchLog()
    for number in range(4):
        log.record(Submitted(1.0 + number / 10, f"r{number}", arrival=1.0))
    assert overload(log, 4) == ""
    log.record(Finished(2.0, "refused", reason="refused", ended_by="overloaded"))
    assert "1 of the 5 requests" in overload(log, 4) and "because 4 waited already" in overload(log, 4)
    log.advance(2.0 + 2 * WINDOW_SECONDS)
    assert overload(log, 4) == ""


def test_changes_that_follow_each_other_are_one_mark() -> None:
    def change(time: float, name: str, old: str, new: str) -> SettingsChanged:
        return SettingsChanged(time, name=name, old=old, new=new)

    made = merge_changes(
        [
            change(0, "rate", "1", "2"),
            change(0.5, "chunk_tokens", "8", "16"),
            change(0.9, "rate", "2", "3"),
            change(5, "rate", "3", "4"),
            change(5.1, "rate", "4", "3"),
        ]
    )
    assert [(each.name, each.old, each.new) for each in made] == [("rate", "1", "3"), ("chunk_tokens", "8", "16")]
    tracks = Tracks()
    for event in (*stepped(1.0, 0, requests=1), change(1.0, "policy", "fcfs", "fair")):
        tracks.record(event)
    assert "policy: fcfs → fair" in draw_timeline(tracks, 0.0, 20.0)
    assert change_words("chunk_tokens", "64", "16") == "chunk 64 → 16"
    assert change_words("long_share", "0.1", "0.5") == "long 10% → 50%"
    assert change_words("rate", "4.0", "8.0") == "load 4.0/s → 8.0/s"


@settings(max_examples=tries(60), deadline=None)
@given(recorders(), st.floats(0, 1), st.floats(0, 1), st.booleans())
def test_any_window_of_any_history_is_drawn(recorder: Recorder, one: float, other: float, marked: bool) -> None:
    log = BenchLog()
    for event in recorder.events:
        log.record(event)
    log.advance(0.0)
    begin, length = log.begin, log.end - log.begin
    low, high = sorted((begin + one * length, begin + other * length))
    view = TimeView(low, high, low if marked else None, (low, high) if marked else None)
    markup = draw_bench(log, view, [], {}, 4, 800.0)
    assert markup.startswith("<svg") and "nan" not in re.sub(r"<title>.*?</title>", "", markup).lower()
    assert ('class="sel"' in markup) == marked


@pytest.fixture
def bench() -> Any:
    made = LiveBench(bench_runner(), rate=40.0, max_waiting=3, seed=2)
    yield made
    made.close()


def test_it_runs_changes_and_ends(bench: LiveBench) -> None:
    runner = bench._runner
    bench.run(limit(60))
    until(lambda: bench.log.num_ended > 3)
    bench.chunk_tokens, bench.policy, bench.max_num_seqs, bench.long_share = 16, "shortest_prompt", 2, 0.5
    until(lambda: runner.schedule.policy.kind == "shortest_prompt" and runner.scheduler.limits.max_num_seqs == 2)
    assert runner.scheduler.limits.chunk_tokens == 16
    until(lambda: bench.log.num_refused > 0)
    bench.stop()
    assert bench.wait(limit(60)) and not bench.running
    log = bench.log
    assert log.num_arrived == log.num_refused + log.num_ended and not log.num_waiting and not log.num_running
    names = {change.name for change in log.changes}
    assert {"chunk_tokens", "policy", "max_num_seqs", "long_share"} <= names
    bench.selected = (0.0, log.end - log.origin + 1.0)
    found = bench.statistics(*bench.selected)
    assert (found.arrived, found.ended + found.cancelled) == (log.num_arrived, log.num_ended)
    assert "chunk none → 16" in bench.picture() and "output tokens per second" in bench.picture()
    assert "requests started" in bench.table.value and bench.export.file("csv")["content"] == found.csv()
    bench.max_num_seqs = 7
    until(lambda: bench.problem)
    assert "made for 6" in bench.problem
    bench.rate = -1.0
    assert "rate must be" in bench.problem


def test_close_ends_threads_and_frees_pages() -> None:
    before = {each.ident for each in threading.enumerate()}
    bench = LiveBench(bench_runner(prefix="radix"), rate=40.0)
    bench._owns_runner = True  # as one that it loaded
    runner = bench._runner
    bench.run(limit(60))
    until(lambda: runner.scheduler.running)
    bench.close()
    bench.close()
    assert not any(pool.num_used for pool in runner.scheduler.pools)
    until(lambda: {each.ident for each in threading.enumerate()} <= before)
    with pytest.raises(WorkbenchError, match="closed"):
        RunnerThread.attach(runner).call(lambda each: each)


def test_a_given_runner_stays_usable(bench: LiveBench) -> None:
    bench.run(limit(60))
    until(lambda: bench.log.num_ended > 1 and len(bench._runner.scheduler.waiting) == 3)
    bench.close()
    assert not bench._runner.has_unfinished_requests and len(bench.log.cancelled) > 1
    (end,) = [each for each in bench._runner.stream([small_request(0, random.Random(0))]) if isinstance(each, Finished)]
    assert end.reason in ("stop", "length")


def test_the_stop_button_ends_the_load(bench: LiveBench) -> None:
    from workbench.stop_button import _STOPPABLE

    bench.run(limit(60))
    until(lambda: bench.log.num_ended > 1)
    for each in tuple(_STOPPABLE):
        if isinstance(each, LoadGenerator):
            each.stop()
    assert bench.wait(limit(60))


def test_the_axis_follows_until_it_is_moved(bench: LiveBench) -> None:
    bench.run(0.5)
    assert bench.wait(limit(60))
    origin, end = bench.log.origin, bench.log.end
    assert bench.follow and bench._window()[1] >= end - origin
    bench._on_axis({"zoom": 0.5, "at": origin + 0.25})
    low, high = bench.window
    assert not bench.follow and low <= 0.25 <= high
    bench._on_axis({"pan": 0.25})
    assert bench.window[1] - bench.window[0] == pytest.approx(high - low)
    bench._on_axis({"cursor": origin + 0.2})
    bench._on_axis({"move": -1})
    assert bench.cursor < 0.2 and f"at {bench.cursor:.3f} s" in bench.axis.reading
    bench._on_axis({"extend": 1})
    bench._on_axis({"extend": 1})
    assert bench.selected[0] < bench.selected[1]
    bench._on_axis({"select": []})
    bench._on_axis({"cursor": None})
    bench._on_axis({"all": True})
    assert bench.follow and bench._window()[0] == 0.0 and bench.cursor is None and bench.selected == ()


def test_wrong_arguments_are_refused() -> None:
    for given_, words in (({"max_waiting": 0}, "max_waiting"), ({"speed": 3}, "no setting 'speed'")):
        with pytest.raises(WorkbenchError, match=words):
            LiveBench(bench_runner(), rate=1.0, **given_)
    small = runner_of(model_of(spec_of()), page_size=16, pages=8)
    with pytest.raises(WorkbenchError, match="context is 48"):
        LiveBench(small)
