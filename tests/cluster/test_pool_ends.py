"""Ends of requests in pools: every sample once, with its usage, whatever is refused, cancelled, lost or hangs."""

from __future__ import annotations

import os
import signal
import socket
from collections import Counter
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import pytest

from tests.cluster.ends import end_of
from tests.cluster.handovers import WINDOWS
from tests.cluster.pool_threads import StartThreads
from tests.engine.tiny import finals, model_of, request, runner_of, spec_of
from tests.helpers.events import of
from tests.helpers.processes import PIPE, start_python
from tests.patience import limit, until
from workbench.cluster.apart import pool_processes
from workbench.cluster.apart.page_channel import GlooLink
from workbench.cluster.apart.pool_engine import PoolEngine
from workbench.cluster.apart.pool_messages import Transfer
from workbench.cluster.pools import PrefillDecodePools
from workbench.engine.config import EngineConfig
from workbench.engine.loaded_model import LoadedModel
from workbench.errors import WorkbenchError
from workbench.request import Request
from workbench.trace.events import Decoded, Event, Finished, HandedOver
from workbench.widgets.fleet.data import IN_FLIGHT, FleetBook
from workbench.widgets.fleet.source import open_fleet

CHOSEN: dict[str, Any] = {"page_size": 4, "pages": 20, "backend": "eager"}
SHARED = pytest.mark.parametrize("sampling", [{"beams": 4, "n": 2}, {"best_of": 4, "n": 2}])


def pools_of(start: StartThreads, *counts: int, **options: Any) -> PrefillDecodePools:
    return PrefillDecodePools(EngineConfig.build(**CHOSEN), *counts, processes=start, **options)


def ends_of(events: list[Event]) -> Counter[tuple[str, int]]:
    return Counter((each.request_id, each.sample) for each in of(Finished, events))


def samples(name: str, count: int = 4) -> Counter[tuple[str, int]]:
    return Counter((name, number) for number in range(count))


@pytest.fixture
def loaded() -> LoadedModel:
    return LoadedModel(model_of(spec_of()), None, None)


@SHARED
@pytest.mark.parametrize("second", ["r", "r#2"])
def test_a_taken_id_ends_every_sample_of_the_second(loaded, sampling: dict[str, int], second: str) -> None:
    first, other = request("r", 9, 8, **sampling), request(second, 9, 8, **sampling)
    with pools_of(StartThreads(lambda config: loaded)) as pools:
        events = list(pools.stream([first, other]))
    assert ends_of(events) == samples("r") + samples(second)
    errors = [each.error for each in events if isinstance(each, Finished) and each.error]
    assert sum("is already taken" in error for error in errors) == 4


@SHARED
@pytest.mark.parametrize("closes", [True, False])
def test_a_cancel_and_a_close_end_every_sample(loaded, sampling: dict[str, int], closes: bool) -> None:
    start, events = StartThreads(lambda config: loaded), list[Event]()
    with pools_of(start, 1, 0) as pools:
        start.living["prefill 0"].mortal.hang()  # nothing is computed, and nothing is answered
        assert pools.submit(request("r", 9, 8, **sampling), events.append) == 4
        if not closes:  # while it is queued
            pools.call(lambda: pools._requests.lost(pools.slots[0], {"r"}, "it was killed"))
            pools.cancel("r")
            until(lambda: ends_of(events) == samples("r"))
    assert ends_of(events) == samples("r")
    assert all(each.reason == "cancelled" for each in of(Finished, events))


def test_a_cancel_ends_every_sample_that_waits_for_pages(loaded) -> None:
    """In its engine, behind a request that has them."""
    start, events = StartThreads(lambda config: loaded), list[Event]()
    with pools_of(start) as pools:
        pools.submit(request("long", 9, 60), events.append)
        pools.submit(request("r", 9, 40, beams=4), events.append)
        pools.cancel("r")
        pools.cancel("long")
        until(lambda: pools.call(lambda: pools._requests.is_empty))
    assert ends_of(events) == samples("r") + samples("long", 1)


def test_a_resumed_request_keeps_its_tokens_when_its_process_dies(loaded) -> None:
    asked = request("r", 9, 12)
    ids = finals(runner_of(loaded.transformer, **CHOSEN), [asked])["r"]
    for message in range(3, 9):
        start = StartThreads(lambda config: loaded, {"prefill 0": [(message, True)]})
        with pools_of(start, 1, 0) as pools:
            events = list(pools.stream([replace(asked, generated_ids=ids[:2])]))
            assert pools.counts["processes that died"] == 1
        end = end_of(events)
        assert end.token_ids == ids
        streamed = [(each.index, each.token_id) for each in of(Decoded, events)]
        assert streamed == list(enumerate(ids))[2:]


