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


def recorded(*events):
    recorder = Recorder()
    for event in events:
        recorder.record(event)
    return recorder


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
    trace, rows, order = chrome_trace(recorder), recorder.requests(), ("queue", "prefill", "decode")
    names = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"]
             if e["name"] == "thread_name" and e["pid"] == REQUESTS}  # fmt: skip
    assert list(names.values()) == [row["request_id"] for row in rows]
    for track, row in enumerate(rows, start=1):
        found = {e["name"]: nanoseconds(e) for e in slices(trace, REQUESTS)[track]}
        reached = order[: 1 + (row["first_scheduled"] is not None) + (row["first_token"] is not None)]
        assert found.keys() & set(order) == set(reached)
        edges, whole = [found[name] for name in reached], found[row["request_id"]]
        assert (edges[0][0], edges[-1][1]) == whole
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
    events = chrome_trace(recorded(
        Submitted(100.5, "a", arrival=100.0), Decoded(101.25, "a", "x", token_id=3),
        Stepped(101.5, phase="prefill", wall_seconds=0.5),
    ))["traceEvents"]  # fmt: skip
    [token] = [e for e in events if e["name"] == "token"]
    [step] = [e for e in events if e["pid"] == ENGINE and e["ph"] == "X"]
    assert (token["ts"], token["args"]["text"]) == (1.25e6, "x")
    assert (step["ts"], step["dur"], step["tid"]) == (1e6, 0.5e6, STEP_TRACK)


def test_steps_never_overlap_even_where_their_wall_times_do():
    each = (Stepped(10.0 + index, step=index, phase="decode", wall_seconds=1.5) for index in range(3))
    steps = [nanoseconds(e) for e in slices(chrome_trace(recorded(*each)), ENGINE)[STEP_TRACK]]
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
    options = (RoutingOption(1, 0, 0, 16), RoutingOption(2, 3, 40, 0))
    recorder = recorded(
        Submitted(1.0, "a", arrival=1.0), Routed(1.0, "a", replica=1, reason="fewest requests: 0", options=options),
        Prefilled(2.0, "a", replica=1, tokens=5, computed=5), Decoded(2.0, "a", "x", replica=1),
        Moved(3.0, "a", replica=2, source=1, reason="killed", generated_tokens=1),
        Routed(3.0, "a", replica=2, reason="fewest requests: 3", options=options[1:]),
        Decoded(4.0, "a", "y", replica=2, index=1),
        Finished(4.0, "a", reason="length", token_ids=(1, 2), output_text="xy", replica=2),
    )  # fmt: skip
    assert [row["output_text"] for row in recorder.requests()] == ["xy"]
    instants = [e for e in chrome_trace(recorder)["traceEvents"] if e["ph"] == "i" and e["name"] != "token"]
    assert [(e["name"], e["args"]["replica"], e["args"]["reason"]) for e in instants] == [
        ("routed", 1, "fewest requests: 0"), ("moved", 2, "killed"), ("routed", 2, "fewest requests: 3"),
    ]  # fmt: skip
    assert instants[0]["args"]["replica 2"] == "3 samples, 40 tokens pending, 0 of the prompt cached"
    assert "replica 1" not in instants[2]["args"]
    assert [(row["replica"], row["chosen"]) for row in recorder.routes()] == [(1, True), (2, False), (2, True)]


def test_a_preemption_lasts_until_the_request_is_admitted_again():
    trace = chrome_trace(recorded(
        Submitted(1.0, "a", arrival=1.0), Preempted(2.0, "a", step=1, reason="out of pages"),
        Scheduled(3.0, "a", step=2, action="admitted", reason="fits"),
        Prefilled(4.0, "a", step=2, tokens=5, computed=5), Stepped(4.5, step=2, phase="prefill", wall_seconds=2.0),
    ))  # fmt: skip
    found = {e["name"]: (e["ts"], e["dur"]) for e in trace["traceEvents"] if e["ph"] == "X"}
    assert found["preempted"] == (1e6, 1e6) and found["chunk"] == (2e6, 1e6), "not before it was admitted"


def test_a_handover_lasts_from_the_offer_of_its_pages_until_the_other_engine_has_them():
    trace = chrome_trace(recorded(
        Submitted(1.0, "a", arrival=1.0), Prefilled(1.5, "a", tokens=5, computed=5, replica=1),
        Decoded(2.0, "a", "x", token_id=3, replica=1),
        HandedOver(2.75, "a", source=1, replica=2, pages=5, bytes=640, seconds=0.5),
        Decoded(3.0, "a", "y", token_id=4, index=1, replica=2), Finished(3.0, "a", reason="length", token_ids=(3, 4)),
    ))  # fmt: skip
    [handover] = [each for each in slices(trace, REQUESTS)[1] if each["name"] == "handover"]
    assert (handover["ts"], handover["dur"]) == (1.25e6, 0.5e6)
    assert handover["args"] == {"source": 1, "replica": 2, "pages": 5, "bytes": 640}
    [track] = read_trace(trace).requests
    assert [each.name for each in track.inner] == ["handover"]
    assert [each.name for each in track.phases] == ["a", "queue", "prefill", "decode"]