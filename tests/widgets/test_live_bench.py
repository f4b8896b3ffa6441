"""A load of many requests: what is shown is what was counted, and it can be changed, stopped and run again."""

from __future__ import annotations

import random
import re
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.tiny import model_of, runner_of, spec_of
from tests.helpers.widgets import controls
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
from workbench.stop_button import _STOPPABLE
from workbench.svg import Scale
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
from workbench.units import format_seconds
from workbench.widgets import LiveBench
from workbench.widgets.job import Job
from workbench.widgets.live_bench.load import LoadGenerator, _OfferedRequest
from workbench.widgets.live_bench.log import BenchLog, TimedValues, merge_changes
from workbench.widgets.live_bench.panels import draw_latency, draw_requests
from workbench.widgets.live_bench.picture import change_words, describe_moment, draw_bench
from workbench.widgets.live_bench.statistics import (
    PERCENTILES,
    WINDOW_SECONDS,
    overload,
    sliding_percentiles,
    window_statistics,
)
from workbench.widgets.live_bench.traffic import LONGEST_REQUEST, LoadSettings, PoissonArrivals, RequestSource
from workbench.widgets.time_axis.navigation import next_begin
from workbench.widgets.time_axis.picture import TimeView
from workbench.widgets.timeline.picture import draw_timeline

SPEC = spec_of().model_copy(update={"max_position_embeddings": 2 * LONGEST_REQUEST})
MODEL = model_of(SPEC)
ENGINE: dict[str, Any] = {"page_size": 16, "pages": 60, "max_num_seqs": 6, "max_num_batched_tokens": 128}


def small_request(number: int, rng: random.Random, most_prompt: int = 90, most_output: int = 12) -> Request:
    prompt = tuple(rng.randrange(31) for _ in range(rng.randint(1, most_prompt)))
    return Request(f"r{number}", prompt, SamplingParameters(max_tokens=rng.randint(1, most_output), temperature=0))


def bench_runner(listener: Any = None, **changed: Any) -> Runner:
    return runner_of(MODEL, **ENGINE | changed, listener=listener)


@given(recorders(), st.data())
def test_statistics_are_a_recount_of_the_events(recorder: Recorder, data: st.DataObject) -> None:
    moments = st.sampled_from([0.0, *(event.time for event in recorder.events)]) | st.floats(-1, 20)
    begin, end = sorted((data.draw(moments), data.draw(moments)))
    log, running = BenchLog(kept_seconds=1e9), set[str]()
    wanted, decoded = Counter[str](), set[str]()
    before: dict[str, float] = {}  # the time of a request's last token, or of its arrival
    times: dict[str, list[float]] = {"ttft": [], "itl": []}
    pages: list[int] = []

    def count(event: Event, name: str, by: int = 1) -> bool:
        inside = begin <= event.time < end
        wanted[name] += by * inside
        return inside

    for event in recorder.events:
        log.record(event)
        name = event.request_id
        if isinstance(event, Submitted):
            count(event, "arrived")
            before[name] = event.arrival
        elif isinstance(event, Scheduled) and event.action == "admitted":
            running.add(name)
            if name not in decoded:
                count(event, "started")
        elif isinstance(event, Decoded):
            kind = "itl" if name in decoded else "ttft"
            if count(event, "output_tokens"):
                times[kind].append(event.time - before[name])
            before[name] = event.time
            decoded.add(name)
        elif isinstance(event, Preempted):
            running.discard(name)
            count(event, "preemptions")
        elif isinstance(event, Finished):
            running.discard(name)
            ends = {"refused": "refused", "cancelled": "cancelled", "error": "cancelled"}
            count(event, ends.get(event.reason, "ended"))
        elif isinstance(event, Stepped) and count(event, "steps"):
            count(event, "prefill_tokens", event.prefill_tokens)
            pages.append(event.pages_used)
    rows, under_way = recorder.requests(), log.num_waiting + log.num_running
    refused = sum(row["finish_reason"] == "refused" for row in rows)
    assert (log.num_arrived, log.num_refused) == (len(rows), refused) and log.num_running == len(running)
    assert under_way == sum(not row["finished"] for row in rows) == len(rows) - refused - log.num_ended
    found = window_statistics(log, begin, end)
    assert {name: getattr(found, name) for name in wanted} == wanted
    assert found.max_pages == max(pages, default=None) and found.csv().count("\n") == len(found.rows()) + 1
    for name, seconds in times.items():
        assert getattr(found, name) == pytest.approx(tuple(percentile(seconds, q) for q in PERCENTILES))


