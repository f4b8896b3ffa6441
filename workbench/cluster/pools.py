"""Serve requests with a pool of prefill engines and a pool of decode engines, each engine in its own process.

    request -> prefill pool: prompt, first token -> pages lent or sent -> decode pool: the other tokens -> Finished
                     ^                                                          |
                     +------- a process died: computed again up to here <-------+

The coordinator's thread owns the page ledger and the requests' states; processes talk to the coordinator only, except
that they exchange the bytes of pages if they share no memory. A request that loses its process continues after its
emitted tokens: no token is lost or repeated. While a whole pool is gone, the other pool computes requests from
prompt to end.
"""

from __future__ import annotations

import functools
import importlib
import os
import pickle
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from workbench.cluster.apart import pool_messages as message
from workbench.cluster.apart.pool_processes import STARTERS, EngineProcess, StartProcess
from workbench.cluster.apart.pool_requests import PoolRequests, apart
from workbench.cluster.apart.pool_slots import PoolSlots, Role, Slot, State
from workbench.cluster.fleet_request import MAX_LOSSES
from workbench.cluster.job_thread import JobThread
from workbench.cluster.replica import PageCounts
from workbench.cluster.submissions import Submission
from workbench.engine.config import EngineConfig
from workbench.engine.request_handle import RequestHandle
from workbench.engine.runner_thread import EventSink
from workbench.errors import WorkbenchError, describe_error
from workbench.progress import to_stderr
from workbench.request import FinishReason, Request
from workbench.trace.events import Event

Result = TypeVar("Result")
CLOSED = "the pools are closed"


@dataclass(frozen=True)
class EngineState:
    """The state of one engine of a pool; `number` is the `Event.replica` of its events."""

    number: int
    name: str
    role: Role
    state: State
    restarts: int
    requests: tuple[str, ...]  # requests computed there now


@dataclass(frozen=True)
class LentPages:
    """The number of pages that the engine `home` lends to the engine `borrower`; borrower None: in transfer."""

    home: int
    borrower: int | None
    pages: int


@dataclass(frozen=True)
class PagesInFlight:
    """The pages of one sample in transfer between two engines; `target` is None while no engine is ready to
    take them.
    """

    request_id: str
    sample: int
    source: int
    target: int | None
    pages: int
    seconds: float  # since the offer


@dataclass(frozen=True)
class PoolsSnapshot:
    """The state of two pools at one moment: engines, loans, transfers. Engines count from 1, as in `Event.replica`."""

    engines: tuple[EngineState, ...]
    lent: tuple[LentPages, ...]  # loans of shared memory
    in_flight: tuple[PagesInFlight, ...]
    counts: dict[str, int]


