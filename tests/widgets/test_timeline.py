"""A timeline's bars are the events of the Perfetto export: none more, none less, wherever it is looked at."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.engine.tiny import model_of, request, runner_of, spec_of
from tests.helpers.widgets import marks
from tests.measure.runs import small_recorder, write_run
from tests.thorough import tries
from tests.trace.histories import recorders
from workbench.engine.runner_thread import RunnerThread
from workbench.errors import WorkbenchError
from workbench.experiment.experiment import Experiment
from workbench.measure.run import run
from workbench.runs.record import Record
from workbench.svg import Scale
from workbench.trace.events import Decoded, Event, Finished, Scheduled, Stepped, Submitted
from workbench.trace.perfetto import ENGINE, REQUESTS, chrome_trace, read_trace
from workbench.trace.recorder import Recorder
from workbench.trace.tables import events_of_tables
from workbench.trace.tracks import Tracks
from workbench.widgets import Timeline
from workbench.widgets.timeline.data import merge_moments, merge_slices, merge_steps
from workbench.widgets.timeline.picture import LEFT, RIGHT, WIDTH, draw_timeline

CLASSES = {"queue": "qu", "prefill": "pf", "decode": "de", "preempted": "sb", "chunk": "ch"}
SHARES = st.lists(st.integers(0, 1000).map(lambda n: n / 1000), min_size=2, max_size=2).map(sorted)


def tracks_of(recorder: Recorder) -> Tracks:
    tracks = Tracks()
    for event in recorder.events:
        tracks.record(event)
    return tracks


def slices(recorder: Recorder) -> dict[tuple[int, str], list[dict]]:
    """Return Perfetto's slices, but for those of whole requests, by track (0 for steps) and name."""
    found = defaultdict(list)
    for event in chrome_trace(recorder)["traceEvents"]:
        if event["ph"] == "X" and event["pid"] == ENGINE:
            found[0, "step"].append(event)
        elif event["ph"] == "X" and event["name"] in CLASSES:
            found[event["tid"], event["name"]].append(event)
    return found


@given(recorders(), SHARES)
def test_no_bar_is_lost_where_neighbours_are_drawn_as_one(recorder: Recorder, shares: list[float]) -> None:
    tracks, exported = tracks_of(recorder), slices(recorder)
    assume(tracks.steps)
    begin, length = tracks.begin, tracks.end - tracks.begin
    low, high = (share * length * 1e3 for share in shares)
    across = Scale(begin + low / 1e3, begin + max(high, low + 1e-3) / 1e3, LEFT, WIDTH - RIGHT)
    bars: list[tuple[str, float, float]] = []
    for number, track in enumerate(tracks.requests, start=1):
        for name in CLASSES:
            mine = [s for s in (*tracks.phases(track)[1:], *tracks.inner(track)) if s.name == name]
            merged = list(merge_slices(mine, across))
            bars += [(CLASSES[name], bar.x, max(bar.wide, 0.8)) for bar in merged]
            shown = [s for bar in merged for s in bar.slices]
            assert shown == [s for s in mine if s.end >= across.low and s.begin <= across.high]
            assert [(e["ts"], e["args"]) for e in exported[number, name]] == [
                (pytest.approx((s.begin - begin) * 1e6, abs=2e-3), s.args) for s in sorted(mine, key=lambda s: s.begin)
            ]
        assert sum(len(found) for _, found in merge_moments(track.moments, across)) == sum(
            across.low <= moment.time <= across.high for moment in track.moments
        )
    found = marks(draw_timeline(tracks, low, high), "data-tip")
    drawn = [(each["class"].split()[0], float(each["x"]), float(each["width"])) for each in found if "width" in each]
    for css in CLASSES.values():
        ours, theirs = (sorted(each[1:] for each in some if each[0] == css) for some in (bars, drawn))
        assert np.array(theirs) == pytest.approx(np.array(ours), abs=0.02), "drawn where their times are"
    shown = [s for bar in merge_steps(tracks, across) for s in bar.slices]
    assert shown == [s for s in tracks.steps if s.end >= across.low and s.begin <= across.high]
    expected = sorted((event["args"] for event in exported[0, "step"]), key=lambda args: args["step"])
    assert [s.args for s in tracks.steps] == expected


@given(recorders())
@settings(max_examples=tries(40))
def test_a_trace_that_was_written_is_read_as_it_was(recorder: Recorder) -> None:
    tracks, read = tracks_of(recorder), read_trace(chrome_trace(recorder))
    assert len(read.requests) == len(tracks.requests)
    for mine, its in zip(tracks.requests, read.requests, strict=True):
        for kind in ("phases", "inner"):
            ours, theirs = (sorted(getattr(t, kind)(r), key=lambda s: (s.name, s.begin, -s.end))
                            for t, r in ((tracks, mine), (read, its)))  # fmt: skip
            assert [(s.name, s.args) for s in ours] == [(s.name, s.args) for s in theirs]
            assert [s.end - tracks.begin for s in ours] == pytest.approx([s.end for s in theirs], abs=2e-9)
        assert [m.args for m in mine.moments] == [m.args for m in its.moments]
        assert list(its.token_times) == pytest.approx([t - tracks.begin for t in mine.token_times], abs=2e-9)
    assert [s.args for s in tracks.steps] == [s.args for s in sorted(read.steps, key=lambda s: s.args["step"])]


