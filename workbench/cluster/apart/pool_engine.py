"""Run one engine of a pool in its own process: take requests, step, hand sequences over, and give pages back.

    coordinator: Run --> inbox --pages suffice--> runner --first token--> OfferPages
                 Adopt -----------------------------> runner --tokens--> StepReport

The process ends when its connection to the coordinator closes.
"""

from __future__ import annotations

import os
import pickle
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

import torch

from workbench.cluster.apart.adoption import BorrowedPages
from workbench.cluster.apart.channels import PageChannels
from workbench.cluster.apart.handover import (
    adopt,
    drop_idle_borrowed,
    hand_over,
    pop_returned,
    ready_sequences,
    take_back,
    why_not_apart,
)
from workbench.cluster.apart.lending import TransferKey
from workbench.cluster.apart.page_channel import LayerSending, PageSender
from workbench.cluster.apart.page_layout import describe_layout
from workbench.cluster.apart.pool_messages import (
    Adopt,
    Begin,
    Called,
    Cancel,
    ChannelAddress,
    Connect,
    Described,
    Disconnect,
    Drop,
    EngineCall,
    EngineFailed,
    OfferPages,
    Ping,
    Pong,
    Ready,
    Recall,
    Run,
    Start,
    StepReport,
    Stop,
    TakeBack,
)
from workbench.cluster.apart.shared_memory import SharedMemory, SharedPages
from workbench.cluster.replica import PageCounts, fingerprint_of, for_clients, tokens_in_cache
from workbench.engine.cache import Adoption, cache_num_pages
from workbench.engine.config import EngineConfig
from workbench.engine.loaded_model import LoadedModel
from workbench.engine.runner import Runner
from workbench.errors import describe_error
from workbench.kv_cache.pages import NULL_PAGE
from workbench.request import FinishReason, Request, Sequence
from workbench.trace.events import Event, Finished, Stepped

MAX_IDLE_SECONDS = 0.05  # polling interval for arriving pages


@dataclass(frozen=True)
class _FromChannel:
    """A channel thread's message to the coordinator; it takes the inbox, since only one thread may send."""

    message: object