def started(bench: LiveBench) -> None:
    """Run a load until requests have ended."""
    bench.run(limit(60))
    until(lambda: bench.log.num_ended > 1)


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


def stepped(time: float, step: int, **values: Any) -> list[Event]:
    return [StepPlanned(time - 0.01, step=step), Stepped(time, step=step, phase="decode", wall_seconds=0.01, **values)]


def test_old_events_are_dropped_and_those_in_progress_stay() -> None:
    log = BenchLog(kept_seconds=10.0)
    log.record(Submitted(0.0, "stays", arrival=0.0))
    for number in range(400):
        time, name = number / 8, f"r{number}"
        for event in (
            Submitted(time, name, arrival=time), Scheduled(time, name, action="admitted"), Decoded(time + 0.05, name),
            Finished(time + 0.06, name, reason="stop"), *stepped(time + 0.07, number, requests=1),
            SettingsChanged(time + 0.08, name="rate", old=str(number), new=str(number + 1)),
        ):  # fmt: skip
            log.record(event)
    tracks, steps = log.tracks, len(log.steps)
    assert 80 <= steps == len(tracks.steps) and tracks.requests[0].row["request_id"] == "stays"
    assert 80 < len(log._rows) == len(tracks.requests)
    assert max(steps, len(log.tokens), len(tracks.requests), len(tracks.changes)) <= 103
    assert (log.num_arrived, log.num_ended, log.num_waiting) == (401, 400, 1)
    assert log.begin >= log.end - 12.5


def test_the_queue_and_the_cursor_say_what_was_then() -> None:
    log, recorder = BenchLog(), Recorder()

    def listen(event: Event) -> None:
        log.record(event)
        recorder.record(event)

    runner = bench_runner(listen, max_num_seqs=1)
    greedy = SamplingParameters(max_tokens=3, ignore_eos=True, temperature=0)
    for name in "abc":
        runner.submit(Request(name, tuple(range(20)), greedy), arrival=runner.clock())
    while runner.has_unfinished_requests:
        runner.step()
    first, second, *_, last = log.steps
    assert [step.waiting for step in log.steps] == [2, 2, 2, 1, 1, 1, 0, 0, 0]
    row = recorder.requests()[0]
    took = format_seconds(row["first_token"] - row["arrival"])
    for time, words in (
        (np.nextafter(first.begin, 0.0), "no step yet"),
        ((second.begin + second.end) / 2, f"step {second.step}: queue 2, batch 1, {second.pages_used} pages in use"),
        (np.nextafter(last.end, np.inf), f"after step {last.step}, which had: queue 0, batch 1"),
        (row["first_token"], f"TTFT {took} / {took} / {took}"),
    ):
        assert words in describe_moment(log, time)
    begins, every = [log.begin, first.begin, second.begin], [step.begin for step in log.steps]
    assert [
        [next_begin(every, time, by, log.begin, log.end) for time in times]
        for by, times in ((1, (0.0, begins[1], last.begin)), (-1, begins[1:]))
    ] == [[*begins[1:], log.end], begins[:2]]


def test_requests_from_before_the_log_are_no_arrivals() -> None:
    runner = bench_runner()
    sampling = SamplingParameters(max_tokens=4, ignore_eos=True, temperature=0)
    runner.submit(Request("before", tuple(range(20)), sampling))
    runner.step()
    log = BenchLog()
    runner.set_listener(log.record)
    runner.submit(Request("after", tuple(range(20)), sampling))
    while runner.has_unfinished_requests:
        runner.step()
    assert (log.num_arrived, log.num_refused, log.num_ended, log.num_running) == (1, 0, 1, 0)
    assert [track.row["request_id"] for track in log.tracks.requests] == ["after"], "none of them is left for good"


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
    given = ((0, "rate", "1", "2"), (0.5, "chunk_tokens", "8", "16"), (0.9, "rate", "2", "3"), (5, "rate", "3", "4"),
             (5.1, "rate", "4", "3"))  # fmt: skip
    made = merge_changes([SettingsChanged(time, name=name, old=old, new=new) for time, name, old, new in given])
    assert [(each.name, each.old, each.new) for each in made] == [("rate", "1", "3"), ("chunk_tokens", "8", "16")]
    tracks = Tracks()
    for event in (*stepped(1.0, 0, requests=1), SettingsChanged(1.0, name="policy", old="fcfs", new="fair")):
        tracks.record(event)
    assert "policy: fcfs → fair" in draw_timeline(tracks, TimeView(tracks.begin, tracks.begin + 0.02))


