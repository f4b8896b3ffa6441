"""The picture of a fleet: each sample in one place, pages that add up, any order of events, the same from a file."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.widgets import words
from tests.thorough import tries
from workbench.measure.simulated import fleet_for
from workbench.measure.simulation import simulation_experiment
from workbench.trace.events import (
    Cancelled,
    Decoded,
    Event,
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
from workbench.trace.recorder import Recorder
from workbench.widgets import FleetView
from workbench.widgets.fleet.data import (
    ENDED,
    FRONT,
    HOLDING,
    IN_FLIGHT,
    REPLICA,
    FleetBook,
    FleetMember,
    PagesOnTheWay,
    state_at,
)
from workbench.widgets.fleet.picture import draw_fleet
from workbench.widgets.fleet.source import load_events, save_events
from workbench.widgets.fleet.view import MAX_STEPS

NAMES, NUMBERS, SECONDS = st.sampled_from(("a", "b<i>", "c&d", "e#1")), st.integers(0, 3), st.floats(0, 9)
COUNTS, SAMPLES = st.integers(0, 50), st.integers(0, 1)
OPTIONS = st.lists(st.builds(RoutingOption, NUMBERS, COUNTS, COUNTS, COUNTS), max_size=3).map(tuple)


def of(kind: type[Event], **fields: Any) -> st.SearchStrategy[Event]:
    """An event of this kind of any sample, at any time and replica."""
    own = {} if kind is Stepped else {"request_id": NAMES, "sample": SAMPLES}
    return st.builds(kind, time=SECONDS, replica=NUMBERS, **own, **fields)


HISTORIES = st.lists(
    st.one_of(
        of(Submitted, prompt_tokens=COUNTS), of(Routed, reason=st.just("<few>"), options=OPTIONS),
        of(Moved, source=NUMBERS, reason=st.just("lost & gone"), generated_tokens=COUNTS),
        of(HandedOver, source=NUMBERS, pages=COUNTS, bytes=COUNTS, seconds=SECONDS), of(Prefilled, tokens=COUNTS),
        of(Decoded, index=COUNTS), of(Preempted), of(Scheduled, action=st.sampled_from(("waiting", "admitted"))),
        of(Cancelled), of(Finished, reason=st.sampled_from(("length", "error", "moved"))),
        of(Stepped, pages_used=COUNTS, pages_idle=COUNTS),
    ),
    max_size=40,
)  # fmt: skip
STATES = st.sampled_from(("serves", "leaves", "starts", "lost", "gone"))
MEMBERS = st.none() | st.lists(
    st.builds(FleetMember, NUMBERS, st.sampled_from(("", "prefill", "decode", "b")), STATES, *[st.none() | COUNTS] * 3),
    max_size=4,
    unique_by=lambda each: each.number,
)
WAYS = st.lists(st.builds(PagesOnTheWay, st.tuples(NAMES, SAMPLES), NUMBERS, NUMBERS, COUNTS), max_size=3)


def booked(events: list[Event]) -> FleetBook:
    book = FleetBook()
    for event in events:
        book.take(event)
    return book


def simulated(decode: int = 0, **executor: Any) -> list[Event]:
    """The events of a small simulated fleet, of which one replica fails for a second."""
    recorder = Recorder()
    settings_ = {"kind": "simulated", "instances": 2, **executor}
    settings_ |= {"decode": {"instances": decode}} if decode else {}
    traffic = {"kind": "traffic", "lengths": {"kind": "exponential", "prompt": 900, "output": 12},
               "arrivals": {"kind": "poisson", "rate": 40}, "requests": 30}  # fmt: skip
    asked = simulation_experiment("shape:llama-3.1-8b", settings_, traffic, {"ttft": 1, "tpot": 0.1})
    fleet_for(asked, recorder.record).run()
    return recorder.events


@given(HISTORIES, MEMBERS, WAYS)
@settings(max_examples=tries(150))
def test_every_sample_is_in_one_place(
    events: list[Event], members: list[FleetMember] | None, ways: list[PagesOnTheWay]
) -> None:
    state = booked(events).state(members, ways)
    alive: dict[tuple[str, int], bool] = {}
    for event in events:
        key = event.request_id, event.sample
        if isinstance(event, Finished) and event.reason != "moved":
            alive[key] = False
        elif event.request_id and not isinstance(event, Cancelled | Preempted | Finished):
            alive[key] = True
    here = [each for each in state.samples if each.place != ENDED]
    assert Counter(each.key for each in here) == Counter(key for key, lives in alive.items() if lives)
    assert sum(state.num_ended.values()) == len(state.ended)
    for replica in state.replicas:
        assert all(each.place == REPLICA and each.replica == replica.number for each in replica.samples)
        assert not replica.samples or replica.state in HOLDING
    assert {each.place for each in state.waiting} <= {FRONT} and {each.place for each in state.in_flight} <= {IN_FLIGHT}


@given(HISTORIES, MEMBERS)
@settings(max_examples=tries(100))
def test_the_pages_of_a_replica_add_up(events: list[Event], members: list[FleetMember] | None) -> None:
    last = {event.replica: event for event in events if isinstance(event, Stepped)}
    for replica in booked(events).state(members).replicas:
        step, number = last.get(replica.number, Stepped(0.0)), replica.number
        member = next((each for each in members or () if each.number == number), FleetMember(number))
        if replica.state in HOLDING:
            assert replica.used == (step.pages_used if member.used is None else member.used)
            assert replica.idle == (step.pages_idle if member.idle is None else member.idle)
        if member.pages is None or replica.state not in HOLDING:
            assert replica.pages is None
        elif member.pages >= replica.used + replica.idle:
            assert replica.pages == member.pages


@given(HISTORIES, SECONDS)
@settings(max_examples=tries(100))
def test_the_state_at_a_moment_is_that_of_the_events_until_then(events: list[Event], time: float) -> None:
    events = sorted(events, key=lambda each: each.time)
    early = [each for each in events if each.time <= time]
    state, plain = state_at(events, time), booked(early).state()
    assert (state.ended, state.news, state.num_ended) == (plain.ended, plain.news, plain.num_ended)
    assert {each.key for each in state.samples} == {each.key for each in plain.samples}
    assert state_at(events, 10.0).replicas == booked(events).state().replicas


@given(HISTORIES)
@settings(max_examples=tries(30))
def test_events_are_the_same_from_a_file(tmp_path_factory: pytest.TempPathFactory, events: list[Event]) -> None:
    assert list(load_events(save_events(events, tmp_path_factory.mktemp("events") / "fleet.gz"))) == events


@pytest.mark.parametrize(("kept", "count"), [((), 2), ((7, 8, 9), 3)])
def test_what_ended_has_the_tokens_that_were_seen_or_said(kept: tuple[int, ...], count: int) -> None:
    seen: list[Event] = [Decoded(float(n), "r", index=n) for n in range(2)]
    (ended,) = booked([*seen, Finished(3.0, "r", reason="error", token_ids=kept)]).state().ended
    assert (ended.output_tokens, ended.phase, ended.name) == (count, "error", "r")


def test_pages_are_in_flight_from_their_offer_to_their_arrival() -> None:
    events = simulated(decode=1)
    handed = [each for each in events if isinstance(each, HandedOver)]
    assert len(handed) > 20 and {each.replica for each in handed} == {3}
    for each in handed:
        state, after = state_at(events, each.time - each.seconds / 2), state_at(events, each.time)
        (mine,) = [one for one in state.in_flight if one.request_id == each.request_id]
        assert (mine.source, mine.replica, mine.pages) == (each.source, 3, each.pages) and each.pages > 0
        assert each.request_id in {one.request_id for one in after.replicas[-1].samples}
    assert [each.role for each in after.replicas] == ["prefill", "prefill", "decode"]
    assert (after.num_handed_over, after.bytes_handed_over) == (len(handed), sum(each.bytes for each in handed))
    assert f"in flight: {mine.pages} pages" in draw_fleet(state)


def test_a_replica_that_fails_has_no_sample_and_its_requests_say_where_they_went() -> None:
    events = simulated(failures=[{"instance": 0, "at": 0.4, "down": 0.2}])
    moved = [each for each in events if isinstance(each, Moved)]
    assert moved and {each.source for each in moved} == {1}
    state, end = state_at(events, moved[-1].time), state_at(events, events[-1].time)
    lost, other = state.replicas
    assert (lost.state, lost.samples, lost.used, other.state) == ("lost", (), 0, "serves")
    text = words(draw_fleet(state, moved[0].request_id))
    assert "replica 1 lost" in text and f"{moved[0].request_id} moved from 1 to 2" in text
    assert "tokens to compute" in text, "what the router saw"
    assert {each.state for each in end.replicas} == {"serves"} and end.num_ended == {"length": 30}


def test_a_view_shows_a_moment_and_keeps_it(tmp_path: Path) -> None:
    events = simulated(decode=1)
    view = FleetView(events)
    assert view.state.num_ended == {"length": 30} and "30 length" in view.picture()
    first = next(each for each in events if isinstance(each, HandedOver))
    view.show_at(first.time - first.seconds / 2 - events[0].time)
    view.shown.picked = f"@{first.request_id}"
    view.throttle.flush()
    assert view.chosen == first.request_id and "its pages are on their way" in view.picture()
    again = FleetView(view.save(tmp_path / "fleet.gz"))
    again.step = view.step
    again.throttle.flush()
    assert again.state == view.state
    for each in (view, again):
        each.close()


def test_a_long_record_has_few_steps_and_shows_any_moment() -> None:
    view = FleetView([Stepped(float(n)) for n in range(10 * MAX_STEPS + 7)])
    assert MAX_STEPS / 2 < view.steps.last <= MAX_STEPS and view.state.time == 10 * MAX_STEPS + 6
    for seconds in (0, 3, 4, 777.5, 10 * MAX_STEPS + 3):
        view.show_at(seconds)
        view.throttle.flush()
        assert view.state.time == seconds // 1
    for step in (view.step - 1, 0, view.steps.last):
        view.step = step
        view.throttle.flush()
        assert view.state.time == view._step_times[step]
    view.close()