class PoolEngine:
    """One engine of a pool, in a process of its own.

    Args:
        connection: to the coordinator.
        start: its first message.
        load: loads the model.
        host: the address of this host, which the other processes can reach.
    """

    def __init__(self, connection: Connection, start: Start, load: Callable[[EngineConfig], LoadedModel], host: str):
        self.connection = connection
        torch.set_num_threads(start.threads)
        self.config, self.transfer = start.config, start.transfer
        self.loaded = load(start.config)
        self.inbox: queue.SimpleQueue = queue.SimpleQueue()
        self.queue: deque[Event] = deque()
        self.waiting: deque[Run] = deque()  # requests that wait for pages
        self.attempts: dict[str, int] = {}
        self.left: dict[str, int] = {}  # request -> Finished events still to come
        self.moving: dict[str, int | None] = {}  # request to hand over -> channel for its pages
        self.channels = PageChannels(host, self._send_soon, lambda: self.inbox.put(None))
        self.steps: list[Event] = []
        self.adopted: list[TransferKey] = []
        self.pages = PageCounts()  # as last reported
        self.asked_for_pages = False
        self.sending: LayerSending | None = None
        self.runner: Runner

    def _send_soon(self, message: object) -> None:
        self.inbox.put(_FromChannel(message))

    def describe(self) -> Described:
        """Return the layout of the cache's pages and the number of pages requested. Engines that hand pages over must
        have equal layouts.
        """
        model = self.loaded.transformer
        layout = None if self.transfer is None else describe_layout(model, self.config)
        return Described(layout, cache_num_pages(model, self.config), time.perf_counter())

    def begin(self, begin: Begin) -> None:
        """Build the runner. An engine that replaces a dead one zeroes pages that the dead one may have left half
        written.
        """
        shared = None
        if begin.memory is not None:
            memory = SharedMemory.open(begin.memory)
            shared = SharedPages(memory, begin.totals, begin.homes, begin.lent)
        self.runner = Runner(
            self.config,
            self.loaded,
            listener=self._listen,
            build_pages=shared and shared.build,
            report=lambda line: None,
        )
        if shared is not None:
            shared.memory.close()
        if self.transfer == "gloo":
            self.sending = LayerSending(self.runner, self._target)
            self.runner.core.executor.hooks.append(self.sending)
        if begin.is_successor and shared is not None:
            for group, (home, lent) in enumerate(zip(begin.homes, begin.lent, strict=True)):
                self.runner.store.zero_pages(group, (page for page in home if page not in lent))

    def _listen(self, event: Event) -> None:
        if isinstance(event, Stepped):  # other events come with their requests
            self.steps.append(event)

    def serve(self) -> None:
        """Receive messages and run steps until `Stop`."""
        while True:
            if not self._receive_messages():
                return
            self._start_waiting()
            self._adopt_arrived()
            offers: list[OfferPages] = []
            if self.runner.has_unfinished_requests:
                self.runner.step()
                offers = self._hand_over()
            self._report(offers)

    def _receive_messages(self) -> bool:
        idle = not self.runner.has_unfinished_requests
        while True:
            try:
                wait = idle and not self.queue
                limit = MAX_IDLE_SECONDS if self.channels.is_waiting or self.waiting else None
                message = self.inbox.get(block=wait, timeout=limit if wait else None)
            except queue.Empty:
                self.asked_for_pages &= not wait  # ask again: lent pages may be idle now
                return True
            if isinstance(message, Stop):
                return False
            self._carry_out(message)
            idle = False

    def _carry_out(self, message: object) -> None:
        runner = self.runner
        match message:
            case Run():
                self.waiting.append(message)
            case Adopt():
                self._adopt(message)
            case TakeBack(pages, tainted):
                take_back(runner, pages, tainted)
                self.asked_for_pages = False
            case Recall():
                drop_idle_borrowed(runner)
            case Cancel(request_id):
                self._cancel(request_id)
            case Drop(key):
                self.channels.drop(key)
            case Connect():
                self.channels.connect(message)
            case ChannelAddress():
                self.channels.meet(message)
            case Disconnect():
                self.channels.disconnect(message)
            case Ping():
                self.connection.send(Pong())
            case EngineCall(function):
                self.connection.send(_called(function, runner))
            case _FromChannel(its):
                self.connection.send(its)

    def _cancel(self, request_id: str) -> None:
        for run in [run for run in self.waiting if run.request.request_id == request_id]:
            self.waiting.remove(run)
            self._end_cancelled(run.request, run.attempt)
        for adoption in self.channels.cancel(request_id):
            self._end_cancelled(adoption.request, adoption.key.attempt)
        self.runner.cancel(request_id)

    def _end_cancelled(self, request: Request, attempt: int) -> None:
        """End a request that was not yet submitted to the runner."""
        name, asked = request.request_id, request.sampling
        self.attempts[name], self.left[name] = attempt, asked.num_sequences
        for sample in range(asked.num_sequences):
            self.queue.append(Finished(
                self.runner.clock(), name, sample=sample, reason=str(FinishReason.CANCELLED),
                token_ids=request.generated_ids, prompt_tokens=len(request.prompt_ids),
            ))  # fmt: skip

    def _start_waiting(self) -> None:
        """Submit waiting requests in order while home pages suffice for all of them: no prompt is preempted."""
        while self.waiting and self._has_pages(self.waiting[0]):
            run = self.waiting.popleft()
            name = run.request.request_id
            self.attempts[name] = run.attempt
            if run.hands_over:
                self.moving[name] = run.channel
            self.left[name] = self.runner.submit(run.request, self.queue)

    def _has_pages(self, run: Run) -> bool:
        """Return whether the remaining home pages suffice for `run` and the maximum need of running requests. A request
        that can never fit passes, and is refused later."""
        pools, manager, request = self.runner.scheduler.pools, self.runner.kv_cache.manager, run.request
        if self.transfer != "shared":
            return True  # no pages are lent: the scheduler waits and preempts as usual
        known = len(request.prompt_ids) + len(request.generated_ids)
        most = known + 1 if run.hands_over else len(request.prompt_ids) + request.sampling.max_output_tokens
        needs = [manager.peak_pages(min(most, self._context), len(request.prompt_ids), request.sampling.num_sequences)]
        if any(need > pool.num_pages for need, pool in zip(needs[0], pools, strict=True)):
            return True
        for name, sequence in self.runner.tracker.sequences.items():
            end = len(sequence.token_ids) + 1 if name in self.moving else sequence.length_limit
            peak = manager.peak_pages(min(end, self._context), sequence.prompt_length)
            held = [sum(page != NULL_PAGE for page in pages) for pages in sequence.pages] or [0] * len(pools)
            needs.append([max(0, most - has) for most, has in zip(peak, held, strict=True)])
        return all(sum(each) <= pool.num_available for each, pool in zip(zip(*needs, strict=True), pools, strict=True))

    @property
    def _context(self) -> int:
        return self.loaded.transformer.spec.max_position_embeddings

    def _adopt(self, message: Adopt) -> None:
        self.attempts[message.key.request_id] = message.key.attempt
        if message.channel is not None:
            self.channels.expect(message)
        else:
            self._go_on(message, BorrowedPages(message.handed))

    def _adopt_arrived(self) -> None:
        for message, found in self.channels.pop_arrived(self.runner.store):
            self._go_on(message, found)

    def _go_on(self, message: Adopt, pages: Adoption | None) -> None:
        """Submit a request that another engine has begun, on the pages it computed; pages that are missing or do not
        fit are computed again."""
        name = message.key.request_id
        if pages is None:
            self.left[name] = self.runner.submit(message.request, self.queue)
            return
        self.left[name] = adopt(self.runner, message.request, pages, self.queue)
        tracker = self.runner.tracker
        sequence = tracker.sequences.get(name)
        if sequence is None:
            has_pages = tracker.compiling.reserves(name)  # it adopts the pages once its grammar is compiled
        else:
            has_pages = sequence.num_computed_tokens >= message.handed.num_computed_tokens
        if has_pages:
            self.adopted.append(message.key)

    def _target(self, sequence: Sequence) -> tuple[TransferKey, PageSender] | None:
        """Return the transfer and channel of a sequence to be sent; None for a sequence that stays."""
        name = sequence.request_id
        if (channel := self.moving.get(name)) is None or why_not_apart(sequence.request):
            return None
        return TransferKey(name, self.attempts[name]), self.channels.senders[channel]

    def _hand_over(self) -> list[OfferPages]:
        offers = []
        for sequence in list(ready_sequences(self.runner)):
            name = sequence.request_id
            if name not in self.moving:
                continue
            key, channel = TransferKey(name, self.attempts[name]), self.moving[name]
            if channel is None:
                made = hand_over(self.runner, sequence)
                offers.append(OfferPages(key, made.request, made.handed))
            elif self.sending is not None and self.sending.has_sent(sequence, key):
                offers.append(self.sending.hand_over(sequence, key, channel))
        return offers

    def _report(self, offers: list[OfferPages]) -> None:
        events: list[tuple[int, Event]] = []
        while self.queue:
            event = self.queue.popleft()
            name = event.request_id
            events.append((self.attempts[name], for_clients(event)))
            if isinstance(event, Finished):
                self._forget(name)
        events += [(0, step) for step in self.steps]
        adopted, self.steps, self.adopted = self.adopted, [], []
        returned = pop_returned(self.runner)
        needs = bool(self.waiting) and not self.runner.has_unfinished_requests and not self.asked_for_pages
        self.asked_for_pages |= needs
        progress = StepReport(events, offers, adopted, returned if any(returned) else [], needs)
        pages = PageCounts.of_runner(self.runner)
        if progress != StepReport() or pages != self.pages:
            self.connection.send(replace(progress, pages=pages))
            self.pages = pages

    def _forget(self, name: str) -> None:
        """Forget a request once its last sample has ended."""
        self.left[name] = self.left.get(name, 1) - 1
        if self.left[name] == 0:
            self.moving.pop(name, None)
            if self.sending is not None:
                self.sending.forget(TransferKey(name, self.attempts[name]))
            del self.left[name], self.attempts[name]