@pytest.mark.parametrize(
    ("name", "old", "new", "words"),
    [("chunk_tokens", "64", "16", "chunk 64 → 16"), ("long_share", "0.1", "0.5", "long 10% → 50%"),
     ("rate", "4.0", "8.0", "load 4.0/s → 8.0/s")],
)  # fmt: skip
def test_a_change_in_words(name: str, old: str, new: str, words: str) -> None:
    assert change_words(name, old, new) == words


@settings(max_examples=tries(60), deadline=None)
@given(recorders(), st.floats(0, 1), st.floats(0, 1), st.booleans())
def test_any_window_of_any_history_is_drawn(recorder: Recorder, one: float, other: float, marked: bool) -> None:
    log = BenchLog()
    for event in recorder.events:
        log.record(event)
    log.advance(0.0)
    low, high = sorted(log.begin + share * (log.end - log.begin) for share in (one, other))
    markup = draw_bench(log, TimeView(low, high, low if marked else None, (low, high) if marked else ()), [], {}, 4,
                        800.0)  # fmt: skip
    assert "nan" not in re.sub(r"<title>.*?</title>", "", markup).lower() and ('class="sel"' in markup) == marked
    rows, room = draw_requests(log, Scale(low, low + 1.0, 100.0, 700.0), 50.0)
    ends = [float(y) + float(tall) for y, tall in re.findall(r'<rect[^>]* y="([^"]+)"[^>]* height="([^"]+)"', rows)]
    assert max(ends, default=50.0) <= 50.0 + room <= 50.0 + 16 * max(2, log.num_rows), "the room that they take"


def test_a_latency_of_no_time_has_no_place_on_a_logarithmic_axis() -> None:
    series, log = TimedValues(), cast(Any, SimpleNamespace(begin=0.0, end=10.0))
    across = Scale(0.0, 10.0, 100.0, 700.0)
    series.add(1.0, 0.0)
    alone, _ = draw_latency(log, across, 50.0, "TTFT", series)
    series.add(9.0, 0.5)
    drawn, _ = draw_latency(log, across, 50.0, "TTFT", series)
    assert "<path" not in alone and "<path" in drawn and "nan" not in drawn.lower()


def test_before_the_first_event_there_are_numbers(bench: LiveBench) -> None:
    found = bench.statistics()
    assert (found.end, found.seconds, found.arrived, found.max_queue) == (0.0, 0.0, 0, None)
    (axis,) = re.findall('data-axis="([^"]+)"', bench.shown.content)
    assert all(map(np.isfinite, map(float, axis.split()))) and bench.axis.reading == "at 0.000 s: no step yet"


def test_what_is_dropped_is_said_and_not_counted_as_nothing(bench: LiveBench) -> None:
    bench._log = BenchLog(kept_seconds=10.0)
    for number in range(80):
        time = 1.0 + number / 10
        arrival, end = Submitted(time, f"r{number}", arrival=time), Finished(time, f"r{number}", reason="stop")
        for event in (arrival, end, *stepped(time, number, requests=1)):
            bench._append(event)
    bench.selected, bench.cursor = (2.05, 6.05), 3.0
    # From 5 s on it is kept where the end is 15 s, which is 4 s after the first event.
    for end, arrived, seconds, words in ((9.0, 40, 4.0, ""), (15.0, 21, 2.05, "1.95 s were dropped"),
                                         (30.0, 0, 0.0, "no figures are left")):  # fmt: skip
        bench.log.advance(end)
        bench.redraw()
        found = bench.statistics(*bench.selected)
        assert (found.arrived, found.steps) == (arrived, arrived) and found.seconds == pytest.approx(seconds)
        assert found.seconds == 0.0 or found.per_second(found.arrived) == pytest.approx(10.0, rel=0.1)
        assert words in bench.table.value and (words or "dropped" not in bench.table.value)
        dropped = "at 3.000 s: dropped, only the last 10 s are kept"
        assert (bench.axis.reading == dropped) == ("only the last 10 s are kept" in bench.pages.content) == (end > 9.0)


