"""The picture of a server: every request in sight once, figures as numpy has them, the same from a saved snapshot."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.widgets import marks, root_of, words
from tests.serve.watch.logs import log_of
from tests.thorough import tries
from tests.trace.histories import recorders
from workbench.serve.watch.serving_log import ServingLog
from workbench.serve.watch.snapshot import Meter, PageUse, RequestStatus, ServerSnapshot
from workbench.svg import PICTURE_WIDTH, Scale
from workbench.trace.events import Decoded, Finished, Prefilled, Scheduled, Submitted
from workbench.trace.recorder import Recorder, row_name
from workbench.widgets import ServerView
from workbench.widgets.server.data import SpanAxis, format_duration, phases_of, token_delays, visible_requests
from workbench.widgets.server.picture import LEFT, RIGHT, draw_server

EVERYTHING = float("inf")
METERS = (Meter("alice: tokens a minute", 60, 60, "tokens", 90.0), Meter("alice: money today", 0.25, 1, "USD"))


def server_of(log: ServingLog) -> SimpleNamespace:
    return SimpleNamespace(url="http://127.0.0.1:1", log=log)


def small_log() -> ServingLog:
    """Two requests: one that finished, with three tokens, and one that waits."""
    events = [
        Submitted(10.0, "a", prompt_tokens=40, tenant="alice"),
        Scheduled(10.5, "a", step=1, action="admitted", reason="fits"),
        Prefilled(11.0, "a", step=1, tokens=24, computed=40), Decoded(11.0, "a", "<b>", step=1, token_id=7),
        Decoded(11.5, "a", "\n", step=2, token_id=8, index=1), Decoded(13.5, "a", "", step=3, token_id=9, index=2),
        Finished(13.5, "a", reason="length", token_ids=(7, 8, 9), prompt_tokens=40),
        Submitted(14.0, "b<i>", prompt_tokens=9),
    ]  # fmt: skip
    log = log_of(events, 15.0)
    log._pages, log._meters = lambda: PageUse(2, 3, 5), lambda: METERS
    return log


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


@given(recorders(most=6))
@settings(max_examples=tries(40))
def test_bars_stand_where_their_phases_are(recorder: Recorder) -> None:
    snapshot = log_of(recorder.events).snapshot()
    axis = SpanAxis.over(snapshot, EVERYTHING)
    across = Scale(axis.low, axis.high, LEFT, PICTURE_WIDTH - RIGHT)
    phases = [phase for request in snapshot.recent for phase in phases_of(request, snapshot.time)]
    wanted = [across(max(each.begin, axis.low)) for each in phases if axis.low <= each.end and each.begin <= axis.high]
    bars = [each for each in marks(draw_server(snapshot, EVERYTHING), "class") if each["class"].endswith(" ph")]
    assert sorted(float(bar["x"]) for bar in bars) == pytest.approx(sorted(wanted), abs=0.11)
    assert all(float(bar["x"]) + float(bar["width"]) <= PICTURE_WIDTH - RIGHT + 0.9 for bar in bars)


def test_figures_limits_and_the_sentence_in_place_of_the_picture() -> None:
    root = root_of(picture := draw_server(small_log().snapshot()))
    shown = words(picture)
    title = next(each.text for each in root.iter() if each.tag.endswith("title"))
    assert title is not None and title.startswith("Server m: 1 waiting, 1 finished; ")
    assert "TTFT 1 s at the median; 2 of 10 pages in use" in title
    assert "1 waiting" in shown and "1 finished" in shown and "0 failed" in shown
    assert "40 %: 16 of 40" in shown and "2 used, 3 idle (cached), 5 free" in shown
    assert "60 of 60 tokens, free in 1:30 min" in shown and "0.25 of 1 USD" in shown
    assert len([each for each in root.iter() if each.get("class") == "over"]) == 1, "what is used up is red"
    assert [format_duration(each) for each in (1.5, 59.7, 3599, 7260)] == ["1.5 s", "1:00 min", "59:59 min", "2:01 h"]


def test_the_trace_of_a_chosen_request() -> None:
    log = small_log()
    snapshot, trace = log.snapshot(), log.trace("a")
    assert trace is not None
    assert [each.seconds for each in token_delays(snapshot.recent[0], trace)] == [1.0, 0.5, 2.0]
    root = root_of(picture := draw_server(snapshot, chosen="a", trace=trace))
    shown = words(picture)
    assert "a: finished, 3.5 s · of alice · 40 prompt tokens, 16 of them cached, 3 output tokens" in shown
    assert "500 ms, step 1: admitted: fits" in shown and "1 s, step 1: prefilled: 24 tokens" in shown
    text = next(each for each in root.iter() if each.get("class") == "wb-answer")
    assert [each.text for each in text] == ["<b>", "↵\n", "·"]
    assert "token 3, id 9, in step 3: 2 s after the one before, at 3.5 s" in text[2].attrib["data-tip"]
    assert len([each for each in root.iter() if each.get("class", "").endswith(" tok")]) == 2
    assert "No token and no decision" in draw_server(snapshot, chosen="a")
    assert draw_server(snapshot, chosen="gone") == draw_server(snapshot)


def test_colours_come_from_the_page_and_state_is_never_colour_alone() -> None:
    """Text and outlines take the page's colour, in both themes; each state has a shape of its own."""
    log = small_log()
    picture = draw_server(log.snapshot(), chosen="a", trace=log.trace("a"))
    for each in root_of(picture).iter():
        if each.tag.endswith("text"):
            assert "fill" not in each.attrib and "style" not in each.attrib
    assert "color:#" not in picture.replace("var(--jp-ui-font-color0,#1b1b1b)", "").replace("border-color:#", "")
    states = ("cancelled", "failed", "finished", "waiting", "decode")
    requests = tuple(RequestStatus(state, state, 1.0, 2.0, 3.0, 4.0, 4.0) for state in states)
    rows = draw_server(ServerSnapshot(5.0, recent=requests)).split("requests over time")[1]
    assert len(re.findall('class="mark"', rows)) == 2, "a cross and an exclamation mark"


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
    live.chosen = "a"
    path = live.save(tmp_path / "server.json")
    saved = ServerView(path)
    saved.chosen = "a"
    assert saved.picture() == live.picture().replace("http://127.0.0.1:1   ", "")
    again = ServerView(ServerSnapshot.load(path))
    assert replace(again.snapshot, wall_time=0.0, traces={}) == replace(live.snapshot, wall_time=0.0)
    assert saved._leave is None
    for view in (live, saved, again):
        view.close()
