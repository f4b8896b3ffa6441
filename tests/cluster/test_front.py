"""A fleet is one engine: whatever replicas do, every sample ends once, with the tokens of an uninterrupted run."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.cluster.fleet import COUNTING, MENU, Sink, SteppedReplica, uninterrupted
from tests.helpers.events import of
from tests.thorough import tries
from workbench.cluster.accounts import FleetAccount
from workbench.cluster.fleet_request import FleetRequest
from workbench.cluster.front import FleetLimits, Front
from workbench.cluster.prefixes import PrefixGuess
from workbench.cluster.submissions import Submission, Submissions
from workbench.engine.resume import why_not_resumable
from workbench.request import Request
from workbench.simulate.routers import router_from
from workbench.trace.events import Decoded, Event, Finished, Moved, Prefilled, Routed, Stepped, Submitted
from workbench.units import format_seconds

LOSSES = 2
GIVEN_UP = "no replica can be started"
CLAIMS = ("reason", "ended_by", "stop_reason", "token_ids", "output_text", "thought_text", "thinking_tokens",
          "prompt_tokens")  # fmt: skip
PLACES = st.lists(st.integers(0, len(MENU) - 1), min_size=1, max_size=3)
ROUTERS = ("round_robin", "least_loaded", "prefix_aware", "session_sticky")


class Fleet(RuleBasedStateMachine):
    """A front with replicas that the test steps, kills and retires."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.alive: dict[int, SteppedReplica] = {}
        self.submitted: dict[str, tuple[int, Sink, Submission]] = {}
        self.cancelled: set[str] = set()
        self.heard: list[Event] = []
        self.lost: list[int] = []  # computed tokens of lost attempts
        self.handing_over = {"killed"}  # why requests move
        self.retired_at: dict[int, int] = {}  # number of events heard before, by replica
        self.is_given_up = False
        self.count = 0

    @initialize(router=st.sampled_from(ROUTERS), replicas=st.integers(1, 3), room=st.integers(1, 6))
    def begin(self, router: str, replicas: int, room: int) -> None:
        limits = FleetLimits(page_size=4, replica_samples=room, losses=LOSSES)
        self.front = Front(router_from(router), limits, lambda: self.now, self._gone)
        self.front.submissions.listeners.append(self.heard.append)
        for _ in range(replicas):
            self.add()

    def _gone(self, number: int) -> None:
        self.alive.pop(number, None)

    def _choose(self, place: int) -> SteppedReplica | None:
        return [*self.alive.values()][place % len(self.alive)] if self.alive else None

    @rule()
    def add(self) -> None:
        if len(self.alive) < 4:
            self.count += 1
            replica = self.alive[self.count] = SteppedReplica(self.count)
            self.front.add_replica(replica, pages=replica.pages)
            self.is_given_up = False

    @precondition(lambda self: not self.alive)
    @rule()
    def give_up(self) -> None:
        """All requests end, and new ones are refused until a replica comes."""
        self.front.give_up("", GIVEN_UP)
        self.is_given_up = True
        assert not self.front.num_requests

    @rule(places=PLACES, later=st.sampled_from([0.0, 0.0, 5.0]))
    def submit(self, places: list[int], later: float) -> None:
        for place in places:
            name = f"r{len(self.submitted)}"
            asked = replace(MENU[place], request_id=name, arrival=later)
            sink = Sink()
            self.submitted[name] = place, sink, self.front.submit(sink, [asked])
            assert (GIVEN_UP in sink.refusal) == (self.is_given_up and not later)

    @rule(place=st.integers(0, 3), turns=st.integers(1, 8))
    def turn(self, place: int, turns: int) -> None:
        for _ in range(turns):
            replica = self._choose(place)
            if replica is not None:
                self.now += 1.0
                self.front.arrive()
                self.step(replica)

    def step(self, replica: SteppedReplica) -> None:
        """Let a replica take a step, in which it computes nothing that has left it."""
        report, view = replica.turn(), self.front.replicas.get(replica.number)
        computed = [each for each in report.events if isinstance(each, Prefilled | Decoded)]
        assert {each.request_id for each in computed} <= (set() if view is None else view.names.keys())
        self.front.take_report(replica.number, report)

    def lose(self, replica: SteppedReplica, leave: Callable[[], None]) -> None:
        """Note the tokens of each attempt that ends as a replica is lost or leaves."""
        view = self.front.replicas[replica.number]
        before = [(one.name, each.computed_now) for one in view.requests.values() for each in one.unfinished]
        leave()
        self.lost += [computed for name, computed in before if name not in view.requests]

    @rule(place=st.integers(0, 3), heard=st.booleans())
    def kill(self, place: int, heard: bool) -> None:
        """Kill a replica, also in the middle of a step whose message does not arrive."""
        replica = self._choose(place)
        if replica is not None:
            report = replica.turn()
            self.lose(replica, lambda: self.front.lose_replica(replica.number, "killed"))
            if heard:  # a message that was under way
                self.front.take_report(replica.number, report)

    @rule(place=st.integers(0, 3), hand_over=st.booleans())
    def retire(self, place: int, hand_over: bool) -> None:
        replica = self._choose(place)
        if replica is not None:
            self.handing_over |= {f"replica {replica.number} leaves"} if hand_over else set()
            self.retired_at.setdefault(replica.number, len(self.heard))
            self.lose(replica, lambda: self.front.retire_replica(replica.number, hand_over))

    @rule(place=st.integers(0, 99))
    def cancel(self, place: int) -> None:
        if self.submitted:
            name = [*self.submitted][place % len(self.submitted)]
            self.cancelled.add(name)
            self.front.cancel(self.submitted[name][2])

    @invariant()
    def the_account_is_the_sum(self) -> None:
        if not hasattr(self, "front"):
            return
        sinks = [sink for _, sink, _ in self.submitted.values() if not sink.refusal]
        ends = [each for sink in sinks for each in of(Finished, sink.events)]
        account = self.front.accounts[""]
        assert account.ended == Counter(end.reason for end in ends)
        assert account.output_tokens == sum(len(end.token_ids) for end in ends)
        assert account.prompt_tokens == sum(end.prompt_tokens for end in ends)
        assert account.computed_tokens == sum(end.computed_tokens for end in ends)
        live = sum(len(each.unfinished) for one in self.front.submissions for each in one.live.values())
        assert account.submitted == len(ends) + live

    @invariant()
    def who_came_first_is_placed_first(self) -> None:
        waiting = self.front.submissions.waiting if hasattr(self, "front") else []
        orders = [(each.arrival, each.order) for each in waiting]
        assert orders == sorted(orders)

    def teardown(self) -> None:
        if not hasattr(self, "front"):
            return
        self.now += 10.0
        if not any(not view.is_leaving for view in self.front.replicas.values()):
            self.count += 1
            replica = self.alive[self.count] = SteppedReplica(self.count)
            self.front.add_replica(replica, pages=replica.pages)
        self.front.arrive()
        for _ in range(2000):
            if all(sink.is_done for _, sink, _ in self.submitted.values()):
                break
            for replica in list(self.alive.values()):
                if not replica.is_idle:
                    self.step(replica)
        for replica in list(self.alive.values()):  # what they were to cancel
            while not replica.is_idle:
                self.step(replica)
            assert replica.runner.scheduler.pages_in_use == 0
        assert self.front.num_requests == self.front.num_waiting == self.front.pages.used == 0
        assert not any(view.is_leaving for view in self.front.replicas.values())
        assert {each.reason for each in of(Moved, self.heard)} <= self.handing_over
        for number, place in self.retired_at.items():
            assert number not in {each.replica for each in of(Routed, self.heard[place:])}
        assert not self.front.submissions._taken and not any(view.names for view in self.front.replicas.values())
        for name, (place, sink, _) in self.submitted.items():
            check_request(name, place, sink, name in self.cancelled)
        own = [each for each in self.heard if each.request_id]
        assert Counter(type(each) for each in own) == Counter(
            type(each) for _, sink, _ in self.submitted.values() for each in sink.events if each.request_id
        )
        assert all(each.replica for each in self.heard if isinstance(each, Decoded | Moved | Routed | Stepped))
        account = self.front.accounts[""]
        assert (account.lost_attempts, account.lost_tokens) == (len(self.lost), sum(self.lost))