@pytest.fixture
def bench() -> Any:
    made = LiveBench(bench_runner(), rate=40.0, max_waiting=3, seed=2)
    yield made
    made.close()


def test_it_runs_changes_and_ends(bench: LiveBench) -> None:
    runner = bench._runner
    started(bench)
    bench.chunk_tokens, bench.policy, bench.max_num_seqs, bench.long_share = 16, "shortest_prompt", 2, 0.5
    until(lambda: runner.schedule.policy.kind == "shortest_prompt" and runner.scheduler.limits.max_num_seqs == 2)
    assert runner.scheduler.limits.chunk_tokens == 16
    until(lambda: bench.log.num_refused > 0)
    bench.stop()
    assert bench.wait(limit(60)) and not bench.running
    log = bench.log
    assert log.num_arrived == log.num_refused + log.num_ended and not log.num_waiting and not log.num_running
    assert {"chunk_tokens", "policy", "max_num_seqs", "long_share"} <= {change.name for change in log.changes}
    bench.selected = (0.0, log.end - log.origin + 1.0)  # type: ignore
    found = bench.statistics(*bench.selected)
    assert (found.arrived, found.ended + found.cancelled) == (log.num_arrived, log.num_ended)
    assert "chunk none → 16" in bench.picture() and "requests started" in bench.table.value
    assert bench.export.file("csv")["content"] == found.csv()


def test_settings_and_controls_stay_equal() -> None:
    bench = LiveBench(bench_runner(), rate=30.0, chunk_tokens=24, policy="fair")
    try:
        control = controls(bench)
        assert (control["load, 1/s"].value, control["chunk"].value, control["policy"].value) == (30.0, 24, "fair")
        until(lambda: bench._runner.scheduler.limits.chunk_tokens == 24)
        assert {8, 16, 24, 32, 64, 128} <= set(control["chunk"].options)
        bench.chunk_tokens, bench.rate = 40, 500.0
        until(lambda: bench._runner.scheduler.limits.chunk_tokens == 40)
        assert (control["chunk"].value, control["load, 1/s"].value) == (40, 500.0)
        control["chunk"].value = 24
        until(lambda: bench._runner.scheduler.limits.chunk_tokens == 24)
        assert bench.chunk_tokens == 24
        control["policy"].options = [*control["policy"].options, "missing.py:Policy"]
        before = bench.policy
        control["policy"].value = "missing.py:Policy"
        assert "missing.py" in bench.problem and bench.policy == control["policy"].value == before
    finally:
        bench.close()


def test_a_policy_of_ones_own_can_be_chosen_again() -> None:
    class Mine:
        def __call__(self, state: SchedulerState) -> SchedulerDecision:
            return parse_policy("fcfs")(state)

    mine = Mine()
    bench = LiveBench(bench_runner(policy=mine), rate=1.0)
    try:
        name = bench.policy
        assert name.endswith("Mine")
        bench.policy = "fair"
        until(lambda: bench._runner.schedule.policy is not mine)
        bench.policy = name
        until(lambda: bench._runner.schedule.policy is mine)
    finally:
        bench.close()


def test_what_the_runner_refuses_goes_back(bench: LiveBench, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: Any) -> None:
        raise WorkbenchError("a request in progress cannot run under it")

    chunk, before = controls(bench)["chunk"], bench.chunk_tokens
    with monkeypatch.context() as patched:
        patched.setattr(bench._runner, "set_schedule", refuse)
        bench.chunk_tokens = 16
        until(lambda: bench.problem)
    assert "cannot run under it" in bench.problem and bench.chunk_tokens == chunk.value == before
    bench.chunk_tokens = 32
    until(lambda: bench._runner.scheduler.limits.chunk_tokens == 32)
    until(lambda: not bench.problem)
    assert bench.chunk_tokens == chunk.value == 32


