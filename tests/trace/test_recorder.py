from __future__ import annotations

import subprocess
import sys
from collections import Counter
from dataclasses import asdict
from functools import partial

from hypothesis import given

from tests.calls import calls_of
from tests.trace.histories import recorders
from workbench.trace.events import Decoded, Finished, Preempted, Prefilled, Scheduled, Stepped, Submitted
from workbench.trace.recorder import Recorder


@given(recorders())
def test_every_request_once_with_all_that_happened_to_it(recorder):
    rows = {row["request_id"]: row for row in recorder.requests()}
    submitted = [e.request_id for e in recorder.events if isinstance(e, Submitted)]
    assert [row["request_id"] for row in recorder.requests()] == submitted
    num_preemptions = Counter(e.request_id for e in recorder.events if isinstance(e, Preempted))
    tokens = Counter(e.request_id for e in recorder.events if isinstance(e, Decoded))
    for name, row in rows.items():
        assert row["num_preemptions"] == num_preemptions[name]
        assert row["output_tokens"] == len(row["token_ids"]) == tokens[name]
        assert row["output_text"] == "x" * tokens[name]


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
    assert len(recorder.steps()) == kinds[Stepped]
    assert len(recorder.tokens()) == kinds[Decoded]
    assert len(recorder.decisions()) == kinds[Scheduled] + kinds[Preempted]
    for row in recorder.requests():
        mine = [t for t in recorder.tokens() if t["request_id"] == row["request_id"]]
        assert row["first_token"] == next((t["time"] for t in mine), None)
        admitted = [d for d in recorder.decisions() if d["request_id"] == row["request_id"]]
        assert row["first_scheduled"] == next((d["time"] for d in admitted if d["action"] == "admitted"), None)
        assert [t["index"] for t in mine] == list(range(row["output_tokens"]))
        assert [t["token_id"] for t in mine] == row["token_ids"]


def test_a_step_row_is_the_whole_step():
    recorder = Recorder()
    step = Stepped(2.0, step=3, phase="decode", requests=4, wall_seconds=0.125, compiles=2, predicted_bytes=5.0)
    recorder.record(step)
    [row] = recorder.steps()
    assert row["time"] == 2.0
    assert row == {k: v for k, v in asdict(step).items() if k not in ("request_id", "text", "sample")}


def test_a_time_that_has_no_short_form_stays_as_it_is():
    recorder, odd = Recorder(), 1234.5678901234567
    recorder.record(Submitted(odd, "a"))
    recorder.record(Decoded(odd + 1e-9, "a", token_id=1))
    assert recorder.requests()[0]["arrival"] == odd  # no arrival given: that of submission
    assert recorder.tokens()[0]["time"] == odd + 1e-9


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


def test_text_of_an_unfinished_request_is_what_was_shown_so_far():
    recorder = Recorder()
    recorder.record(Submitted(1.0, "a"))
    recorder.record(Decoded(2.0, "a", "he", token_id=1))
    recorder.record(Decoded(3.0, "a", "y", token_id=2, index=1))
    [row] = recorder.requests()
    assert (row["output_text"], row["finished"], row["finish_reason"]) == ("hey", None, None)


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