def check_routes(events: list[Event]) -> None:
    """Assert that whatever a sample emits on a replica follows the choice of that replica, which has its numbers."""
    replica, moved, tokens = 0, None, 0
    for each in events:
        tokens += isinstance(each, Decoded)
        match each:
            case Moved():
                assert (each.source, each.generated_tokens) == (replica, tokens) and moved is None
                moved = each
            case Routed():
                assert (moved is None) == (replica == 0)  # its first, or right after a move to the same
                assert moved is None or (moved.replica, moved.time) == (each.replica, each.time)
                replica, moved = each.replica, None
                numbers = [option.replica for option in each.options]
                assert numbers == sorted(set(numbers)) and replica in numbers and each.reason
                assert all(min(option) >= 0 for option in each.options)
            case Prefilled() | Decoded():
                assert moved is None and each.replica == replica > 0
    assert moved is None


def check_request(name: str, place: int, sink: Sink, may_be_cancelled: bool) -> None:
    """Assert that each sample ended once, as it does on one engine, or was cut off by what happened to it."""
    assert sink.is_done
    by_sample: dict[int, list[Event]] = defaultdict(list)
    for each in sink.events:
        if each.request_id == name:
            by_sample[each.sample].append(each)
    assert by_sample or may_be_cancelled  # or it was cancelled before it arrived
    for sample, events in by_sample.items():
        ends = of(Finished, events)
        assert len(ends) == 1 and events[-1] is ends[0], (name, events)
        assert isinstance(events[0], Submitted) and sum(isinstance(each, Submitted) for each in events) == 1
        check_routes(events)
        tokens = of(Decoded, events)
        assert [each.index for each in tokens] == list(range(len(tokens)))
        end, wanted = ends[0], uninterrupted(place)[sample]
        if end.reason in ("cancelled", "error") or GIVEN_UP in end.error:
            assert end.reason != "cancelled" or may_be_cancelled
            if end.reason == "error" and GIVEN_UP not in end.error:
                moves = sum(isinstance(each, Moved) for each in events)
                sampler = MENU[place].sampling.sampler is COUNTING
                assert moves >= LOSSES or sampler and why_not_resumable(MENU[place]), end.error
            assert end.token_ids == wanted.token_ids[: len(end.token_ids)] or MENU[place].sampling.beams
            continue
        assert {key: getattr(end, key) for key in CLAIMS} == {key: getattr(wanted, key) for key in CLAIMS}
        assert len(end.prompt_logprobs) == len(wanted.prompt_logprobs)
        assert tuple(each.token_id for each in tokens) == wanted.token_ids
        texts = {
            channel: "".join(each.text for each in tokens if each.channel == channel) for channel in ("text", "thought")
        }
        assert (texts["text"] + end.text, texts["thought"]) == (wanted.output_text, wanted.thought_text)


