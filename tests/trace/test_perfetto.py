from __future__ import annotations

import json
from collections import Counter, defaultdict

from hypothesis import given

from tests.trace.histories import recorders
from workbench.trace.events import (
    Decoded,
    Finished,
    HandedOver,
    Moved,
    Preempted,
    Prefilled,
    Routed,
    RoutingOption,
    Scheduled,
    Stepped,
    Submitted,
)
from workbench.trace.perfetto import ENGINE, REQUESTS, STEP_TRACK, chrome_trace, read_trace
from workbench.trace.recorder import Recorder

REQUIRED = {"M": {"args"}, "X": {"dur", "args"}, "i": {"s"}, "C": {"args"}}


def nanoseconds(event: dict) -> tuple[int, int]:
    start = round(event["ts"] * 1000)
    return start, start + round(event.get("dur", 0.0) * 1000)


def slices(trace: dict, pid: int) -> dict[int, list[dict]]:
    tracks = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X" and event["pid"] == pid:
            tracks[event["tid"]].append(event)
    return tracks


@given(recorders())
def test_every_event_is_whole_and_the_trace_is_strict_json(recorder):
    trace = chrome_trace(recorder)
    assert json.loads(json.dumps(trace, allow_nan=False)) == trace
    for event in trace["traceEvents"]:
        assert {"name", "ph", "pid", "tid", "ts"} | REQUIRED[event["ph"]] <= set(event)
        assert event["ts"] >= 0
        assert event.get("dur", 0) >= 0
    stamps = [event["ts"] for event in trace["traceEvents"] if event["ph"] != "M"]
    assert stamps == sorted(stamps)
    assert not stamps or stamps[0] == 0


@given(recorders())
def test_slices_of_a_track_nest(recorder):
    trace = chrome_trace(recorder)
    for pid in (ENGINE, REQUESTS):
        for track in slices(trace, pid).values():
            open_until: list[int] = []
            for event in track:
                start, end = nanoseconds(event)
                while open_until and open_until[-1] <= start and not (start == end == open_until[-1]):
                    open_until.pop()
                assert not open_until or end <= open_until[-1], event
                open_until.append(end)


@given(recorders())
def test_each_request_has_a_named_track_with_its_phases_end_to_end(recorder):
    trace, rows = chrome_trace(recorder), recorder.requests()
    names = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"]
             if e["name"] == "thread_name" and e["pid"] == REQUESTS}  # fmt: skip
    assert list(names.values()) == [row["request_id"] for row in rows]
    for track, row in enumerate(rows, start=1):
        mine = slices(trace, REQUESTS)[track]
        whole = [e for e in mine if e["name"] == row["request_id"]]
        phases = [e for e in mine if e["name"] in ("queue", "prefill", "decode")]
        expected = ["queue", "prefill", "decode"]
        reached = 1 + (row["first_scheduled"] is not None) + (row["first_token"] is not None)
        assert sorted(e["name"] for e in phases) == sorted(expected[:reached])
        assert len(whole) == 1
        phases.sort(key=lambda e: expected.index(e["name"]))
        edges = [nanoseconds(e) for e in phases]
        assert edges[0][0] == nanoseconds(whole[0])[0]
        assert edges[-1][1] == nanoseconds(whole[0])[1]
        assert all(before[1] == after[0] for before, after in zip(edges, edges[1:], strict=False))


@given(recorders())
def test_steps_tokens_preemptions_and_pages_are_all_there(recorder):
    trace = chrome_trace(recorder)["traceEvents"]
    steps = [e for e in recorder.events if isinstance(e, Stepped)]
    shown = [e for e in trace if e["ph"] == "X" and e["pid"] == ENGINE]
    shown.sort(key=lambda e: e["args"]["step"])  # steps of no length at one moment may stand in any order
    assert [e["args"]["step"] for e in shown] == [s.step for s in steps]
    assert [e["name"] for e in shown] == [s.phase for s in steps]
    pages = [e["args"]["pages used"] for e in trace if e["ph"] == "C" and e["name"] == "pages used"]
    assert pages == [s.pages_used for s in steps]
    assert sum(e["name"] == "token" for e in trace) == sum(isinstance(e, Decoded) for e in recorder.events)
    assert sum(e["name"] == "preempted" for e in trace) == sum(isinstance(e, Preempted) for e in recorder.events)


def test_times_are_microseconds_from_the_first_event():
    recorder = Recorder()
    recorder.record(Submitted(100.5, "a", arrival=100.0))
    recorder.record(Decoded(101.25, "a", "x", token_id=3))
    recorder.record(Stepped(101.5, phase="prefill", wall_seconds=0.5))
    events = chrome_trace(recorder)["traceEvents"]
    [token] = [e for e in events if e["name"] == "token"]
    [step] = [e for e in events if e["pid"] == ENGINE and e["ph"] == "X"]
    assert (token["ts"], token["args"]["text"]) == (1.25e6, "x")
    assert (step["ts"], step["dur"], step["tid"]) == (1e6, 0.5e6, STEP_TRACK)


def test_steps_never_overlap_even_where_their_wall_times_do():
    recorder = Recorder()
    for index in range(3):
        recorder.record(Stepped(10.0 + index, step=index, phase="decode", wall_seconds=1.5))
    steps = [nanoseconds(e) for e in slices(chrome_trace(recorder), ENGINE)[STEP_TRACK]]
    assert steps == [(0, 1_500_000_000), (1_500_000_000, 2_500_000_000), (2_500_000_000, 3_500_000_000)]