@pytest.mark.parametrize("is_queued", [True, False])
def test_a_cancel_of_a_retry_says_what_was_streamed(monkeypatch, loaded, is_queued: bool) -> None:
    """It waits for a process, or in one for pages."""
    monkeypatch.setattr(PoolEngine, "_has_pages", lambda self, run: False)  # as if all were lent
    start, events = StartThreads(lambda config: loaded), list[Event]()
    ids = finals(runner_of(loaded.transformer, **CHOSEN), [request("r", 9, 12)])["r"]
    with pools_of(start) as pools:
        if is_queued:
            start.living["prefill 0"].mortal.hang()
        pools.submit(replace(request("r", 9, 12), generated_ids=ids[:10]), events.append)
        if is_queued:
            pools.call(lambda: pools._requests.lost(pools.slots[0], {"r"}, "it was killed"))
        pools.cancel("r")
        until(lambda: events)
    end = end_of(events)
    assert (end.reason, end.token_ids, end.prompt_tokens) == ("cancelled", ids[:10], 9)


@pytest.mark.parametrize("transfer", ["shared", "gloo"])
def test_an_engine_that_hangs_is_ended_and_its_requests_go_on(loaded, transfer: Transfer) -> None:
    asked = [request(f"r{number}", 9 + number, 12) for number in range(3)]
    alone = finals(runner_of(loaded.transformer, **CHOSEN), asked)
    for place in ("prefill 0", "decode 1"):
        start = StartThreads(lambda config: loaded)
        with pools_of(start, transfer=transfer, step_seconds=limit(0.1)) as pools:
            start.living[place].mortal.hang()
            found = {each.request_id: each.token_ids for each in of(Finished, pools.stream(asked))}
            assert found == alone and pools.counts["processes that died"] >= 1


def test_a_full_socket_blocks_neither_the_others_nor_the_end(loaded) -> None:
    start = StartThreads(lambda config: loaded)
    with pools_of(start, 2, 0, step_seconds=None) as pools:
        start.living["prefill 0"].mortal.hang()
        for number in range(4):  # two megabytes each, two for each engine
            pools.submit(Request(f"big {number}", (5,) * 1_000_000, request("r", 9, 4).sampling), lambda event: None)
        until(lambda: sorted(len(each.requests) for each in pools.snapshot().engines) == [0, 2])


def test_channels_that_break_now_and_then_are_opened_again(monkeypatch) -> None:
    """The pages that they did not bring are computed again, and the next goes over another one."""
    original, is_to_break = GlooLink.send, [False]

    def send(self, tensor) -> None:
        if is_to_break[0]:
            is_to_break[0] = False
            raise RuntimeError("planted")
        original(self, tensor)

    monkeypatch.setattr(GlooLink, "send", send)
    loaded = LoadedModel(model_of(WINDOWS), None, None)
    asked = [request(f"r{number}", 17, 4) for number in range(12)]
    alone = finals(runner_of(loaded.transformer, **CHOSEN), asked)
    with pools_of(StartThreads(lambda config: loaded), transfer="gloo") as pools:
        for number, each in enumerate(asked):
            is_to_break[0] = number % 2 == 0
            assert end_of(pools.stream([each])).token_ids == alone[each.request_id]
            channels = number // 2 + 2
            until(lambda channels=channels: pools.call(lambda: len(pools._slots._channels)) == channels)
        assert pools.counts["handed over"] == pools.counts["transfers that failed"] == 6


def test_listeners_snapshots_and_views_name_samples_as_streams_do(loaded) -> None:
    """Of a sample whose pages are on their way, too."""
    start, heard, book = StartThreads(lambda config: loaded), list[Event](), FleetBook()
    with pools_of(start, listener=heard.append) as pools:
        start.living["decode 1"].mortal.hang()
        source, streamed = open_fleet(pools), list[Event]()
        pools.submit(request("r", 9, 6, n=2, temperature=0.7, seed=3), streamed.append)
        until(lambda: len(pools.snapshot().in_flight) == 2)
        assert {(each.request_id, each.sample) for each in pools.snapshot().in_flight} == {("r", 0), ("r", 1)}
        members, ways = source.read()
        for event in tuple(heard):
            book.take(event)
        state = book.state(members, ways)
        assert {(each.key, each.place) for each in state.in_flight} == {(("r", n), IN_FLIGHT) for n in (0, 1)}
        start.living["decode 1"].mortal.go_on()
        until(lambda: ends_of(streamed) == samples("r", 2))
    assert [each for each in heard if each.request_id] == streamed
    assert {each.sample for each in of(HandedOver, streamed)} == {0, 1}


def fail(event: Event) -> None:
    raise ZeroDivisionError("planted")


