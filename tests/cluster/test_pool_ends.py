"""Ends of requests in pools: every sample once, with its usage, whatever is refused, cancelled, lost or hangs."""

from __future__ import annotations

import os
import signal
import socket
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cluster.ends import end_of
from tests.cluster.handovers import WINDOWS
from tests.cluster.pool_threads import StartThreads
from tests.engine.tiny import finals, model_of, request, runner_of, spec_of
from tests.helpers.events import of
from tests.helpers.processes import PIPE, start_python
from tests.helpers.stand_in import stand_in
from tests.patience import until
from workbench.cluster.apart import pool_processes, pool_slots
from workbench.cluster.apart.page_channel import GlooLink
from workbench.cluster.apart.pool_engine import PoolEngine
from workbench.cluster.apart.pool_messages import Transfer
from workbench.cluster.apart.pool_slots import PoolSlots, State
from workbench.cluster.pools import PrefillDecodePools
from workbench.engine.config import EngineConfig
from workbench.engine.loaded_model import LoadedModel
from workbench.engine.request_handle import RequestHandle
from workbench.errors import WorkbenchError
from workbench.files import note_own
from workbench.request import Request
from workbench.trace.events import Event, Finished, HandedOver
from workbench.widgets.fleet.data import IN_FLIGHT, FleetBook
from workbench.widgets.fleet.source import open_fleet

CHOSEN: dict[str, Any] = {"page_size": 4, "pages": 20, "backend": "eager"}
SECONDS = st.integers(1, 2000)
SHARED = pytest.mark.parametrize("sampling", [{"beams": 4, "n": 2}, {"best_of": 4, "n": 2}])


def pools_of(start: StartThreads, *counts: int, **options: Any) -> PrefillDecodePools:
    return PrefillDecodePools(EngineConfig.build(**CHOSEN), *counts, processes=start, **options)


def ends_of(events: list[Event]) -> Counter[tuple[str, int]]:
    return Counter((each.request_id, each.sample) for each in of(Finished, events))


def samples(name: str, count: int = 4) -> Counter[tuple[str, int]]:
    return Counter((name, number) for number in range(count))


def cancel_queued(pools: PrefillDecodePools) -> None:
    """Cancel request `r` while it waits for a process, since the first one has lost it."""
    pools.call(lambda: (pools._requests.lost(pools.slots[0], {"r"}, "it was killed"), pools._requests.cancel_id("r")))


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


def test_a_refusal_names_no_path_of_the_engine(loaded, tmp_path: Path) -> None:
    own = note_own(tmp_path / "part.py")  # which the engine's process works with, and the front's knows nothing of
    refused = request("r", 9, 8, sampler={"path": f"{own}:Missing"})
    with pools_of(StartThreads(lambda config: loaded)) as pools:
        (end,) = of(Finished, list(pools.stream([refused])))
    assert "part.py" in end.error and str(tmp_path) not in end.error


@SHARED
@pytest.mark.parametrize("closes", [True, False])
def test_a_cancel_and_a_close_end_every_sample(loaded, sampling: dict[str, int], closes: bool) -> None:
    start = StartThreads(lambda config: loaded)
    with pools_of(start, 1, 0) as pools:
        start.living["engine 0"].mortal.hang()  # nothing is computed, and nothing is answered
        events = pools.submit(request("r", 9, 8, **sampling)).events
        if not closes:
            cancel_queued(pools)
            until(lambda: ends_of(events) == samples("r"))
    assert ends_of(events) == samples("r")
    assert all(each.reason == "cancelled" for each in of(Finished, events))


def test_a_cancel_ends_every_sample_that_waits_for_pages(loaded) -> None:
    """In its engine, behind a request that has them."""
    with pools_of(StartThreads(lambda config: loaded)) as pools:
        handle = pools.submit([request("long", 9, 60), request("r", 9, 40, beams=4)])
        pools.cancel("r")
        pools.cancel("long")
        until(lambda: handle.done)
    events = handle.events
    assert ends_of(events) == samples("r") + samples("long", 1)