def test_close_ends_threads_and_frees_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    before = {each.ident for each in threading.enumerate()}
    runner = bench_runner(prefix="radix", max_num_seqs=8, max_num_batched_tokens=512)
    monkeypatch.setattr("workbench.widgets.live_bench.load.load", lambda *_, **__: runner)
    bench = LiveBench(rate=40.0)
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
    given = bench._runner
    bench.close()
    assert not given.has_unfinished_requests and len(bench.log.cancelled) > 1
    (end,) = [each for each in given.stream([small_request(0, random.Random(0))]) if isinstance(each, Finished)]
    assert end.reason in ("stop", "length")


def test_the_axis_follows_until_it_is_moved(bench: LiveBench) -> None:
    bench.run(0.5)
    assert bench.wait(limit(60))
    origin, end = bench.log.origin, bench.log.end
    assert bench.follow and bench.visible[1] >= end - origin  # type: ignore

    def asked(*messages: dict[str, Any]) -> None:
        for message in messages:
            bench._on_axis(message)

    asked({"zoom": 0.5, "at": origin + 0.25})  # type: ignore
    low, high = bench.window
    assert not bench.follow and low <= 0.25 <= high
    asked({"pan": 0.25})
    assert bench.window[1] - bench.window[0] == pytest.approx(high - low)
    asked({"cursor": origin + 0.2}, {"move": -1})  # type: ignore
    assert bench.cursor < 0.2 and f"at {bench.cursor:.3f} s" in bench.axis.reading  # type: ignore
    asked({"extend": 1}, {"extend": 1})
    assert bench.selected[0] < bench.selected[1]  # type: ignore
    asked({"select": []}, {"cursor": None}, {"all": True})
    assert bench.follow and bench.visible[0] == 0.0 and bench.cursor is None and bench.selected == ()


def test_a_load_begins_while_the_thread_of_the_one_before_ends() -> None:
    held, free = threading.Event(), threading.Event()

    def tick() -> None:
        if not held.is_set():
            held.set()
            free.wait()

    live = RunnerThread.attach(bench_runner())
    load = LoadGenerator(live, LoadSettings(rate=40.0), lambda _: None, tick)
    try:
        load.start(limit(60))
        held.wait()
        load.stop()
        load.start(limit(60))
        until(lambda: load._offered)
        load.stop()
        assert load.wait(limit(60))
    finally:
        free.set()
        load.close()


def test_a_load_that_failed_has_ended_when_its_requests_have() -> None:
    cancelled, pending = threading.Event(), list[bool]()

    def tick() -> None:
        pending.append(bool(load._offered))
        if len(pending) == 1:
            raise OSError("no screen")

    live = RunnerThread.attach(bench_runner())
    load = LoadGenerator(live, LoadSettings(rate=0.0), lambda _: None, tick)
    load._offered["a"] = _OfferedRequest(lambda _: None, cancelled.set)
    try:
        load.start(limit(60))
        cancelled.wait()
        until(lambda: load.error)
        assert "no screen" in load.error and not load.wait(limit(0.02)) and load.running
        live.call(lambda _: load._on_end("a", ""))
        assert load.wait(limit(60)) and not load.running and pending == [True, False]
    finally:
        load.close()


@pytest.mark.parametrize("fails", ["runner", "load"])
def test_a_load_starts_again_before_the_requests_of_one_that_failed_have_ended(fails: str) -> None:
    failed, arrived = threading.Event(), list[Event]()

    def tick() -> None:
        if fails == "load" and not failed.is_set():
            failed.set()
            raise OSError("no screen")

    live = RunnerThread.attach(bench_runner())
    live.listen(lambda event: arrived.append(event) if isinstance(event, Submitted) else None)
    load = LoadGenerator(live, LoadSettings(rate=40.0), lambda _: None, tick)
    load._offered["a"] = _OfferedRequest(lambda _: None)  # of the load that fails
    try:
        load.start(limit(60))
        if fails == "runner":
            live.call(lambda _: load._on_end("b", "it failed"))
        until(lambda: load.error)
        load.start(limit(60))
        count = len(arrived)
        until(lambda: len(arrived) > count + 2)
        assert load.error == ""
    finally:
        load._offered.pop("a")
        load.close()


def test_a_load_that_the_stop_button_ended_can_be_run_again(bench: LiveBench) -> None:
    started(bench)
    for each in tuple(_STOPPABLE):
        if isinstance(each, Job):
            each.stop()
    arrived = bench.log.num_arrived
    bench.run(limit(60))
    until(lambda: bench.log.num_arrived > arrived + 2 and bench.running)
    bench.stop()
    assert bench.wait(limit(60)) and not bench.running


