from __future__ import annotations

import subprocess
import sys
from collections import Counter
from dataclasses import asdict
from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from tests.calls import calls_of
from tests.trace.histories import recorders
from workbench.trace.events import (
    Decoded,
    Finished,
    Preempted,
    Prefilled,
    Scheduled,
    SettingsChanged,
    Stepped,
    Submitted,
)
from workbench.trace.recorder import Recorder
from workbench.trace.tracks import Tracks


@given(recorders())
def test_times_are_those_of_the_events_and_in_order(recorder):
    times = {e.time for e in recorder.events} | {e.arrival for e in recorder.events if isinstance(e, Submitted)}
    ends = {e.request_id: e for e in recorder.events if isinstance(e, Finished)}
    for row in recorder.requests():
        marks = [row[k] for k in ("arrival", "submitted", "first_scheduled", "first_token", "finished")]
        known = [mark for mark in marks if mark is not None]
        assert known == sorted(known)
        assert set(known) <= times
        end = ends.get(row["request_id"])
        assert row["finish_reason"] == (end.reason if end else None)
        assert (row["finished"] is None) == (end is None)
        assert (row["first_token"] is None) == (row["output_tokens"] == 0)


@given(recorders())
def test_tables_hold_each_event_once(recorder):
    kinds = Counter(type(event) for event in recorder.events)
    tokens, decisions, requests = recorder.tokens(), recorder.decisions(), recorder.requests()
    assert len(recorder.steps()) == kinds[Stepped] and len(tokens) == kinds[Decoded]
    assert len(decisions) == kinds[Scheduled] + kinds[Preempted]
    submitted = [e.request_id for e in recorder.events if isinstance(e, Submitted)]
    assert [row["request_id"] for row in requests] == submitted
    preempted = Counter(e.request_id for e in recorder.events if isinstance(e, Preempted))
    for row in requests:
        mine = [t for t in tokens if t["request_id"] == row["request_id"]]
        assert [(t["index"], t["token_id"]) for t in mine] == list(enumerate(row["token_ids"]))
        assert row["output_tokens"] == len(mine) == len(row["output_text"])
        assert row["first_token"] == next((t["time"] for t in mine), None)
        admitted = [d["time"] for d in decisions if (d["request_id"], d["action"]) == (row["request_id"], "admitted")]
        assert row["first_scheduled"] == next(iter(admitted), None)
        assert row["num_preemptions"] == preempted[row["request_id"]]


def test_an_unfinished_request_is_as_far_as_it_came_with_its_times_to_the_bit():
    recorder, odd = Recorder(), 1234.5678901234567  # which has no short form
    for event in (Submitted(odd, "a"), Decoded(odd + 1e-9, "a", "he", token_id=1), Decoded(3e3, "a", "y", index=1)):
        recorder.record(event)
    [row] = recorder.requests()
    assert (row["output_text"], row["finished"], row["finish_reason"]) == ("hey", None, None)
    assert row["arrival"] == odd and recorder.tokens()[0]["time"] == odd + 1e-9  # no arrival given: that of submission


def test_a_step_row_is_the_whole_step():
    recorder = Recorder()
    step = Stepped(2.0, step=3, phase="decode", requests=4, wall_seconds=0.125, compiles=2, predicted_bytes=5.0)
    recorder.record(step)
    [row] = recorder.steps()
    assert row["time"] == 2.0
    assert row == {k: v for k, v in asdict(step).items() if k not in ("request_id", "text", "sample")}


def test_samples_of_a_request_are_rows_of_their_own():
    recorder = Recorder()
    for sample in (0, 1):
        recorder.record(Submitted(1.0, "a", sample=sample, arrival=1.0))
    for number, sample in enumerate((1, 0, 1), 2):
        recorder.record(Decoded(float(number), "a", "t", sample=sample, token_id=number, index=number // 4))
    recorder.record(Finished(5.0, "a", sample=1, reason="stop", token_ids=(2, 4), output_text="tt"))
    found = [(row["sample"], row["token_ids"], row["finished"], row["first_token"]) for row in recorder.requests()]
    assert found == [(0, [3], None, 3.0), (1, [2, 4], 5.0, 2.0)]
    assert [row["sample"] for row in recorder.tokens()] == [1, 0, 1]
    assert [row["sequence"] for row in recorder.inputs()] == ["a"], "a request is one input of the scheduler"


@given(recorders(), st.data())
def test_what_ended_before_a_time_is_dropped_and_no_more(recorder, data):
    ends = [event.time for event in recorder.events if isinstance(event, (Finished, Stepped))] or [1.0]
    time = data.draw(st.sampled_from(ends))  # what ends then stays
    tracks, whole = Tracks(), Tracks()
    for event in [SettingsChanged(end) for end in ends] + recorder.events:
        tracks.record(event)
        whole.record(event)
    tracks.drop_before(time)
    kept = [each for each in whole.requests if each.row["finished"] is None or each.row["finished"] >= time]
    assert [each.row for each in tracks.requests] == [each.row for each in kept]
    assert tracks.steps == [step for step in whole.steps if step.end >= time]
    assert list(tracks.step_times) == [step.begin for step in tracks.steps]
    assert tracks.changes == [each for each in whole.changes if each.time >= time]
    assert (tracks.begin, tracks.end) == (max(whole.begin, time), whole.end)


def test_an_id_used_again_is_another_request():
    recorder = Recorder()
    for start in (1.0, 10.0):
        recorder.record(Submitted(start, "a", arrival=start))
        recorder.record(Prefilled(start + 1, "a", tokens=2, computed=2))
        recorder.record(Decoded(start + 2, "a", "t", token_id=int(start)))
        recorder.record(Finished(start + 3, "a", reason="stop", token_ids=(int(start),), output_text="t"))
    first, second = recorder.requests()
    assert (first["token_ids"], second["token_ids"]) == ([1], [10])
    assert (first["first_token"], second["first_token"]) == (3.0, 12.0)


def test_a_second_request_of_an_id_under_way_is_refused_without_harm_to_the_first():
    recorder = Recorder()
    recorder.record(Submitted(1.0, "a", arrival=1.0))
    recorder.record(Decoded(2.0, "a", "t", token_id=5))
    recorder.record(Submitted(3.0, "a", arrival=3.0))
    recorder.record(Finished(3.5, "a", reason="refused", error="already running"))
    recorder.record(Finished(4.0, "a", reason="stop", token_ids=(5,), output_text="t"))
    first, second = recorder.requests()
    assert (first["finish_reason"], first["finished"], first["token_ids"]) == ("stop", 4.0, [5])
    assert (second["finish_reason"], second["error"]) == ("refused", "already running")
    assert second["output_tokens"] == 0


def test_noting_is_one_append_however_many_events_there_are():
    """Counted in calls: tables are made where they are read."""
    recorder, event = Recorder(), Decoded(1.0, "a", token_id=1)
    for _ in range(1000):
        assert calls_of(partial(recorder.record, event)) <= 2


def test_tracing_needs_the_standard_library_only():
    code = (
        "import sys; import workbench.trace.recorder, workbench.trace.perfetto;"
        "print([m for m in ('torch', 'numpy', 'pyarrow', 'pydantic') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
