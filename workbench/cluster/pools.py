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
import os
import queue
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from multiprocessing import connection as connections
from typing import Any, Literal

import torch.distributed as dist

from workbench.cluster import pool_messages as message
from workbench.cluster.pool_processes import STARTERS, EngineProcess, StartProcess, host_address
from workbench.engine import inputs as intake
from workbench.engine.config import EngineConfig
from workbench.engine.handover import why_not_apart
from workbench.errors import WorkbenchError, describe_error
from workbench.kv_cache.lending import PageLedger, TransferKey
from workbench.kv_cache.shared_memory import SharedMemory, assign_homes
from workbench.request import FinishReason, Request
from workbench.trace.events import Decoded, Event, Finished, Prefilled, Submitted

MAX_ATTEMPTS = 5  # of a request: one that ends every process that it comes to must not end them all
Emit = Callable[[Event], None]
State = Literal["starting", "described", "building", "ready", "gone"]


@dataclass
class Slot:
    """A place in a pool, which one process after another fills."""

    number: int
    role: Literal["prefill", "decode"]
    config: EngineConfig
    process: EngineProcess | None = None
    state: State = "starting"
    described: message.Described | None = None
    restarts: int = 0
    requests: set[str] = field(default_factory=set)  # that are computed here

    @property
    def name(self) -> str:
        return f"{self.role} {self.number}"