def test_a_listener_that_raises_is_dropped_and_everything_goes_on(loaded) -> None:
    """At an event or at the end of all requests; one that raises again there kept the engines and hung the stream."""
    start, heard, lines = StartThreads(lambda config: loaded), list[Event](), list[str]()
    with pools_of(start, listener=fail, report=lines.append) as pools:
        pools.listen(heard.append)
        events = list(pools.stream(request("r", 9, 4)))
        assert ends_of(events) == samples("r", 1) and not pools.error
        assert [each for each in heard if each.request_id] == events
        assert len(lines) == 1 and "a listener of the pools failed" in lines[0] and "planted" in lines[0]
        pools.submit(request("s", 9, 4), fail)
        until(lambda: ends_of(heard)["s", 0])
        assert len(lines) == 2 and lines[1].startswith("request s: its receiver failed")
        start.living["decode 1"].mortal.hang()
        pools.submit(request("t", 9, 4), fail)
        pools.listen(fail)
    assert ends_of(heard)["t", 0] == 1
    assert all(slot.process is None for slot in pools.slots)
    assert not any(each._thread.is_alive() for each in start.living.values())


def test_an_error_while_requests_end_still_ends_every_engine(monkeypatch, loaded) -> None:
    start = StartThreads(lambda config: loaded)
    with pools_of(start) as pools:
        monkeypatch.setattr(pools._requests, "end_all", lambda *_: 1 // 0)
    assert not any(each._thread.is_alive() for each in start.living.values())


def test_a_listener_may_ask_the_pools_and_close_them(loaded) -> None:
    """In the coordinator's own thread, which waited for itself."""
    start, found = StartThreads(lambda config: loaded), list[Any]()
    pools = pools_of(start)

    def ask(event: Event) -> None:
        if not found:
            found.extend([pools.snapshot(), pools.pages_lent(), pools.call(lambda: 7)])
            pools.close()

    pools.listen(ask)
    end = end_of(pools.stream(request("r", 9, 40)))
    pools.close()
    assert found[0].engines and found[2] == 7 and end.reason == "cancelled"
    assert not pools._thread.is_alive() and not any(each._thread.is_alive() for each in start.living.values())


def test_a_cancel_ends_no_request_whose_id_looks_like_a_sample(loaded) -> None:
    """Of another request."""
    start, events, alike = StartThreads(lambda config: loaded), list[Event](), list[Event]()
    with pools_of(start) as pools:
        start.living["prefill 0"].mortal.hang()
        pools.submit(request("issue#12", 9, 20), alike.append)
        pools.submit(request("issue", 9, 40, n=2, temperature=0.7, seed=3), events.append)
        pools.cancel("issue")
        pools.call(lambda: start.living["prefill 0"].mortal.go_on())
        until(lambda: ends_of(events) == samples("issue", 2) and ends_of(alike) == samples("issue#12", 1))
    assert {each.reason for each in of(Finished, events)} == {"cancelled"}
    assert [each.reason for each in of(Finished, alike)] == ["length"]


def test_a_stream_that_is_closed_cancels_only_what_it_was_given(loaded) -> None:
    """And not the request of another stream, whose id it was refused for."""
    start, first = StartThreads(lambda config: loaded), list[Event]()
    with pools_of(start) as pools:
        start.living["prefill 0"].mortal.hang()
        pools.submit(request("a", 9, 12), first.append)
        second = pools.stream([request("a", 9, 12), request("b", 9, 12)])
        refused = next(second)
        assert isinstance(refused, Finished) and "is already taken" in refused.error
        second.close()
        start.living["prefill 0"].mortal.go_on()
        until(lambda: pools.call(lambda: pools._requests.is_empty))
    assert [each.reason for each in of(Finished, first)] == ["length"]


def test_an_engine_that_is_no_process_of_this_host_is_not_killed_in_silence(loaded) -> None:
    with pools_of(StartThreads(lambda config: loaded)) as pools, pytest.raises(WorkbenchError, match="prefill 0 is no"):
        pools.kill(0)


def test_the_pages_of_pools_are_known_before_the_first_request(loaded) -> None:
    """By which a front remembers prefixes."""
    with pools_of(StartThreads(lambda config: loaded)) as pools:
        assert pools.pages == (0, 0, 40)


def test_a_process_that_outlives_its_kill_does_not_count_as_dead(monkeypatch) -> None:
    """Its successor would get pages that it may still write to."""
    child = start_python("-c", "input()", stdin=PIPE)
    fd = os.pidfd_open(child.pid)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(pool_processes, "START_SECONDS", 0.01)
            patch.setattr(signal, "pidfd_send_signal", lambda *_: None)
            with pytest.raises(WorkbenchError, match="decode 1: its process lives"):
                pool_processes.end_process(fd, "decode 1")
        pool_processes.end_process(fd, "decode 1")
        assert child.wait() == -signal.SIGKILL
    finally:
        os.close(fd)
        child.stdin.close()


def test_a_peer_that_says_nothing_ends_the_greeting_and_later_reads_wait() -> None:
    mine, its = socket.socketpair()
    with its, mine, Connection(os.dup(mine.fileno())) as connection:
        with pool_processes.limited_reads(mine, 0.01), pytest.raises(OSError, match="unavailable"):
            connection.recv_bytes()
        assert mine.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16) == bytes(16)