def test_an_empty_run_is_an_empty_trace():
    assert {e["ph"] for e in chrome_trace(Recorder())["traceEvents"]} == {"M"}


@given(recorders())
def test_prefill_chunks_lie_in_their_steps_and_are_all_there(recorder):
    trace = chrome_trace(recorder)
    steps = {e["args"]["step"]: nanoseconds(e) for e in slices(trace, ENGINE)[STEP_TRACK]}
    expected = sorted((e.step, e.tokens) for e in recorder.events if isinstance(e, Prefilled))
    chunks = [e for track in slices(trace, REQUESTS).values() for e in track if e["name"] == "chunk"]
    assert sorted((e["args"]["step"], e["args"]["tokens"]) for e in chunks) == expected
    for chunk in chunks:
        (begin, end), (first, last) = nanoseconds(chunk), steps[chunk["args"]["step"]]
        assert first <= begin <= end <= last


@given(recorders())
def test_every_decision_is_reported_with_its_reason(recorder):
    expected = Counter((e.action, e.reason) for e in recorder.events if isinstance(e, Scheduled))
    shown = [e for e in chrome_trace(recorder)["traceEvents"] if e["ph"] == "i" and e["name"] != "token"]
    assert Counter((e["name"], e["args"]["reason"]) for e in shown) == expected


def test_a_request_that_moved_is_one_track_with_the_reasons_of_both_choices():
    recorder = Recorder()
    options = (RoutingOption(1, 0, 0, 16), RoutingOption(2, 3, 40, 0))
    recorder.record(Submitted(1.0, "a", arrival=1.0))
    recorder.record(Routed(1.0, "a", replica=1, reason="fewest requests: 0", options=options))
    recorder.record(Prefilled(2.0, "a", replica=1, tokens=5, computed=5))
    recorder.record(Decoded(2.0, "a", "x", replica=1))
    recorder.record(Moved(3.0, "a", replica=2, source=1, reason="killed", generated_tokens=1))
    recorder.record(Routed(3.0, "a", replica=2, reason="fewest requests: 3", options=options[1:]))
    recorder.record(Decoded(4.0, "a", "y", replica=2, index=1))
    recorder.record(Finished(4.0, "a", reason="length", token_ids=(1, 2), output_text="xy", replica=2))
    assert [row["output_text"] for row in recorder.requests()] == ["xy"]
    instants = [e for e in chrome_trace(recorder)["traceEvents"] if e["ph"] == "i" and e["name"] != "token"]
    assert [(e["name"], e["args"]["replica"], e["args"]["reason"]) for e in instants] == [
        ("routed", 1, "fewest requests: 0"), ("moved", 2, "killed"), ("routed", 2, "fewest requests: 3"),
    ]  # fmt: skip
    assert instants[0]["args"]["replica 2"] == "3 samples, 40 tokens pending, 0 of the prompt cached"
    assert "replica 1" not in instants[2]["args"]
    assert [(row["replica"], row["chosen"]) for row in recorder.routes()] == [(1, True), (2, False), (2, True)]


def test_a_preemption_lasts_until_the_request_is_admitted_again():
    recorder = Recorder()
    recorder.record(Submitted(1.0, "a", arrival=1.0))
    recorder.record(Preempted(2.0, "a", step=1, reason="out of pages"))
    recorder.record(Scheduled(3.0, "a", step=2, action="admitted", reason="fits"))
    recorder.record(Prefilled(4.0, "a", step=2, tokens=5, computed=5))
    recorder.record(Stepped(4.5, step=2, phase="prefill", wall_seconds=2.0))
    found = {e["name"]: e for e in chrome_trace(recorder)["traceEvents"] if e["ph"] == "X"}
    assert (found["preempted"]["ts"], found["preempted"]["dur"]) == (1e6, 1e6)
    assert (found["chunk"]["ts"], found["chunk"]["dur"]) == (2e6, 1e6), "not before it was admitted"


def test_a_handover_lasts_from_the_offer_of_its_pages_until_the_other_engine_has_them():
    recorder = Recorder()
    recorder.record(Submitted(1.0, "a", arrival=1.0))
    recorder.record(Prefilled(1.5, "a", tokens=5, computed=5, replica=1))
    recorder.record(Decoded(2.0, "a", "x", token_id=3, replica=1))
    recorder.record(HandedOver(2.75, "a", source=1, replica=2, pages=5, bytes=640, seconds=0.5))
    recorder.record(Decoded(3.0, "a", "y", token_id=4, index=1, replica=2))
    recorder.record(Finished(3.0, "a", reason="length", token_ids=(3, 4)))
    trace = chrome_trace(recorder)
    [handover] = [each for each in slices(trace, REQUESTS)[1] if each["name"] == "handover"]
    assert (handover["ts"], handover["dur"]) == (1.25e6, 0.5e6)
    assert handover["args"] == {"source": 1, "replica": 2, "pages": 5, "bytes": 640}
    [track] = read_trace(trace).requests
    assert [each.name for each in track.inner] == ["handover"]
    assert [each.name for each in track.phases] == ["a", "queue", "prefill", "decode"]