def _called(function: bytes, runner: Runner) -> Called:
    try:
        return Called(pickle.dumps(pickle.loads(function)(runner)))
    except Exception as error:  # any error goes to the caller, also that of a value that cannot be pickled
        return Called(error=describe_error(error))


def run_engine(
    connection: Connection,
    load: Callable[[EngineConfig], LoadedModel] | None = None,
    orphaned: Callable[[PoolEngine], None] | None = None,
    host: str = "127.0.0.1",
) -> PoolEngine | None:
    """Run the engine that the coordinator configures, until the coordinator stops it or ends.

    Args:
        connection: to the coordinator.
        load: loads the model; None loads the model of the config.
        orphaned: called in another thread when the coordinator has ended; None ends the process, even mid-step.
        host: the address of this host, which the other processes can reach.

    Returns:
        the engine, or None if it did not begin.
    """
    engine = None
    try:
        start = connection.recv()
        assert isinstance(start, Start)
        load = load or (lambda config: LoadedModel.load(config, lambda line: None))
        engine = PoolEngine(connection, start, load, host)
        connection.send(engine.describe())
        threading.Thread(target=_receive, args=(engine, orphaned or _exit), daemon=True).start()
        begin = engine.inbox.get()
        if not isinstance(begin, Begin):
            return engine  # the pools were closed
        engine.begin(begin)
        engine.pages = PageCounts.of_runner(engine.runner)
        runner = engine.runner
        connection.send(Ready(engine.pages, fingerprint_of(runner), tokens_in_cache(runner)))
        engine.serve()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return engine
    except Exception as error:
        connection.send(EngineFailed(describe_error(error)))
        raise
    finally:
        if engine is not None:
            engine.channels.close()
    return engine


def _receive(engine: PoolEngine, orphaned: Callable[[PoolEngine], None]) -> None:
    try:
        while True:
            engine.inbox.put(engine.connection.recv())
    except (EOFError, OSError):
        orphaned(engine)


def _exit(engine: PoolEngine) -> None:
    os._exit(0)


if __name__ == "__main__":
    run_engine(Connection(int(sys.argv[1])))