class PrefillDecodePools:
    """Two pools of engines. Use it in a `with` statement, which ends all processes at its end.

        with PrefillDecodePools(EngineConfig.build("demo", batch_invariant=True)) as pools:
            for event in pools.stream(requests):
                print(event.text, end="")

    Args:
        config: config of every engine.
        num_prefill: number of engines that compute prompts.
        num_decode: number of engines that decode; with 0 the prefill engines compute whole requests, as one pool.
        decode: config of the decode engines if it differs; model and cache layout must be the same.
        transfer: `shared`: all processes of this host map one memory; `gloo`: bytes are sent. Unused by one pool.
        processes: `child` for child processes, `ray` for actors of the Ray cluster of this process, or a function
            that starts a process by name.
        threads: torch threads of each engine; default: an equal share of this machine's cores.
        replaces_dead: start a successor of each process that dies: at once, and after pauses once three in a row
            never served, while other engines serve or will.
        max_losses: maximum processes that a request may lose before it fails, since it may be the cause.
        step_seconds: time limit of a step; then its process is killed. None for no limit.
        listener: receives every request and step event of all engines; after it raises, it is not called again.
        report: receives a line about each listener or sink that raised.
    """

    def __init__(
        self,
        config: EngineConfig,
        num_prefill: int = 1,
        num_decode: int = 1,
        *,
        decode: EngineConfig | None = None,
        transfer: message.Transfer = "shared",
        processes: Literal["child", "ray"] | StartProcess = "child",
        threads: int | None = None,
        replaces_dead: bool = True,
        max_losses: int = MAX_LOSSES,
        step_seconds: float | None = 600.0,
        listener: Callable[[Event], None] | None = None,
        report: Callable[[str], None] = to_stderr,
    ):
        if num_prefill < 1 or num_decode < 0:
            raise WorkbenchError(f"a pool needs an engine at least, not {num_prefill} for prefill, {num_decode}")
        self.counts: Counter[str] = Counter()  # handovers, recomputations, failed transfers, dead processes
        configs: dict[Role, list[EngineConfig]] = {
            "prefill" if num_decode else "any": [config.engine] * num_prefill,
            "decode": [(decode or config).engine] * num_decode,
        }
        start = STARTERS[processes] if isinstance(processes, str) else processes
        threads = threads or max(1, (os.cpu_count() or 1) // (num_prefill + num_decode))
        self._slots = PoolSlots(
            configs, transfer if num_decode else None, start, replaces_dead, threads, step_seconds, self._put,
            self._receive, self._died,
        )  # fmt: skip
        self._report = report
        self._requests = PoolRequests(self._slots, self.counts, self._tell, max_losses)
        if listener is not None:
            self.listen(listener)
        self._answers: list[tuple[int, Future[bytes]]] = []  # pending calls of engines, in order
        self._error = ""
        self._is_ready = threading.Event()
        self._thread = JobThread(
            "pools' coordinator", lambda: self._error or CLOSED, self._tick, self._wait_seconds, self._failed
        )
        self._put(lambda: [self._slots.start(slot, self._started) for slot in self.slots])
        try:
            self._is_ready.wait()
            if self._error:
                raise WorkbenchError(self._error)
        except BaseException:
            self.close()
            raise

    @property
    def slots(self) -> list[Slot]:
        """Return the slots of both pools, prefill first."""
        return self._slots.slots

    @property
    def error(self) -> str:
        """Return the error that ended the pools; empty while they serve."""
        return self._error

    @property
    def pages(self) -> PageCounts:
        """Return the pages of all engines together, as last reported; a lent page counts as in use."""
        return functools.reduce(PageCounts.plus, (slot.pages for slot in self.slots))

    def __enter__(self) -> PrefillDecodePools:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def stream(self, requests: Request | Iterable[Request]) -> Iterator[Event]:
        """Run requests and yield their events as they happen, without step events; closing the iterator cancels the
        requests.
        """
        return iter(self.submit(requests))

    def submit(self, requests: Request | Iterable[Request]) -> RequestHandle:
        """Submit requests as `stream` does, and return their handle at once."""
        handle = RequestHandle(lambda: cancel())
        cancel = self.submit_to(handle, [requests] if isinstance(requests, Request) else requests)
        return handle

    def submit_to(self, sink: EventSink, requests: Iterable[Request]) -> Callable[[], None]:
        """Submit requests, whose events go to `sink`; return a function that cancels them soon, from any thread."""
        now, submissions = time.perf_counter(), list[Submission]()
        made = [each for request in requests for each in apart(request, now)]
        self._put(lambda: submissions.append(self._requests.submit(sink, made)))

        def cancel() -> None:
            self._thread.put(lambda: [self._requests.cancel(each) for each in submissions])

        return cancel

    def cancel(self, request_id: str) -> None:
        """Cancel a request with all its samples, without waiting."""
        self._put(lambda: self._requests.cancel_id(request_id))

    def kill(self, number: int) -> None:
        """Kill the process of an engine, for tests and exercises.

        Raises:
            WorkbenchError: if it has no process now (its successor is starting, follows after a pause, or never), or
                the process runs on another host.
        """
        slot = self.slots[number]
        if (process := slot.process) is None:
            raise WorkbenchError(f"{slot.name} has no process to kill: it is {slot.state}")
        if process.pid is None:
            raise WorkbenchError(f"{slot.name} is no process of this host; kill it there")
        try:
            os.kill(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            raise WorkbenchError(f"{slot.name} has no process to kill: it has just ended") from None

    def close(self) -> None:
        """End all processes and wait (a listener's call does not wait); requests in progress end as cancelled."""
        self._thread.close(self._stop)
        if not self._thread.is_current:
            self._thread.join()

    def call_engine(self, number: int, function: Callable[[Any], Any]) -> Any:
        """Run `function(runner)` in an engine, between two steps, and return its result (WorkbenchError if that is
        impossible).

        A function that is not importable by name is sent as code, which needs cloudpickle or Ray.
        """
        content, answer = _pickled(function), Future[bytes]()

        def ask() -> None:
            self._answers.append((number, answer))
            if self._slots.slots[number].state != "ready":
                self._give_up_answers(number)
            else:
                self._slots.send(self._slots.slots[number], message.EngineCall(content))

        self._put(ask)
        return pickle.loads(answer.result())

    def _give_up_answers(self, number: int) -> None:
        for asked in [each for each in self._answers if each[0] == number]:
            self._answers.remove(asked)
            asked[1].set_exception(WorkbenchError("call: the engine's process has ended"))

    def call(self, function: Callable[[], Result]) -> Result:
        """Run `function()` in the coordinator's thread and return its result or raise its error. It runs between two
        messages, or at once if a listener makes this call.
        """
        return self._thread.ask(function)

    def listen(self, listener: Callable[[Event], None]) -> Callable[[], None]:
        """Call `listener` with every event of every request and every step, of all engines, in the coordinator's
        thread; return a function that stops it."""
        return self._requests.submissions.listen(listener)

    def snapshot(self) -> PoolsSnapshot:
        """Return the current engines, page loans and transfers."""
        return self.call(self._snapshot)

    def pages_lent(self) -> int:
        """Return the number of current page loans, in transfers and with borrowers."""
        return self.call(lambda: sum(self._slots.ledger.lent_pages().values()) if self._slots.ledger else 0)

    def recall(self) -> None:
        """Make every engine give back borrowed pages that no sequence references."""
        self._put(self._requests.recall)

    # The methods below run in the coordinator's thread.

    def _put(self, job: Callable[[], object]) -> None:
        if not self._thread.put(job):
            raise WorkbenchError(self._error or CLOSED)

    def _tick(self) -> None:
        for slot, error in self._slots.find_hung():
            self._died(slot, error)
        for slot in self.slots:
            if slot.starts_at is not None and slot.starts_at <= time.monotonic():
                self._slots.start(slot, self._started)
        self._requests.arrive()

    def _wait_seconds(self) -> float:
        arrival = self._requests.submissions.next_arrival()
        seconds = self._slots.look_seconds
        return seconds if arrival is None else min(seconds, max(0.0, arrival - time.perf_counter()))

    def _failed(self, error: BaseException) -> None:
        self._error = self._error or describe_error(error)
        self._thread.close(self._stop)

    def _receive(self, slot: Slot, found: object) -> None:
        match found:
            case message.StepReport():
                slot.pages = found.pages or slot.pages
                self._requests.report(slot, found)
            case message.EngineFailed(error):
                self._died(slot, error)
            case message.Called(value, error):
                asked = next(each for each in self._answers if each[0] == slot.number)
                self._answers.remove(asked)
                asked[1].set_exception(WorkbenchError(error)) if error else asked[1].set_result(value)
            case _:
                self._slots.receive(slot, found)
                if isinstance(found, message.Ready):
                    self._check_ready()

    def _started(self, slot: Slot, process: EngineProcess | None, error: str) -> None:
        if process is None:
            self._died(slot, error)
        else:
            self._slots.greet(slot, process)

    def _died(self, slot: Slot, error: str) -> None:
        """Handle the end of a process: its requests move elsewhere, and `_tick` starts its successor."""
        if slot.restarts == 0 and slot.state != "ready":  # it never worked
            raise WorkbenchError(f"{slot.name} could not start: {error}")
        self.counts["processes that died"] += 1
        self._requests.lost(slot, self._slots.end(slot, error), error)
        self._give_up_answers(slot.number)
        self._check_ready()

    def _tell(self, line: str) -> None:
        with suppress(Exception):  # a closed stderr, say
            self._report(line)

    def _check_ready(self) -> None:
        if all(each.state in ("ready", "gone") for each in self.slots):
            self._is_ready.set()

    def _stop(self) -> None:
        try:
            self._requests.end_all(FinishReason.ERROR if self._error else FinishReason.CANCELLED, self._error)
        finally:
            try:
                self._slots.stop()
            finally:
                for number, _ in tuple(self._answers):
                    self._give_up_answers(number)
                self._is_ready.set()
                self._slots.close()

    def _snapshot(self) -> PoolsSnapshot:
        now, ledger = time.perf_counter(), self._slots.ledger
        engines = tuple(
            EngineState(each.number + 1, each.name, each.role, each.state, each.restarts, tuple(sorted(each.requests)))
            for each in self.slots
        )
        lent = () if ledger is None else ledger.lent_pages().items()
        in_flight = tuple(
            PagesInFlight(
                *(served.public or (served.name, 0)), each.home + 1,
                None if each.target is None else each.target + 1, each.num_pages, now - each.offered_at,
            )
            for key, each in self._requests.transfers.items()
            if (served := self._requests.submissions.find(key.request_id)) is not None
        )  # fmt: skip
        loans = tuple(
            LentPages(home + 1, None if borrower is None else borrower + 1, pages) for (home, borrower), pages in lent
        )
        return PoolsSnapshot(engines, loans, in_flight, dict(self.counts))


def _pickled(function: Callable[[Any], Any]) -> bytes:
    is_of_script = getattr(function, "__module__", "") == "__main__"  # which is another module in an engine's process
    for package in ("pickle",) * (not is_of_script) + ("cloudpickle", "ray.cloudpickle"):
        with suppress(Exception):  # not installed, or the function is not importable by name
            return importlib.import_module(package).dumps(function)
    raise WorkbenchError("call: give a function of a module: a replica in another process has to find it")