TestFleet = Fleet.TestCase
TestFleet.settings = settings(max_examples=tries(60), stateful_step_count=25)


def fleet(replicas: int = 2, **limits: Any) -> tuple[Front, list[SteppedReplica]]:
    front = Front(router_from("least_loaded"), FleetLimits(page_size=4, **limits), lambda: 0.0)
    made = [SteppedReplica(number) for number in range(1, replicas + 1)]
    for each in made:
        front.add_replica(each, pages=each.pages)
    return front, made


def ask(front: Front, place: int, name: str = "r", **more: Any) -> Sink:
    front.submit(sink := Sink(), [replace(MENU[place], request_id=name, **more)])
    return sink


def finish(front: Front, replicas: list[SteppedReplica]) -> None:
    while front.num_requests:
        for each in replicas:
            if not each.is_stopped and each.number in front.replicas:
                front.take_report(each.number, each.turn())


def test_an_id_that_is_taken_is_refused_and_the_first_goes_on() -> None:
    front, replicas = fleet()
    first, second = ask(front, 2), Sink()
    front.submit(second, [replace(MENU[0], request_id="r#1")], is_single=True)
    assert second.is_done and "already taken" in second.error
    assert [(each.reason, each.ended_by) for each in of(Finished, second.events)] == [("refused", "")]
    finish(front, replicas)
    check_request("r", 2, first, False)


def test_prefix_aware_routing_follows_what_a_replica_computed() -> None:
    front, replicas = fleet()
    front.router = router_from({"kind": "prefix_aware", "request_tokens": 0})
    asked = Request("a", MENU[1].prompt_ids, MENU[0].sampling)
    other = Request("b", (9,) * 30, MENU[0].sampling)
    front.submit(Sink(), [asked])
    front.submit(Sink(), [other])
    finish(front, replicas)
    assert [view.cached_tokens(asked.prompt_ids, "") for view in front.replicas.values()] == [20, 0]
    assert [replica.runner.cached_tokens(asked.prompt_ids[:-1]) for replica in replicas] == [20, 0]
    for number in range(3):
        front.submit(Sink(), [replace(asked, request_id=f"a{number}"), replace(other, request_id=f"b{number}")])
        assert {name[0] for name in front.replicas[1].requests} == {"a"}
        assert {name[0] for name in front.replicas[2].requests} == {"b"}
    finish(front, replicas)
    assert front.replicas[1].cached_tokens(asked.prompt_ids, "another salt") == 0


@given(pages=st.integers(0, 6), rest=st.integers(0, 1), capacity=st.integers(0, 5))
def test_first_pages_of_the_last_text_are_thought_to_be_cached(pages: int, rest: int, capacity: int) -> None:
    """They are what a later prompt begins with; of a longer text a replica keeps no more than it has room for."""
    guess, ids = PrefixGuess(2, capacity), range(2 * pages + rest)
    for text in ([9] * 8, ids):
        guess.enter(text, "")
    assert guess.num_tokens([*ids, 0], "") == 2 * min(pages, capacity)


def test_the_front_ends_everything_and_cancels_what_replicas_have() -> None:
    front, (one,) = fleet(1, replica_samples=1)
    sinks = [ask(front, 0, f"r{number}") for number in range(2)]
    front.end_all("no replica starts")
    assert all(sink.is_done and sink.error == "no replica starts" for sink in sinks)
    assert not front.num_requests and not front.num_waiting
    front.take_report(1, one.turn())  # late
    assert one.is_idle


