"""A timeline's bars are the events of the Perfetto export: none more, none less, wherever it is looked at."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.engine.tiny import model_of, request, runner_of, spec_of
from tests.helpers.widgets import marks
from tests.measure.runs import small_recorder, write_run
from tests.measure.small import RUN, asked
from tests.thorough import tries
from tests.trace.histories import recorders
from workbench.engine.runner_thread import RunnerThread
from workbench.errors import WorkbenchError
from workbench.measure.run import run
from workbench.runs.record import Record
from workbench.svg import Scale
from workbench.trace.events import Decoded, Event, Finished, Scheduled, Stepped, Submitted
from workbench.trace.perfetto import ENGINE, REQUESTS, chrome_trace, read_trace
from workbench.trace.recorder import Recorder
from workbench.trace.slices import Slice
from workbench.trace.tables import events_of_tables
from workbench.trace.tracks import Tracks
from workbench.widgets import Timeline
from workbench.widgets.time_axis.picture import TimeView
from workbench.widgets.timeline.data import merge_moments, merge_slices, merge_steps
from workbench.widgets.timeline.picture import LEFT, RIGHT, WIDTH, draw_timeline

CLASSES = {"queue": "qu", "prefill": "pf", "decode": "de", "preempted": "sb", "chunk": "ch"}
SHARES = st.lists(st.integers(0, 1000).map(lambda n: n / 1000), min_size=2, max_size=2).map(sorted)


def tracks_of(recorder: Recorder) -> Tracks:
    tracks = Tracks()
    for event in recorder.events:
        tracks.record(event)
    return tracks


@given(recorders(), SHARES, st.lists(st.integers(0, 1000), max_size=3))
def test_no_bar_is_lost_where_neighbours_are_drawn_as_one(
    recorder: Recorder, shares: list[float], other_engines: list[int]
) -> None:
    """See tests/trace/test_perfetto.py for the slices themselves: its export is made of the same tracks."""
    tracks = tracks_of(recorder)
    assume(tracks.steps)
    for replica, length in enumerate(other_engines, 1):  # steps that end last
        seconds = length / 1e3 * (tracks.end - tracks.begin)
        tracks.record(Stepped(tracks.end, step=20 + replica, replica=replica, wall_seconds=seconds))
    assert list(tracks.step_times) == [step.begin for step in tracks.steps] == sorted(tracks.step_times)
    low, high = (share * (tracks.end - tracks.begin) * 1e3 for share in shares)
    across = Scale(tracks.begin + low / 1e3, tracks.begin + max(high, low + 1e-3) / 1e3, LEFT, WIDTH - RIGHT)

    def in_sight(slices: list[Slice]) -> list[Slice]:
        return [s for s in slices if s.end >= across.low and s.begin <= across.high]

    for track in tracks.requests:
        for name in CLASSES:
            mine = [s for s in (*tracks.phases(track)[1:], *tracks.inner(track)) if s.name == name]
            assert [s for bar in merge_slices(mine, across) for s in bar.slices] == in_sight(mine)
        moments = [moment for moment in track.moments if across.low <= moment.time <= across.high]
        assert sum(len(found) for _, found in merge_moments(track.moments, across)) == len(moments)
    assert [s for bar in merge_steps(tracks, across) for s in bar.slices] == in_sight(tracks.steps)


def flat(tracks: Tracks, begin: float) -> tuple[list[Any], list[float]]:
    """Return what tracks say, and their times from `begin` on."""
    said, times = [[s.args for s in sorted(tracks.steps, key=lambda s: s.args["step"])]], list[float]()
    for track in tracks.requests:
        slices = sorted((*tracks.phases(track), *tracks.inner(track)), key=lambda s: (s.name, s.begin, -s.end))
        said += [[(s.name, s.args) for s in slices], [m.args for m in track.moments]]
        times += [each - begin for each in (*(s.end for s in slices), *track.token_times)]
    return said, times


@given(recorders())
@settings(max_examples=tries(40))
def test_a_trace_that_was_written_is_read_as_it_was(recorder: Recorder) -> None:
    tracks = tracks_of(recorder)
    (said, times), (read, read_times) = flat(tracks, tracks.begin), flat(read_trace(chrome_trace(recorder)), 0.0)
    assert read == said and read_times == pytest.approx(times, abs=2e-9)


def test_a_runner_is_followed_and_its_decisions_are_shown() -> None:
    runner = runner_of(model_of(spec_of()), pages=9)
    heard: list[Event] = []
    live = RunnerThread.attach(runner)
    live.listen(heard.append)
    view = Timeline(runner)
    assert not view.tracks.requests and view.follow
    assert live.submit([request(f"r<{n}>", 9, 14) for n in range(4)]).wait()
    view.throttle.flush()
    again, picture = Timeline(heard), view.picture()
    assert picture == again.picture() and not again.follow and view.visible == (0.0, view.length) and view.length > 0
    assert all(words in picture for words in ("is preempted", "prefill chunk of", "not admitted"))
    rows = [each["data-key"] for each in marks(picture, "data-row")]
    assert rows[1:] == [f"@{n}" for n in range(4)], "up and down go from row to row"
    number = next(n for n, track in enumerate(view.tracks.requests) if track.row["num_preemptions"])
    view.shown.picked = f"@{number}"
    assert view.chosen == number and f"Decisions on r&lt;{number}&gt;" in view.picture()
    half = view.length / 2
    view.window = (0.0, half)
    assert live.submit([request("later", 5, 5)]).wait()
    view.throttle.flush()
    assert not view.follow and view.visible == (0.0, half), "who looks back is not carried off"
    view.close()
    assert live.submit([request("unheard", 5, 5)]).wait()
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
        low, high = view.visible
        assert 0 <= low < high <= view.length + 1e-6
    view.close()


@given(st.just(0.0) | st.floats(0.0, 1e5), st.floats(5e-5, 1e4), st.sampled_from([480.0, 631.0, WIDTH]))
@settings(max_examples=tries(50))
def test_labels_of_the_axis_are_their_times_and_end_within_the_picture(low: float, span: float, width: float) -> None:
    """However long a run was and however close it is looked at, in letters as wide as DejaVu's: 7 pixels."""
    view = TimeView(low, low + span)
    across, picture = view.across(LEFT, width - RIGHT), draw_timeline(Tracks(), view, width=width)
    labels = re.findall(r'x1="([\d.]+)"[^>]*/><text x="([\d.]+)"[^>]*>([\d.]+) (m?s)<', picture)
    assert labels and max(float(middle) + 3.5 * len(label + unit) for _, middle, label, unit in labels) <= width
    for x, _, label, unit in labels:
        assert across(float(label) / (1e3 if unit == "ms" else 1.0)) == pytest.approx(float(x), abs=0.1)


