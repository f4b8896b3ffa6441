"""Serve requests by a pool of prefill engines and a pool of decode engines, each engine a process.

    request -> prefill pool: prompt, first token -> pages lent or sent -> decode pool: the other tokens -> Finished
                     ^                                                          |
                     +------- a process died: computed again up to here <-------+

One thread, the coordinator's, owns the ledger of pages and the requests' states; processes talk to it and never to one
another, but for the bytes of pages where they share no memory. A request that loses its process goes on from the tokens
that were emitted: none is lost and none comes twice. Where a whole pool is gone for good, the other computes requests
from their prompts to their ends.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import pickle
import queue
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from workbench.cluster.apart import pool_messages as message
from workbench.cluster.apart.pool_processes import STARTERS, EngineProcess, StartProcess
from workbench.cluster.apart.pool_requests import Emit, PoolRequests
from workbench.cluster.apart.pool_slots import PoolSlots, Slot, State
from workbench.cluster.replica import PageCounts
from workbench.engine import inputs as intake
from workbench.engine.config import EngineConfig
from workbench.errors import WorkbenchError, describe_error
from workbench.progress import to_stderr
from workbench.request import FinishReason, Request
from workbench.trace.events import Event, Finished

Result = TypeVar("Result")


@dataclass(frozen=True)
class EngineState:
    """An engine of a pool: `number` is `Event.replica` of its events."""

    number: int
    name: str
    state: State
    restarts: int
    requests: tuple[str, ...]  # that it computes now


@dataclass(frozen=True)
class LentPages:
    """Pages of the engine `home` that `borrower` holds; None: they are on their way."""

    home: int
    borrower: int | None
    pages: int


@dataclass(frozen=True)
class PagesInFlight:
    """Pages of a sample on their way from one engine to another; `target` is None while none is ready."""

    request_id: str
    sample: int
    source: int
    target: int | None
    pages: int
    seconds: float  # since they were offered


@dataclass(frozen=True)
class PoolsSnapshot:
    """Two pools at a moment: engines, loans, transfers. Engines are counted from 1, as `Event.replica` does."""

    engines: tuple[EngineState, ...]
    lent: tuple[LentPages, ...]  # of a shared memory
    in_flight: tuple[PagesInFlight, ...]
    counts: dict[str, int]


class PrefillDecodePools:
    """Two pools of engines. Use it in a `with` statement: its end ends all processes.

        with PrefillDecodePools(EngineConfig.build("demo", batch_invariant=True)) as pools:
            for event in pools.stream(requests):
                print(event.text, end="")

    Args:
        config: of every engine.
        num_prefill: engines that compute prompts.
        num_decode: engines that decode; with none the others compute requests whole, as one pool.
        decode: of the decode engines, where it differs; model and layout of the cache must not.
        transfer: `shared`: one memory that all processes of this host map; `gloo`: bytes are sent.
        processes: `child` of this process, `ray` for actors of the cluster that it is part of, or a function that
            starts one by name.
        threads: of each engine; an equal share of this machine's cores unless given.
        max_restarts: processes that may be started in place of dead ones, by place.
        step_seconds: that a step may last; then its process is ended as one that died. None: any time.
        listener: receives every event of every request and every step, of all engines. One that raises gets no more.
        report: receives lines about listeners and receivers of requests that raised.
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
        max_restarts: int = 3,
        step_seconds: float | None = 600.0,
        listener: Emit | None = None,
        report: Callable[[str], None] = to_stderr,
    ):
        if num_prefill < 1 or num_decode < 0:
            raise WorkbenchError(f"a pool needs an engine at least, not {num_prefill} for prefill, {num_decode}")
        self.transfer: message.Transfer = transfer
        self.counts: Counter[str] = Counter()  # handed over, computed again, transfers that failed, processes that died
        configs: dict[Literal["prefill", "decode"], list[EngineConfig]] = {
            "prefill": [config.engine] * num_prefill,
            "decode": [(decode or config).engine] * num_decode,
        }
        start = STARTERS[processes] if isinstance(processes, str) else processes
        threads = threads or max(1, (os.cpu_count() or 1) // (num_prefill + num_decode))
        self._slots = PoolSlots(
            configs, transfer, start, max_restarts, threads, step_seconds, self._put, self._receive, self._died
        )
        self._listeners = [listener] if listener is not None else []
        self._report = report
        self._requests = PoolRequests(self._slots, self.counts, self._heard, self._tell)
        self._jobs: deque[Callable[[], object]] = deque()
        self._answers: list[tuple[int, Future[Any]]] = []  # that engines owe, in order
        self._lock, self._takes_jobs = threading.Lock(), True
        self._bell = threading.Event()
        self._closed, self._error = False, ""
        self._is_ready = threading.Event()
        self._thread = threading.Thread(target=self._work, name="pools' coordinator", daemon=True)
        self._thread.start()
        try:
            self._is_ready.wait()
            if self._error:
                raise WorkbenchError(self._error)
        except BaseException:
            self.close()
            raise

    @property
    def slots(self) -> list[Slot]:
        """The places of both pools, those of the prefill pool first."""
        return self._slots.slots

    @property
    def error(self) -> str:
        """The error that ended the pools; empty while they serve."""
        return self._error

    @property
    def pages(self) -> PageCounts:
        """The pages of all engines together, as they last reported; a page that is lent is in use."""
        return functools.reduce(PageCounts.plus, (slot.pages for slot in self.slots))

    def __enter__(self) -> PrefillDecodePools:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def stream(self, requests: Request | Iterable[Request]) -> Generator[Event]:
        """Run requests and yield their events as they happen, as `Runner.stream`; closing the iterator cancels them."""
        waiting = deque(sorted([requests] if isinstance(requests, Request) else requests, key=intake.arrival))
        began, events = time.perf_counter(), queue.SimpleQueue[Event]()
        emit = events.put  # one object, which tells this stream's requests from others of the same ids
        left = 0
        try:
            while waiting or left:
                while waiting and began + intake.arrival(waiting[0]) <= time.perf_counter():
                    left += self.submit(waiting.popleft(), emit)
                due = began + intake.arrival(waiting[0]) - time.perf_counter() if waiting else None
                try:
                    event = events.get(timeout=None if due is None else max(0.0, due))
                except queue.Empty:
                    continue
                left -= isinstance(event, Finished)
                yield event
        finally:
            if left:
                with contextlib.suppress(WorkbenchError):  # closed: nothing is left to cancel
                    self._put(lambda: self._requests.cancel_of(emit))

    def submit(self, request: Request, emit: Emit) -> int:
        """Submit a request, whose events `emit` receives in the coordinator's thread; return the number of Finished
        events to expect: one per sample."""
        asked = request.sampling
        apart = asked.num_sequences == asked.n and not asked.beams
        samples = intake.split_samples(request) if apart else [request]
        public = [(request.request_id, number) if len(samples) > 1 else None for number in range(len(samples))]
        self._put(lambda: [self._submit(*each, emit) for each in zip(samples, public, strict=True)])
        return asked.num_sequences

    def cancel(self, request_id: str) -> None:
        """End a request soon, with all its samples."""
        self._put(lambda: self._requests.cancel(request_id))

    def kill(self, number: int) -> None:
        """End the process of a place at once, as its death would; for tests and exercises.

        Raises:
            WorkbenchError: where it has none now (it died, and its successor is being started, or it is gone for good),
                or where its process runs on another host.
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
        """End all processes and wait for that; requests in progress end as cancelled. A listener does not wait."""
        with contextlib.suppress(WorkbenchError):  # it has ended by itself
            self._put(self._stop)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def call_engine(self, number: int, function: Callable[[Any], Any]) -> Any:
        """Return `function(runner)`, run in an engine between two of its steps (WorkbenchError where that cannot be).

        A function without a name in a module travels by its code, where cloudpickle or Ray is installed.
        """
        content, answer = _pickled(function), Future[Any]()

        def ask() -> None:
            self._answers.append((number, answer))
            if self._slots.slots[number].state != "ready":
                self._give_up_answers(number)
            else:
                self._slots.send(self._slots.slots[number], message.EngineCall(content))

        self._put(ask)
        return answer.result()

    def _give_up_answers(self, number: int) -> None:
        for asked in [each for each in self._answers if each[0] == number]:
            self._answers.remove(asked)
            asked[1].set_exception(WorkbenchError("call: the engine's process has ended"))

    def call(self, function: Callable[[], Result]) -> Result:
        """Return `function()`, run in the coordinator's thread: between two messages, or at once where a listener
        calls it. Its errors are raised here."""
        if threading.current_thread() is self._thread:
            return function()
        found: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()

        def run() -> None:
            try:
                found.put((True, function()))
            except Exception as error:
                found.put((False, error))

        self._put(run)
        is_result, value = found.get()
        if not is_result:
            raise value
        return value

    def listen(self, listener: Emit) -> Callable[[], None]:
        """Call `listener` with every event of every request and every step, of all engines, in the coordinator's
        thread; return a function that ends it."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener) if listener in self._listeners else None

    def snapshot(self) -> PoolsSnapshot:
        """Return what the engines, the loans of pages and the transfers are now."""
        return self.call(self._snapshot)

    def pages_lent(self) -> int:
        """Return how many loans of pages there are now, in transfers and with borrowers."""
        return self.call(lambda: sum(self._slots.ledger.lent_pages().values()) if self._slots.ledger else 0)

    def recall(self) -> None:
        """Let every engine give back borrowed pages that no sequence references."""
        self._put(self._requests.recall)

    # What follows runs in the coordinator's thread.

    def _put(self, job: Callable[[], object]) -> None:
        with self._lock:
            if not self._takes_jobs:
                raise WorkbenchError(self._error or "the pools are closed")
            self._jobs.append(job)
        self._bell.set()

    def _work(self) -> None:
        try:
            for slot in self.slots:
                self._slots.start(slot, self._started)
            while not self._closed:
                self._bell.wait(self._slots.look_seconds)
                self._bell.clear()
                self._carry_out()
                for slot, error in self._slots.find_hung():
                    self._died(slot, error)
        except Exception as error:
            self._error = describe_error(error)
        finally:
            try:
                self._stop()
            finally:
                self._is_ready.set()
                with self._lock:
                    self._takes_jobs = False
                self._finish()

    def _finish(self) -> None:
        """Carry out the jobs of callers that did not know yet, whatever one of them raises, and close the memory."""
        while self._jobs:
            try:
                self._carry_out()
            except Exception as error:
                self._error = self._error or describe_error(error)
        self._slots.close()

    def _carry_out(self) -> None:
        while True:
            with self._lock:
                if not self._jobs:
                    return
                job = self._jobs.popleft()
            job()

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
                    self._requests.dispatch()

    def _started(self, slot: Slot, process: EngineProcess | None, error: str) -> None:
        if process is None:
            self._died(slot, error)
        elif self._closed:
            process.kill()
        else:
            self._slots.greet(slot, process)

    def _died(self, slot: Slot, error: str) -> None:
        """A process has ended: start another, and let its requests go on elsewhere."""
        if self._closed:
            return
        if slot.restarts == 0 and slot.state != "ready":  # it never worked
            raise WorkbenchError(f"{slot.name} could not start: {error}")
        self.counts["processes that died"] += 1
        self._requests.lost(slot, self._slots.end(slot), error)
        self._give_up_answers(slot.number)
        if slot.state == "starting":
            self._slots.start(slot, self._started)
        self._check_ready()
        self._requests.dispatch()

    def _heard(self, event: Event) -> None:
        for listener in tuple(self._listeners):
            try:
                listener(event)
            except Exception as error:  # the listener's fault: requests and other listeners go on
                if listener in self._listeners:
                    self._listeners.remove(listener)
                self._tell(f"a listener of the pools failed and gets no more events: {describe_error(error)}")

    def _tell(self, line: str) -> None:
        with contextlib.suppress(Exception):  # a closed stderr, say
            self._report(line)

    def _check_ready(self) -> None:
        if all(each.state in ("ready", "gone") for each in self.slots):
            self._is_ready.set()

    def _submit(self, request: Request, public: tuple[str, int] | None, emit: Emit) -> None:
        self._requests.submit(request, emit, public, "the pools are closed" if self._closed else "")

    def _stop(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            self._requests.end_all(FinishReason.ERROR if self._error else FinishReason.CANCELLED, self._error)
        finally:
            self._slots.stop()

    def _snapshot(self) -> PoolsSnapshot:
        now, ledger = time.perf_counter(), self._slots.ledger
        engines = tuple(
            EngineState(each.number + 1, each.name, each.state, each.restarts, tuple(sorted(each.requests)))
            for each in self.slots
        )
        lent = () if ledger is None else ledger.lent_pages().items()
        in_flight = tuple(
            PagesInFlight(
                *self._requests.public_name(key.request_id), each.home + 1,
                None if each.target is None else each.target + 1, each.num_pages, now - each.offered_at,
            )
            for key, each in self._requests.transfers.items()
        )  # fmt: skip
        loans = tuple(
            LentPages(home + 1, None if borrower is None else borrower + 1, pages) for (home, borrower), pages in lent
        )
        return PoolsSnapshot(engines, loans, in_flight, dict(self.counts))


def _pickled(function: Callable[[Any], Any]) -> bytes:
    try:
        return pickle.dumps(function)
    except Exception:  # of any kind: it has no name that another process knows
        for package in ("cloudpickle", "ray.cloudpickle"):
            with suppress(ImportError):
                return importlib.import_module(package).dumps(function)
        raise WorkbenchError("call: give a function of a module: a replica in another process has to find it") from None