def test_a_runner_is_followed_and_its_decisions_are_shown() -> None:
    runner = runner_of(model_of(spec_of()), pages=9)
    heard: list[Event] = []
    RunnerThread.attach(runner).listen(heard.append)
    view = Timeline(runner)
    assert "Timeline of 0 requests" in view.picture() and view.follow
    assert RunnerThread.attach(runner).submit([request(f"r<{n}>", 9, 14) for n in range(4)]).wait()
    view.throttle.flush()
    again = Timeline(heard)
    assert view.picture() == again.picture() == view._repr_mimebundle_()["image/svg+xml"]
    assert not again.follow and view.window == (0.0, view.length) and view.length > 0
    picture = view.picture()
    assert "is preempted" in picture and "prefill chunk of" in picture and "not admitted" in picture
    keys = [each["data-key"] for each in marks(picture, "data-tip")]  # without one the keyboard never comes by
    assert len(set(keys)) == len(keys) and {key.split(":")[0] for key in keys} >= {"step", "@1", "ch", "de", "sb"}
    rows = [each["data-key"] for each in marks(picture, "data-row")]
    assert rows == [keys[0], *(f"@{n}" for n in range(4))], "up and down go from row to row"
    number = next(n for n, track in enumerate(view.tracks.requests) if track.row["num_preemptions"])
    view.shown.picked = f"@{number}"
    assert view.chosen == number and f"Decisions on r&lt;{number}&gt;" in view.picture()
    view.window = (0.0, view.length / 2)
    assert not view.follow, "who looks back is not carried off"
    assert RunnerThread.attach(runner).submit([request("later", 5, 5)]).wait()
    view.throttle.flush()
    assert view.window[1] == pytest.approx(again.length / 2) and len(view.tracks.requests) == 5
    view.close()
    assert RunnerThread.attach(runner).submit([request("unheard", 5, 5)]).wait()
    assert len(view.tracks.requests) == 5


def some(count: int) -> list[Event]:
    events: list[Event] = []
    for n in range(count):
        events += [Submitted(n, f"r{n}", arrival=float(n)), Stepped(n + 0.5, step=n, wall_seconds=0.4)]
        events.append(Finished(n + 0.6, f"r{n}", reason="length"))
    return events


@given(st.lists(st.tuples(st.sampled_from([0.5, 2.0, 1.0]), st.sampled_from([-0.5, 0.0, 0.5])), max_size=12))
@settings(max_examples=tries(20))
def test_what_is_seen_stays_within_the_run(moves: list[tuple[float, float]]) -> None:
    view = Timeline(some(3))
    for factor, by in moves:
        view.zoom(factor, by)
        low, high = view.window
        assert 0 <= low < high <= view.length + 1e-6
    view.close()


def test_many_requests_are_scrolled_and_those_out_of_sight_left_out() -> None:
    view = Timeline(some(100))
    picture = view.picture()
    assert picture.startswith("<div") and 'data-scroll="rows"' in picture and "text/html" in view._repr_mimebundle_()
    assert len(re.findall(r'data-key="@\d+"', picture)) == 100
    view.window = (10_000.0, 12_700.0)
    assert set(re.findall(r'data-key="@(\d+)"', view.picture())) == {"10", "11", "12"}
    assert "3 of 100 requests" in view.picture()
    view.close()


def test_a_record_is_shown_from_its_trace(tmp_path: Path) -> None:
    record = Record.open(write_run(tmp_path, small_recorder()))
    view, exported = Timeline(record), record.read_json("trace.json")["traceEvents"]
    requests = [e for e in exported if e["name"] == "thread_name" and e["pid"] == REQUESTS]
    assert requests and len(view.tracks.requests) == len(requests)
    assert len(view.tracks.steps) == sum(e["ph"] == "X" and e["pid"] == ENGINE for e in exported)
    assert 'class="de"' in view.picture()
    view.close()


@settings(max_examples=tries(50))
@given(recorders())
def test_tables_give_the_bars_that_the_events_give(recorder: Recorder) -> None:
    events: list[Event] = [
        e for e in recorder.events if isinstance(e, Submitted | Scheduled | Decoded | Finished | Stepped)
    ]
    events = [e for e in events if not isinstance(e, Scheduled) or e.action == "admitted"]
    kept = Recorder()
    kept.events = events
    tables = kept.requests(), kept.tokens(), kept.steps()
    read = Recorder()
    read.events = events_of_tables(*tables)
    for row in (*tables[0], *(found := read.requests())):
        row.pop("output_text")  # a token's own text is in no table
    assert (found, read.tokens(), read.steps()) == tables


def test_a_comparison_of_variants_is_shown_from_its_tables(tmp_path: Path) -> None:
    experiment = Experiment.from_yaml("""
    question: What does a smaller cache cost?
    backend: eager
    workload: {kind: random, requests: 2, prompt_tokens: 8, output_tokens: 3}
    measure: {warmup: 0, rounds: 2, ceilings: false}
    variants: {dense: {}, int8: {cache.format: int8}}
    """)
    record = run(experiment, tmp_path, "formats")
    view = Timeline(record)
    names = [track.row["request_id"] for track in view.tracks.requests]
    assert len(names) == 8 == len(set(names)) and names[0] == "dense, round 1: request-0"
    assert len(view.tracks.steps) == record.steps.num_rows
    assert all([each.name for each in view.tracks.phases(track)][1:] == ["queue", "prefill", "decode"]
               and len(track.tokens) == 3 for track in view.tracks.requests)  # fmt: skip
    assert "dense, round 1" in view.picture() and "int8, round 2" in view.picture()
    view.close()
    for shown in (record._repr_html_(), str(record)):
        for words in ("dense", "int8", "ttft_s_p50", " ms", "kv_bytes_peak", " KiB"):
            assert words in shown
    (record.path / "steps.parquet").unlink()
    with pytest.raises(WorkbenchError, match=r"holds neither trace\.json nor the tables"):
        Timeline(Record.open(record.path, incomplete_ok=True))