@pytest.mark.parametrize("is_queued", [True, False])
def test_a_cancel_of_a_retry_says_what_was_streamed(monkeypatch, loaded, is_queued: bool) -> None:
    """It waits for a process, or in one for pages."""
    monkeypatch.setattr(PoolEngine, "_has_pages", lambda self, run: False)  # as if all were lent
    start = StartThreads(lambda config: loaded)
    ids = finals(runner_of(loaded.transformer, **CHOSEN), [request("r", 9, 12)])["r"]
    with pools_of(start) as pools:
        if is_queued:
            start.living["prefill 0"].mortal.hang()
        handle = pools.submit(replace(request("r", 9, 12), generated_ids=ids[:10]))
        cancel_queued(pools) if is_queued else pools.cancel("r")
        until(lambda: handle.done)
    end = end_of(handle.events)
    assert (end.reason, end.token_ids, end.prompt_tokens) == ("cancelled", ids[:10], 9)


def test_a_full_socket_blocks_neither_the_others_nor_the_end(loaded) -> None:
    start = StartThreads(lambda config: loaded)
    with pools_of(start, 2, 0, step_seconds=None) as pools:
        start.living["engine 0"].mortal.hang()
        for number in range(4):  # two megabytes each, two for each engine
            pools.submit(Request(f"big {number}", (5,) * 1_000_000, request("r", 9, 4).sampling))
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
        source = open_fleet(pools)
        streamed = pools.submit(request("r", 9, 6, n=2, temperature=0.7, seed=3)).events
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


def test_a_close_ends_a_request_whose_offer_waits_for_an_engine(monkeypatch, loaded) -> None:
    """And is no error of the pools: the offer would be placed once more."""
    with pools_of(StartThreads(lambda config: loaded)) as pools:
        monkeypatch.setattr(pools._slots, "start", lambda *_: None)  # of a successor, which does not come
        pools.call(lambda: pools._died(pools.slots[1], "planted"))
        events = pools.submit(request("r", 9, 6)).events
        until(lambda: pools.snapshot().in_flight)
    assert end_of(events).reason == "cancelled" and not pools.error


@pytest.mark.parametrize("transfer", get_args(Transfer))
def test_handovers_are_divided_among_decode_engines(loaded, transfer: Transfer) -> None:
    """Also those whose bytes are on their way."""
    start = StartThreads(lambda config: loaded)
    with pools_of(start, 1, 2, transfer=transfer) as pools:
        for name in ("decode 1", "decode 2"):
            start.living[name].mortal.hang()
        handle = pools.submit([request(f"r{number}", 9, 4) for number in range(4)])
        until(lambda: len(pools.snapshot().in_flight) == 4)
        assert Counter(each.target for each in pools.snapshot().in_flight) == {2: 2, 3: 2}
        handle.stop()


@pytest.mark.parametrize("closes", [True, False])
def test_a_call_of_an_engine_that_ends_raises(loaded, closes: bool) -> None:
    start = StartThreads(lambda config: loaded)
    with ThreadPoolExecutor() as threads, pools_of(start) as pools:
        start.living["decode 1"].mortal.hang()
        answer = threads.submit(pools.call_engine, 1, fail)
        until(lambda: pools.call(lambda: pools._answers))
        pools.close() if closes else pools._put(lambda: pools._died(pools.slots[1], "planted"))
        until(answer.done)
    with pytest.raises(WorkbenchError, match="the engine's process has ended"):
        answer.result()