@dataclass
class _Served:
    """A request that is being served: one sample of what was asked."""

    request: Request
    emit: Emit
    attempt: int = 0
    slot: int | None = None  # where it is computed now
    is_decoding: bool = False
    send_to: tuple[int, int] | None = None  # where its bytes go: a place, and the process there by its number
    generated: list[int] = field(default_factory=list)
    closing: bool = False
    is_submitted: bool = False
    moved: list[Finished] = field(default_factory=list)  # ends in engines that it left
    is_cancelled: bool = False
    has_events: bool = False  # of tokens, which a request computed anew would emit again
    num_scored: int = 0  # log-probabilities of the prompt that were emitted
    num_scored_again: int = 0  # by this attempt


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
        listener: receives every event of every request, those of attempts that failed too.
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
        listener: Emit | None = None,
    ):
        if num_prefill < 1 or num_decode < 0:
            raise WorkbenchError(f"a pool needs an engine at least, not {num_prefill} for prefill, {num_decode}")
        self.transfer, self.max_restarts, self.listener = transfer, max_restarts, listener
        self._start_process = STARTERS[processes] if isinstance(processes, str) else processes
        configs = [config.engine] * num_prefill + [(decode or config).engine] * num_decode
        self.slots = [
            Slot(number, "prefill" if number < num_prefill else "decode", each) for number, each in enumerate(configs)
        ]
        self.counts: Counter[str] = Counter()  # handed over, computed again, processes that died
        self._threads = threads or max(1, (os.cpu_count() or 1) // len(self.slots))
        self._served: dict[str, _Served] = {}
        self._queued: deque[str] = deque()  # requests without a process
        self._offers: dict[TransferKey, message.OfferPages] = {}  # without a decode engine
        self._offered_by: dict[TransferKey, int] = {}
        self._jobs: deque[Callable[[], None]] = deque()
        self._lock, self._takes_jobs = threading.Lock(), True
        self._bell, self._ear = socket.socketpair()
        self._memory: SharedMemory | None = None
        self._ledger: PageLedger | None = None
        self._totals: tuple[int, ...] = ()
        self._store: dist.TCPStore | None = None
        self._joined = 0
        self._closed, self._error = False, ""
        self._is_ready = threading.Event()
        if transfer == "gloo":
            host, limit = host_address() if processes == "ray" else "127.0.0.1", timedelta(seconds=60)
            self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=limit)
        self._thread = threading.Thread(target=self._work, name="pools' coordinator", daemon=True)
        self._thread.start()
        try:
            self._is_ready.wait()
            if self._error:
                raise WorkbenchError(self._error)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> PrefillDecodePools:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def stream(self, requests: Request | Iterable[Request]) -> Iterator[Event]:
        """Run requests and yield their events as they happen, as `Runner.stream`; closing the iterator cancels them."""
        waiting = deque(sorted([requests] if isinstance(requests, Request) else requests, key=intake.arrival))
        began, events, names = time.perf_counter(), queue.SimpleQueue[Event](), []
        left = 0
        try:
            while waiting or left:
                while waiting and began + intake.arrival(waiting[0]) <= time.perf_counter():
                    request = waiting.popleft()
                    names.append(request.request_id)
                    left += self.submit(request, events.put)
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
                    self._put(lambda: [self._cancel(name) for name in names])

    def submit(self, request: Request, emit: Emit) -> int:
        """Submit a request, whose events `emit` receives in the coordinator's thread; return the number of Finished
        events to expect: one per sample."""
        asked = request.sampling
        apart = asked.num_sequences == asked.n and not asked.beams
        samples = intake.split_samples(request) if apart else [request]
        for number, sample in enumerate(samples):
            sink = emit if len(samples) == 1 else _as_sample(emit, request.request_id, number)
            self._put(lambda sample=sample, sink=sink: self._submit(sample, sink))
        return asked.num_sequences

    def cancel(self, request_id: str) -> None:
        """End a request soon, with all its samples."""
        self._put(lambda: self._cancel(request_id))

    def kill(self, number: int) -> None:
        """End the process of a place at once, as its death would; for tests and exercises."""
        if (process := self.slots[number].process) is not None and process.pid is not None:
            os.kill(process.pid, 9)

    def close(self) -> None:
        """End all processes and wait for that; requests in progress end as cancelled."""
        if not self._closed:
            with contextlib.suppress(WorkbenchError):  # it has ended by itself
                self._put(self._stop)
        self._thread.join()
        self._bell.close()
        self._ear.close()
        if self._memory is not None:
            self._memory.close()

    def call(self, function: Callable[[], Any]) -> Any:
        """Return `function()`, run in the coordinator's thread between two messages."""
        found: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._put(lambda: found.put(function()))
        return found.get()

    def pages_lent(self) -> int:
        """Return how many loans of pages there are now, in transfers and with borrowers."""
        ledger = self._ledger
        if ledger is None:
            return 0
        return self.call(
            lambda: sum(sum(each.values()) for home in range(len(self.slots)) for each in ledger.lent_by(home))
        )

    def recall(self) -> None:
        """Let every engine give back borrowed pages that no sequence references."""
        self._put(self._recall)

    # What follows runs in the coordinator's thread.

    def _put(self, job: Callable[[], Any]) -> None:
        with self._lock:
            if not self._takes_jobs:
                raise WorkbenchError(self._error or "the pools are closed")
            self._jobs.append(job)
            self._bell.send(b"x")

    def _work(self) -> None:
        try:
            for slot in self.slots:
                self._start(slot)
            while not self._closed:
                self._turn()
        except Exception as error:
            self._error = describe_error(error)
            self._stop()
        finally:
            self._is_ready.set()
            with self._lock:
                self._takes_jobs = False
            while self._jobs:  # of callers that did not know yet
                self._jobs.popleft()()

    def _turn(self) -> None:
        by_connection = {slot.process.connection: slot for slot in self.slots if slot.process is not None}
        for ready in connections.wait([self._ear, *by_connection]):
            if ready is self._ear:
                self._ear.recv(4096)
                while self._jobs:
                    self._jobs.popleft()()
                continue
            slot = by_connection[ready]  # type: ignore[index] (a connection)
            try:
                found = slot.process.connection.recv() if slot.process is not None else None
            except (EOFError, OSError):
                self._died(slot, "its process has ended")
                continue
            if found is not None:
                self._take(slot, found)

    def _start(self, slot: Slot) -> None:
        slot.state = "starting"
        slot.process = self._start_process(slot.name)
        self._send(slot, message.Start(slot.name, slot.config, self._threads))

    def _send(self, slot: Slot, found: object) -> None:
        """Send a message; if the process has died, its end of the connection says so next."""
        if slot.process is not None:
            try:
                slot.process.connection.send(found)
            except OSError:
                return

    def _take(self, slot: Slot, found: object) -> None:
        match found:
            case message.Described():
                slot.described, slot.state = found, "described"
                self._begin_when_all_described(slot)
            case message.Ready():
                slot.state = "ready"
                self._connect(slot)
                if all(each.state in ("ready", "gone") for each in self.slots):
                    self._is_ready.set()
                self._dispatch()
            case message.StepReport():
                self._progress(slot, found)
            case message.EngineFailed(error):
                self._died(slot, error)

    def _begin_when_all_described(self, slot: Slot) -> None:
        """Compare layouts, and give each process its pages once all have said what they want."""
        if self._ledger is not None or (self.transfer == "gloo" and self._is_ready.is_set()):
            self._begin(slot)
            return
        described = [each.described for each in self.slots]
        if any(each is None for each in described):
            return
        all_described = [each for each in described if each is not None]
        for each, its in zip(self.slots[1:], all_described[1:], strict=True):
            all_described[0].layout.check_equal(its.layout, self.slots[0].name, each.name)
        if self.transfer == "shared":
            self._totals, homes = assign_homes([each.num_pages for each in all_described])
            self._memory = SharedMemory.create(all_described[0].layout.memory_bytes(self._totals))
            self._ledger = PageLedger(homes)
        for each in self.slots:
            self._begin(each)

    def _begin(self, slot: Slot) -> None:
        assert slot.described is not None
        first = next(each.described for each in self.slots if each.described is not None)
        first.layout.check_equal(slot.described.layout, "the other engines", slot.name)
        slot.state = "building"
        if self._ledger is None or self._memory is None:
            self._send(slot, message.Begin(is_successor=slot.restarts > 0))
            return
        homes = tuple(self._ledger.homes[slot.number])
        lent = self._ledger.lent_by(slot.number)
        self._send(slot, message.Begin(self._memory.address, self._totals, homes, lent, slot.restarts > 0))

    def _connect(self, slot: Slot) -> None:
        """Join a new process with each of the other pool, where bytes are sent."""
        if self._store is None:
            return
        for other in self.slots:
            if other.role != slot.role and other.state == "ready":
                prefill, decode = (slot, other) if slot.role == "prefill" else (other, slot)
                name, address = f"pages {self._joined}", (self._store.host, self._store.port)
                self._joined += 1
                self._send(decode, message.Connect(prefill.number, name, address, sends=False))
                self._send(prefill, message.Connect(decode.number, name, address, sends=True))

    def _submit(self, request: Request, emit: Emit) -> None:
        if request.request_id in self._served or self._closed:
            error = f"request id {request.request_id!r} is already taken; ids must differ"
            if self._closed:
                error = "the pools are closed"
            emit(Finished(time.perf_counter(), request.request_id, reason=str(FinishReason.REFUSED), error=error))
            return
        self._served[request.request_id] = _Served(request, emit)
        self._queued.append(request.request_id)
        self._dispatch()

    def _cancel(self, request_id: str) -> None:
        names = [name for name in self._served if name == request_id or name.rpartition("#")[0] == request_id]
        for name in names:
            served = self._served[name]
            served.is_cancelled = True
            if served.slot is not None:
                self._send(self.slots[served.slot], message.Cancel(name))
                continue
            for key in [key for key in self._offers if key.request_id == name]:
                self._withdraw(key)
            self._end(name, FinishReason.CANCELLED)

    def _end(self, name: str, reason: FinishReason, error: str = "") -> None:
        """End a request that no process has."""
        served = self._served.pop(name)
        if name in self._queued:
            self._queued.remove(name)
        ids = tuple(served.generated)
        end = Finished(time.perf_counter(), name, reason=str(reason), error=error, token_ids=ids)
        self._emit(served, _merged(served, end, 0))

    def _dispatch(self) -> None:
        """Give processes to requests and offers that wait for one, in order."""
        for key in list(self._offers):
            self._place(key)
        for _ in range(len(self._queued)):
            name = self._queued.popleft()
            if not self._run(name):
                self._queued.appendleft(name)
                return

    def _run(self, name: str) -> bool:
        """Give a request to a process, up to its first token or whole; return whether there is one."""
        served = self._served[name]
        prefill, decode = (self._pool(role) for role in ("prefill", "decode"))
        request = served.request
        if served.generated:
            request = replace(request, generated_ids=tuple(served.generated), closing=served.closing)
        whole = bool(why_not_apart(request)) or not decode or not prefill
        pool = (decode or prefill) if whole else prefill
        ready = [slot for slot in pool if slot.state == "ready"]
        if not ready:
            if pool:
                return False  # one is being started
            self._end(name, FinishReason.ERROR, "no engine is left: their processes ended too often")
            return True
        slot = min(ready, key=lambda each: (len(each.requests), each.number))
        served.send_to = None
        if self.transfer == "gloo" and not whole:
            targets = [each for each in decode if each.state == "ready"]
            if not targets:
                return False
            coming = Counter(each.send_to[0] for each in self._served.values() if each.send_to and not each.is_decoding)
            target = min(targets, key=lambda each: (len(each.requests) + coming[each.number], each.number))
            served.send_to = target.number, target.restarts
        served.slot, served.is_decoding = slot.number, whole
        served.attempt += 1
        served.num_scored_again = 0
        slot.requests.add(name)
        target_number = None if served.send_to is None else served.send_to[0]
        self._send(slot, message.Run(request, served.attempt, not whole, target_number))
        return True

    def _pool(self, role: str) -> list[Slot]:
        """Return the places of a pool that have a process, or will have one."""
        return [slot for slot in self.slots if slot.role == role and slot.state != "gone"]

    def _progress(self, slot: Slot, found: message.StepReport) -> None:
        for attempt, event in found.events:
            self._event(slot, attempt, event)
        for offer in found.offers:
            if self._ledger is not None:
                self._ledger.offer(offer.key, slot.number, offer.handed.pages)
            served = self._served.get(offer.key.request_id)
            self._offers[offer.key], self._offered_by[offer.key] = offer, slot.number
            if served is None or served.is_cancelled or served.attempt != offer.key.attempt:
                self._withdraw(offer.key)
                if served is not None and served.is_cancelled and served.slot is None:
                    self._end(offer.key.request_id, FinishReason.CANCELLED)
                continue
            served.generated = list(offer.request.generated_ids)
            served.closing = offer.request.closing
            self._place(offer.key)
        if found.offers:
            self._dispatch()
        if self._ledger is not None:
            for pages, tainted in ((found.returned, False), (found.tainted, True)):
                if pages:
                    self._send_home(self._ledger.give_back(slot.number, pages), tainted)
        if found.needs_pages:
            self._recall()

    def _recall(self) -> None:
        for slot in self.slots:
            if slot.state == "ready":
                self._send(slot, message.Recall())

    def _place(self, key: TransferKey) -> None:
        """Give an offer to a decode engine. It waits while one is started; if none will be, its request is queued
        again, for the next `_dispatch`."""
        offer, served = self._offers[key], self._served[key.request_id]
        pool = self._pool("decode")
        ready = [slot for slot in pool if slot.state == "ready"]
        if served.send_to is not None:
            pool = ready = [slot for slot in ready if (slot.number, slot.restarts) == served.send_to]
        if not ready:
            if not pool:
                self._withdraw(key)
                self._queued.append(key.request_id)
                self.counts["computed again"] += 1
            return
        slot = min(ready, key=lambda each: (len(each.requests), each.number))
        del self._offers[key]
        if self._ledger is not None:
            self._ledger.claim(key, slot.number)
        served.slot, served.is_decoding = slot.number, True
        slot.requests.add(key.request_id)
        self.counts["handed over"] += 1
        home = self._offered_by.pop(key)
        sender = None if self._store is None else home
        self._send(slot, message.Adopt(key, offer.request, offer.handed, sender, offer.sent_pass))

    def _withdraw(self, key: TransferKey) -> None:
        """End a transfer that no process has claimed."""
        del self._offers[key], self._offered_by[key]
        if self._ledger is not None:
            self._send_home(self._ledger.withdraw(key))
        for slot in self.slots if self._store is not None else ():
            if slot.state == "ready":
                self._send(slot, message.Drop(key))

    def _send_home(self, pages: dict[int, list[list[int]]], tainted: bool = False) -> None:
        """Tell the homes of pages that loans have ended. One that is not built yet begins without them."""
        for home, its in pages.items():
            if self.slots[home].state in ("building", "ready"):
                self._send(self.slots[home], message.TakeBack(its, tainted))

    def _event(self, slot: Slot, attempt: int, event: Event) -> None:
        name = event.request_id
        served = self._served.get(name)
        if served is None or served.slot != slot.number or served.attempt != attempt:
            return  # of an attempt that was given up
        match event:
            case Submitted():
                if served.is_submitted:
                    return
                served.is_submitted = True
            case Prefilled(logprobs=logprobs) if logprobs:
                known = max(0, served.num_scored - served.num_scored_again)
                served.num_scored_again += len(logprobs)
                served.num_scored = max(served.num_scored, served.num_scored_again)
                event = replace(event, logprobs=logprobs[known:])
            case Decoded():
                if why_not_apart(served.request) == "":
                    served.generated.append(event.token_id)
                    served.closing = event.closing
                served.has_events = True
            case Finished(reason=FinishReason.MOVED):
                served.moved.append(event)
                served.slot = None
                slot.requests.discard(name)
                return
            case Finished():
                page_size = slot.config.cache.page_size
                event = _merged(served, event, page_size)
                self._drop_bytes(served)
                if served.request.sampling.num_sequences == 1 or self._all_ended(served):
                    del self._served[name]
                    slot.requests.discard(name)
        self._emit(served, event)

    def _all_ended(self, served: _Served) -> bool:
        served.moved.append(Finished(0.0))
        return len(served.moved) == served.request.sampling.num_sequences

    def _emit(self, served: _Served, event: Event) -> None:
        if self.listener is not None:
            self.listener(event)
        served.emit(event)

    def _died(self, slot: Slot, error: str) -> None:
        """A process has ended: start another, and let its requests go on elsewhere."""
        assert slot.process is not None
        slot.process.kill()
        slot.process = None
        if not self._is_ready.is_set():  # it never worked
            raise WorkbenchError(f"{slot.name} could not start: {error}")
        self.counts["processes that died"] += 1
        lost, slot.requests = slot.requests, set()
        slot.state = "starting" if slot.restarts < self.max_restarts else "gone"
        if self._ledger is not None:
            self._send_home(self._ledger.died(slot.number), tainted=True)
        for name in [name for name in self._served if name in lost]:
            self._lost(name)
        for key in list(self._offers) if self._store is not None else ():
            self._place(key)  # bytes that went there are lost
        if slot.state == "starting":
            slot.restarts += 1
            self._start(slot)
        self._dispatch()

    def _drop_bytes(self, served: _Served) -> None:
        """Let a decode engine forget layers that it was sent for nothing: no handover follows."""
        if served.send_to is not None and not served.is_decoding:
            key = TransferKey(served.request.request_id, served.attempt)
            target = self.slots[served.send_to[0]]
            if target.state == "ready":
                self._send(target, message.Drop(key))

    def _lost(self, name: str) -> None:
        served = self._served[name]
        self._drop_bytes(served)
        served.slot = None
        if served.is_cancelled:
            self._end(name, FinishReason.CANCELLED)
        elif served.attempt >= MAX_ATTEMPTS:
            self._end(name, FinishReason.ERROR, f"its process ended {MAX_ATTEMPTS} times")
        elif served.has_events and (why := why_not_apart(served.request)):
            self._end(name, FinishReason.ERROR, f"its process ended, and {why}")
        else:
            self.counts["computed again"] += 1
            self._queued.append(name)

    def _stop(self) -> None:
        if self._closed:
            return
        self._closed = True
        for name in list(self._served):
            self._end(name, FinishReason.ERROR if self._error else FinishReason.CANCELLED, self._error)
        for slot in self.slots:
            self._send(slot, message.Stop())
        for slot in self.slots:
            if slot.process is not None:
                slot.process.kill()
                slot.process = None


def _as_sample(emit: Emit, request_id: str, number: int) -> Emit:
    return lambda event: emit(replace(event, request_id=request_id, sample=number))


def _merged(served: _Served, end: Finished, page_size: int) -> Finished:
    """Return the end of a request with what the engines that it left had counted."""
    if not served.moved or served.request.sampling.num_sequences > 1:
        return end
    first, last = served.moved[0], served.moved[-1]
    adopted = last.prompt_tokens // page_size * page_size if page_size else 0
    return replace(
        end,
        prompt_tokens=first.prompt_tokens,
        cached_tokens=first.cached_tokens,
        computed_tokens=end.computed_tokens + sum(each.computed_tokens for each in served.moved),
        written_tokens=sum(each.written_tokens for each in served.moved) + max(0, end.written_tokens - adopted),
        shared_pages=first.shared_pages,
        pinned=first.pinned,
        prompt_logprobs=first.prompt_logprobs,
    )