def test_many_requests_are_scrolled_and_those_out_of_sight_left_out() -> None:
    view = Timeline(some(100))
    picture = view.picture()
    assert picture.startswith("<div") and 'data-scroll="rows"' in picture and "text/html" in view._repr_mimebundle_()
    assert len(re.findall(r'data-key="@\d+"', picture)) == 100
    view.window = (10.0, 12.7)
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
    changes = "variants={dense: {}, int8: {cache.format: int8}}", "measure.rounds=2", "workload.requests=2"
    experiment = asked(RUN, "workload={kind: random, prompt_tokens: 8, output_tokens: 3}", *changes)
    record = run(experiment, tmp_path, "formats", progress=False)
    view = Timeline(record)
    names = [track.row["request_id"] for track in view.tracks.requests]
    assert len(set(names)) == len(names) == 8 and names[0] == "dense, round 1: request-0"
    assert len(view.tracks.steps) == record.steps.num_rows
    for track in view.tracks.requests:
        assert [each.name for each in view.tracks.phases(track)][1:] == ["queue", "prefill", "decode"]
        assert len(track.tokens) == 3
    assert "dense, round 1" in view.picture() and "int8, round 2" in view.picture()
    for shown in (record._repr_html_(), str(record)):
        assert all(words in shown for words in ("dense", "int8", "ttft_s_p50", "kv_bytes_peak", " KiB"))
        assert re.search(r"\d m?s\b", shown), "a busy machine's is seconds"
    (record.path / "steps.parquet").unlink()
    with pytest.raises(WorkbenchError, match=r"holds neither trace\.json nor the tables"):
        Timeline(Record.open(record.path, incomplete_ok=True))