@pytest.mark.parametrize("begun", [False, True])
def test_an_interrupted_start_is_as_if_there_had_been_none(
    bench: LiveBench, monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        if thread.name != "live bench" or begun:
            start(thread)
        if thread.name == "live bench":
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            bench.run(1.0)
    until(lambda: not any(each.name == "live bench" for each in threading.enumerate()))
    assert bench.wait(limit(60)) and bench.log.num_arrived == 0
    started(bench)


def test_a_request_that_is_cancelled_before_the_runner_has_it_is_over(bench: LiveBench) -> None:
    load, live = bench._load, bench._live
    assert load is not None
    bench.rate = 0.0
    bench.run(limit(60))
    job = load._job
    assert job is not None
    stops: tuple[Callable[[], None], ...] = (live.stop, load.stop)
    for number, stop in enumerate(stops):
        request = small_request(number, random.Random(0))
        live.call(lambda runner, request=request, stop=stop: (load.offer(job, request, runner.clock()), stop()))
        assert not load._offered and job.stopped == (stop == load.stop)
    assert bench.wait() and not load.running and bench.log.num_arrived == 0


def test_a_preempted_request_waits_again(bench: LiveBench) -> None:
    load = bench._load
    assert load is not None
    offered = load._offered["a"] = _OfferedRequest(lambda _: None)
    for event, is_running in ((Scheduled(0.0, "a", action="admitted"), True), (Preempted(0.0, "a"), False)):
        load._on_event(event)
        assert offered.is_running == is_running
    del load._offered["a"]


def test_files_are_drawn_while_nothing_is_recorded(bench: LiveBench, monkeypatch: pytest.MonkeyPatch) -> None:
    owned: list[bool] = []

    def draw(*_: Any) -> str:
        owned.append(bench._lock._is_owned())  # type: ignore[attr-defined]
        return "<svg/>"

    monkeypatch.setattr("workbench.widgets.live_bench.view.draw_bench", draw)
    assert bench.export.file("png")["content"] == "<svg/>" and owned == [True]


def test_wrong_arguments_measure_nothing_and_leave_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(*_: Any) -> float:
        raise AssertionError("nothing is measured for settings that are wrong")

    monkeypatch.setattr("workbench.widgets.live_bench.view.measure_capacity", measure)
    runner = bench_runner()
    with pytest.raises(WorkbenchError, match="max_waiting"):
        LiveBench(runner, max_waiting=0)
    live = RunnerThread.attach(runner)
    assert live._listeners == [] and live.call(lambda each: each) is runner
    monkeypatch.setattr("workbench.widgets.live_bench.load.load", lambda *_, **__: runner)
    with pytest.raises(WorkbenchError, match="chunk_tokens must be from 1 to"):
        LiveBench(chunk_tokens=1000)
    with pytest.raises(WorkbenchError, match="closed"):
        live.call(lambda each: each)


def test_a_stop_that_is_carried_out_while_the_next_run_starts_does_not_end_it(
    bench: LiveBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, carried_out = threading.Thread.start, threading.Event()

    def slow(thread: threading.Thread) -> None:
        start(thread)
        if thread.name == "live bench":
            bench._live.run_soon(carried_out.set)  # behind what `stop` asks of the runner's thread
            carried_out.wait(limit(0.02))

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", slow)
        bench.stop()
        bench.run(limit(60))
    carried_out.wait()
    assert bench._load is not None and bench._load.running
    until(lambda: bench.log.num_ended > 1)
    bench.stop()
    assert bench.wait(limit(60)) and not bench._load.running


@pytest.mark.parametrize("share", [-0.001, 0.0, 1.0, 1.001, float("nan")])
@pytest.mark.parametrize("rate", [-0.001, 0.0, 1e9, float("inf"), float("nan")])
def test_loads_have_a_rate_and_a_share(rate: float, share: float) -> None:
    wrong = "" if rate in (0.0, 1e9) else "rate must be"
    wrong = wrong or ("" if share in (0.0, 1.0) else "long_share must be")
    with pytest.raises(WorkbenchError, match=wrong) if wrong else nullcontext():
        LoadSettings(rate, share)
