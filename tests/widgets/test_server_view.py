"""The picture of a server: every request in sight once, figures as numpy has them, the same from a saved snapshot."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.widgets import marks, root_of, words
from tests.serve.watch.logs import log_of
from tests.thorough import tries
from tests.trace.histories import recorders
from tests.widgets.canned import is_golden, small_log
from workbench.serve.watch.serving_log import ServingLog
from workbench.serve.watch.snapshot import (
    Meter,
    RequestStatus,
    RequestTrace,
    ServerSnapshot,
    TracedDecision,
    TracedToken,
)
from workbench.trace.events import Decoded
from workbench.trace.recorder import Recorder, row_name
from workbench.units import format_duration
from workbench.widgets import ServerView
from workbench.widgets.server.data import SpanAxis, phases_of, token_delays, visible_requests
from workbench.widgets.server.picture import draw_server

EVERYTHING = float("inf")


def server_of(log: ServingLog) -> SimpleNamespace:
    return SimpleNamespace(url="http://127.0.0.1:1", log=log)


@given(recorders(most=6), st.sampled_from((0.5, 10.0, EVERYTHING)))
@settings(max_examples=tries(60))
def test_every_request_in_sight_is_drawn_once_and_no_other(recorder: Recorder, seconds: float) -> None:
    snapshot = log_of(recorder.events).snapshot()
    axis = SpanAxis.over(snapshot, seconds)
    wanted = sorted(
        f"@{row_name(row)}" for row in recorder.requests() if row["finished"] is None or row["finished"] >= axis.low
    )
    assert seconds != EVERYTHING or len(wanted) == len(recorder.requests())
    picture = draw_server(snapshot, seconds)
    assert sorted(each["data-key"] for each in marks(picture)) == wanted
    hidden = len(snapshot.recent) - len(wanted)
    assert (f"{hidden} earlier ones are not in sight" in words(picture)) == bool(hidden)


@given(recorders(most=6))
@settings(max_examples=tries(60))
def test_phases_cover_a_request_from_its_arrival_to_its_end(recorder: Recorder) -> None:
    snapshot = log_of(recorder.events).snapshot()
    for request in snapshot.recent:
        phases = [phase for phase in phases_of(request, snapshot.time) if phase.name != "preempted"]
        assert phases[0].begin == request.arrival
        assert phases[-1].end == (snapshot.time if request.ended is None else request.ended)
        assert all(one.end == other.begin for one, other in zip(phases, phases[1:], strict=False))
        assert ("decode" in [phase.name for phase in phases]) == (request.first_token is not None)
    times = [each.arrival for each in visible_requests(snapshot, SpanAxis.over(snapshot, EVERYTHING))]
    assert times == sorted(times, reverse=True)


def test_pictures_of_a_server_and_of_a_chosen_request() -> None:
    log = small_log()
    snapshot, trace = log.snapshot(), log.trace("a")
    assert trace is not None
    assert [each.seconds for each in token_delays(snapshot.recent[0], trace)] == [1.0, 0.5, 2.0]
    assert is_golden("server", draw_server(snapshot))
    assert is_golden("server-request", draw_server(snapshot, chosen="a", trace=trace))
    assert "No token and no decision" in draw_server(snapshot, chosen="a")
    assert draw_server(snapshot, chosen="gone") == draw_server(snapshot)
    assert [format_duration(each) for each in (1.5, 59.7, 3599, 7260)] == ["1.5 s", "1:00 min", "59:59 min", "2:01 h"]


def test_state_is_never_colour_alone() -> None:
    states = ("cancelled", "failed", "finished", "waiting", "decode")
    requests = tuple(RequestStatus(state, state, 1.0, 2.0, 3.0, 4.0, 4.0) for state in states)
    rows = draw_server(ServerSnapshot(5.0, recent=requests)).split("requests over time")[1]
    assert rows.count('class="mark"') == 2, "a cross and an exclamation mark"


def test_a_view_follows_a_server_until_it_is_closed() -> None:
    log = small_log()
    view = ServerView(server_of(log))
    view._pick("@a")
    view.throttle.flush()
    assert view.chosen == "a" and "500 ms, step 1: admitted" in view.shown.content
    view._pick("@a")
    assert view.chosen == ""
    log.record(Decoded(14.5, "b<i>", "x", step=4))
    view.throttle.flush()
    assert view.snapshot.requests["decode"] == 1 and "1 decode" in view.shown.content
    view.close()
    before = view.shown.content
    log.record(Decoded(14.6, "b<i>", "y", step=5))
    view.redraw()
    assert view.shown.content == before and not log._watchers
    assert view.throttle._later is None


def test_a_saved_view_shows_the_same_picture(tmp_path: Path) -> None:
    log = small_log()
    live = ServerView(server_of(log))
    path = live.save(tmp_path / "server.json")
    saved, again = ServerView(path), ServerView(ServerSnapshot.load(path))
    live.chosen = saved.chosen = "a"
    assert saved.picture() == live.picture().replace("http://127.0.0.1:1   ", "") and saved._leave is None
    assert replace(again.snapshot, wall_time=0.0, traces={}) == replace(live.snapshot, wall_time=0.0)
    for view in (live, saved, again):
        view.close()


def test_whatever_a_request_says_is_text_and_times_before_dropped_tokens_are_unknown() -> None:
    said = RequestStatus("<i>a", "failed", 1.0, 2.0, 3.0, 4.0, 4.0, 9, 0, 5, "<u>", "<s>")
    decision = TracedDecision(2.0, 1, "<q>", "<b>")
    trace = RequestTrace((TracedToken(3.5, 7, "<p>", 1), TracedToken(4.0, 8, "", 2)), (decision,), 3)
    snapshot = ServerSnapshot(5.0, model="<m>", recent=(said,), meters=(Meter("<k>", 1, 2, "<z>"),))
    picture = draw_server(snapshot, chosen=said.id, trace=trace, address="<a>")
    tags = {each.tag.rpartition("}")[2] for each in root_of(picture).iter()}
    assert not tags & {"i", "u", "s", "q", "b", "p", "m", "k", "z", "a"}
    assert [each.seconds for each in token_delays(said, trace)] == [0.0, 0.5], "three tokens before were dropped"
    assert [each.index for each in token_delays(said, trace)] == [3, 4]