@given(st.sampled_from(get_args(State)), st.none() | SECONDS, SECONDS, st.none() | SECONDS)
def test_an_engine_hangs_that_was_silent_for_longer_than_its_limit(
    state: State, silent: int | None, passed: int, limit: int | None
) -> None:
    """Starting takes longer than a step; of the time since the last look only two intervals count: the coordinator
    itself was suspended in the rest."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool_slots, "time", SimpleNamespace(monotonic=lambda: float(passed)))
        slots = PoolSlots({"any": [EngineConfig()]}, None, fail, True, 1, limit, fail, fail, fail)
        slots._looked_at = 0.0
        (slot,) = slots.slots
        slot.state, slot.silent = state, silent
        hung = [each for each, _ in slots.find_hung()]
    known = (silent or 0) + min(passed, 2 * slots.look_seconds)
    most = limit if state == "ready" else pool_slots.START_SECONDS
    assert hung == [slot] * (silent is not None and most is not None and known > most)


def fail(*_: object) -> NoReturn:
    raise ZeroDivisionError("planted")


def test_what_raises_at_the_end_of_all_requests_keeps_no_engine(loaded) -> None:
    """A listener or a sink; that both are dropped is the front's law (test_front.py)."""
    start, heard, lines = StartThreads(lambda config: loaded), list[Event](), list[str]()
    with pools_of(start, listener=heard.append, report=lines.append) as pools:
        start.living["decode 1"].mortal.hang()
        pools.submit_to(stand_in(RequestHandle, emit=fail), [request("t", 9, 4)])
        pools.listen(fail)
    assert ends_of(heard) == samples("t", 1) and len(lines) == 2
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
    start = StartThreads(lambda config: loaded)
    with pools_of(start) as pools:
        start.living["prefill 0"].mortal.hang()
        alike = pools.submit(request("issue#12", 9, 20)).events
        events = pools.submit(request("issue", 9, 40, n=2, temperature=0.7, seed=3)).events
        pools.cancel("issue")
        pools.call(lambda: start.living["prefill 0"].mortal.go_on())
        until(lambda: ends_of(events) == samples("issue", 2) and ends_of(alike) == samples("issue#12", 1))
    assert {each.reason for each in of(Finished, events)} == {"cancelled"}
    assert [each.reason for each in of(Finished, alike)] == ["length"]


def test_a_handle_that_is_stopped_cancels_only_what_it_was_given(loaded) -> None:
    """And not the request of another handle, whose id it was refused for."""
    start = StartThreads(lambda config: loaded)
    with pools_of(start) as pools:
        start.living["prefill 0"].mortal.hang()
        first = pools.submit(request("a", 9, 12))
        second = pools.submit([request("a", 9, 12), request("b", 9, 12)])
        until(lambda: second.events)
        assert "is already taken" in end_of(second.events).error
        second.stop()
        start.living["prefill 0"].mortal.go_on()
        until(lambda: first.done and second.done)
    assert [each.reason for each in of(Finished, first.events)] == ["length"]
    assert [each.reason for each in of(Finished, second.events)] == ["refused", "cancelled"]


def test_an_engine_that_is_no_process_of_this_host_is_not_killed_in_silence(loaded) -> None:
    with pools_of(StartThreads(lambda config: loaded)) as pools, pytest.raises(WorkbenchError, match="prefill 0 is no"):
        pools.kill(0)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("num_decode", [0, 1])
def test_one_pool_serves_what_no_engine_can_hand_over(loaded, num_decode: int) -> None:
    """Serve eviction with one pool: the engine that evicted tokens alone knows which remain, so it cannot hand over."""
    chosen, asked = {**CHOSEN, "cache": {"evict": {"kind": "window", "ratio": 0.5}}}, request("r", 17, 9)
    start, config = StartThreads(lambda config: loaded), EngineConfig.build(**chosen)
    if num_decode:
        with pytest.raises(WorkbenchError, match=r"leave out cache\.evict"):
            PrefillDecodePools(config, processes=start)
        return
    with PrefillDecodePools(config, 2, num_decode, processes=start) as pools:
        end = end_of(pools.stream(asked))
    assert end.token_ids == finals(runner_of(loaded.transformer, **chosen), [asked])["r"]


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
            with pytest.raises(WorkbenchError, match="decode 1: its process survived SIGKILL"):
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
