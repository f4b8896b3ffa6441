"""Rounds, calls and waits lie on one timeline with the steps."""

from __future__ import annotations

import threading

import workbench
from tests.agents.script import call, runner, script
from tests.patience import limit
from workbench.trace.agent_tracks import AgentTrack
from workbench.trace.perfetto import chrome_trace, read_trace
from workbench.trace.recorder import Recorder
from workbench.trace.tracks import Tracks
from workbench.widgets.time_axis.picture import TimeView
from workbench.widgets.timeline.picture import draw_timeline

BOTH = threading.Barrier(2)


def meet(name: str) -> str:
    """Wait for the other call."""
    BOTH.wait(limit(20))
    return name


def test_an_agents_run_is_on_the_timeline_beside_its_requests() -> None:
    on, recorder = runner(), Recorder()
    on.set_listener(recorder.record)
    result = workbench.agent(on, [meet], **script(call("meet", name="a") + call("meet", name="b"), "so")).run("q")
    assert [each.result for each in result.rounds[0].calls] == ["a", "b"]
    tracks = Tracks()
    for event in recorder.events:
        tracks.record(event)
    run, first, beside, second = tracks.requests
    assert isinstance(run, AgentTrack) and isinstance(beside, AgentTrack) and len(recorder.requests()) == 2
    whole, *inner = tracks.phases(run)
    assert whole.args["finish_reason"] == "end_turn" and {"round", "wait", "call"} == {each.name for each in inner}
    assert all(whole.begin <= each.begin <= each.end <= whole.end for each in inner)
    rounds = [each for each in inner if each.name == "round"]
    (wait,) = (each for each in inner if each.name == "wait")
    calls = [each for track in (run, beside) for each in tracks.phases(track)[1:] if each.name == "call"]
    assert [each.args["result"] for each in calls] == ["a", "b"]
    assert all(wait.begin <= each.begin and each.end <= wait.end for each in calls)
    assert calls[0].begin < calls[1].end and calls[1].begin < calls[0].end  # at once
    assert rounds[0].end <= wait.begin and wait.end <= rounds[1].begin
    for each, request in zip(rounds, (first, second), strict=True):
        assert each.args["request"] == request.row["request_id"]
        assert each.begin <= tracks.phases(request)[0].begin and tracks.phases(request)[0].end <= each.end
        assert each.args["computed_tokens"] + each.args["cached_tokens"] == each.args["prompt_tokens"]
    assert any(rounds[0].begin <= step.begin <= rounds[0].end for step in tracks.steps)
    trace = chrome_trace(recorder)
    names = {each["name"] for each in trace["traceEvents"]}
    assert {"round", "wait", "call"} <= names
    assert len(read_trace(trace).requests) == 4
    picture = draw_timeline(tracks, TimeView(tracks.begin, tracks.end))
    assert "meet" in picture and "round 0" not in picture and 'class="rd"' in picture and 'class="ca"' in picture


def test_an_agent_under_way_has_slices_up_to_now() -> None:
    on, recorder = runner(), Recorder()
    on.set_listener(recorder.record)
    events = workbench.agent(on, [meet], **script("abc")).stream("q")
    for _ in zip(range(3), events, strict=False):
        pass
    tracks = Tracks()
    for event in recorder.events:
        tracks.record(event)
    run = tracks.requests[0]
    assert [each.name for each in tracks.phases(run)[1:]] == ["round"] and tracks.phases(run)[0].end == tracks.end
    events.close()
    for event in recorder.events[-2:]:
        tracks.record(event)
    assert tracks.phases(run)[0].args["finish_reason"] == "cancelled"