def test_a_listener_and_a_sink_that_raise_are_dropped_and_named() -> None:
    lines: list[str] = []
    front = Front(router_from("least_loaded"), FleetLimits(page_size=4), lambda: 0.0, report=lines.append)
    replica = SteppedReplica(1)
    front.add_replica(replica, pages=replica.pages)
    ill = Sink()
    ill.emit = lambda *_: 1 / 0  # type: ignore[method-assign]
    heard: list[Event] = []
    front.submissions.listeners += [lambda event: {}[event.kind], heard.append]
    front.submissions.after_delivery.append(lambda: [].pop())
    front.submit(ill, [replace(MENU[1], request_id="ill")])
    well = ask(front, 1, "well")
    finish(front, [replica])
    check_request("well", 1, well, False)
    assert [each.request_id for each in of(Finished, heard)].count("ill") == 1
    assert [words in line for words, line in zip(("KeyError", "ZeroDivisionError", "IndexError"), lines, strict=True)]
    assert len(front.submissions.listeners) == 1 and not front.submissions.after_delivery


@pytest.mark.parametrize("is_lost", [True, False])
@pytest.mark.parametrize("place", [1, 2])
def test_what_is_cancelled_while_it_is_given_up_ends_once(place: int, is_lost: bool) -> None:
    """A listener cancels both requests when the first end is heard, which the loss of their replica brings, or that
    none can be started."""
    front, replicas = fleet(int(is_lost), losses=0)
    sinks = [Sink(), Sink()]
    made = [front.submit(sink, [replace(MENU[place], request_id=name)]) for sink, name in zip(sinks, "ab", strict=True)]

    def hear(event: Event) -> None:
        if isinstance(event, Finished):
            for each in made:
                front.cancel(each)

    front.submissions.listeners.append(hear)
    front.lose_replica(replicas[0].number, "killed by a test") if is_lost else front.give_up("", GIVEN_UP)
    ends = [[each.reason for each in of(Finished, sink.events)] for sink in sinks]
    count = MENU[place].sampling.num_sequences
    assert all(sink.is_done for sink in sinks)
    assert ends == [["error"] + ["cancelled"] * (count - 1), ["cancelled"] * count]
    assert not front.num_requests and not front.num_waiting


def test_a_sink_may_cancel_another_submission() -> None:
    front, replicas = fleet(1)
    first, second = Sink(), Sink()
    other = front.submit(second, [replace(MENU[1], request_id="other", arrival=5.0)])
    emit = first.emit

    def emit_and_cancel(events: list[Event], done: bool = False, error: str = "") -> None:
        emit(events, done, error)
        if done:
            front.cancel(other)

    first.emit = emit_and_cancel  # type: ignore[method-assign]
    front.submit(first, [replace(MENU[1], request_id="first")])
    third = ask(front, 1, "third")
    finish(front, replicas)
    check_request("third", 1, third, False)
    assert first.is_done and second.is_done and not list(front.submissions)


TIMES = st.floats(0, 9)


@given(st.lists(st.tuples(st.integers(0, 3), TIMES, TIMES, TIMES), min_size=1, max_size=8), st.integers(0, 2))
def test_an_account_has_each_latency_of_the_samples_that_had_it(ends: list[Any], left: int) -> None:
    account = FleetAccount(submitted=len(ends), left=left)
    for tokens, arrival, first, last in ends:
        times = (first, last) if tokens else (None, None)
        account.add(Finished(9.0, "r", reason="stop", token_ids=(1,) * tokens), arrival, *times)
    ttft = [first - arrival for tokens, arrival, first, _ in ends if tokens]
    tpot = [(last - first) / (tokens - 1) for tokens, _, first, last in ends if tokens > 1]
    assert (list(account.ttft), list(account.tpot)) == (ttft, tpot)
    rows = dict(account.rows())
    assert rows["samples"] == len(ends) - left and rows["output tokens"] == sum(tokens for tokens, *_ in ends)
    for name, values in (("TTFT, median", ttft), ("TPOT, median", tpot)):
        assert rows[name] == format_seconds(median(values) if values else None)


def test_the_next_arrival_is_the_first_of_all_submissions() -> None:
    known = Submissions()
    assert known.next_arrival() is None
    for times in ((7.0, 2.0, 5.0), (4.0, 3.0)):
        known.add(Sink(), [FleetRequest(MENU[0], at) for at in times])
    seen = []
    while (due := known.next_arrival()) is not None:
        ((_, each),) = known.due(due)
        seen.append(each.arrival)
    assert seen == [2.0, 3.0, 4.0, 5.0, 7.0]
