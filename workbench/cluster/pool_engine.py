"""Run one engine of a pool in a process of its own: take requests, step, hand sequences over, and give pages back.

    coordinator: Run --> inbox --pages suffice--> runner --first token--> OfferPages
                 Adopt -----------------------------> runner --tokens--> StepReport

The process ends with its connection: no coordinator, no engine.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection

import torch

from workbench.cluster.page_channel import PageReceiver, PageSender, SendingExecutor
from workbench.cluster.pool_messages import (
    Adopt,
    Begin,
    Cancel,
    Connect,
    Described,
    Drop,
    EngineFailed,
    OfferPages,
    Ready,
    Recall,
    Run,
    Start,
    StepReport,
    Stop,
    TakeBack,
)
from workbench.engine.cache import cache_num_pages, describe_layout
from workbench.engine.config import EngineConfig
from workbench.engine.handover import adopt, hand_over, pop_returned, ready_sequences, take_back, why_not_apart
from workbench.engine.loaded_model import LoadedModel
from workbench.engine.runner import Runner
from workbench.errors import describe_error
from workbench.kv_cache.adoption import Adoption, BorrowedPages
from workbench.kv_cache.lending import SharedPagePool, TransferKey
from workbench.kv_cache.pages import NULL_PAGE
from workbench.kv_cache.shared_memory import SharedMemory, SharedPages
from workbench.request import FinishReason, Sequence
from workbench.trace.events import Event, Finished

MAX_IDLE_SECONDS = 0.05  # between looks at bytes that are to arrive


class PoolEngine:
    """The engine of one process."""

    def __init__(self, connection: Connection, start: Start, load: Callable[[EngineConfig], LoadedModel]):
        self.connection = connection
        torch.set_num_threads(start.threads)
        self.config = start.config
        self.loaded = load(start.config)
        self.inbox: queue.SimpleQueue = queue.SimpleQueue()
        self.queue: deque[Event] = deque()
        self.waiting: deque[Run] = deque()  # for pages
        self.attempts: dict[str, int] = {}
        self.left: dict[str, int] = {}  # ends to come, by request
        self.moving: dict[str, int | None] = {}  # requests to hand over, and where their bytes go
        self.senders: dict[int, PageSender] = {}
        self.receivers: dict[int, PageReceiver] = {}
        self.arriving: list[Adopt] = []  # whose bytes are not all here
        self.asked_for_pages = False
        self.sending: SendingExecutor | None = None
        self.runner: Runner

    def describe(self) -> Described:
        model = self.loaded.transformer
        layout = describe_layout(model, self.config)
        return Described(layout, cache_num_pages(model, self.config), model.spec.max_position_embeddings)

    def begin(self, begin: Begin) -> None:
        """Build the runner. A successor zeroes what its predecessor may have left half written."""
        shared = None
        if begin.memory is not None:
            memory = SharedMemory.open(begin.memory)
            shared = SharedPages(memory, begin.totals, begin.homes, begin.lent)
        self.runner = Runner(self.config, self.loaded, shared_pages=shared, report=lambda line: None)
        if shared is not None:
            shared.memory.close()
        if shared is None:  # bytes may be asked for
            self.sending = SendingExecutor(self.runner.executor, self.runner, self._target)
            self.runner.set_executor(self.sending)
        if begin.is_successor and shared is not None:
            for group, (home, lent) in enumerate(zip(begin.homes, begin.lent, strict=True)):
                self.runner.store.zero_pages(group, (page for page in home if page not in lent))

    def serve(self) -> None:
        """Take messages and run steps until `Stop`."""
        while True:
            if not self._take_messages():
                return
            self._start_waiting()
            self._adopt_arrived()
            offers: list[OfferPages] = []
            if self.runner.has_unfinished_requests:
                self.runner.step()
                offers = self._hand_over()
            self._report(offers)

    def _take_messages(self) -> bool:
        idle = not self.runner.has_unfinished_requests
        while True:
            try:
                wait = idle and not self.queue
                limit = MAX_IDLE_SECONDS if self.arriving or self.waiting else None
                message = self.inbox.get(block=wait, timeout=limit if wait else None)
            except queue.Empty:
                self.asked_for_pages &= not wait  # ask again: what is lent may be idle now
                return True
            if isinstance(message, Stop):
                return False
            self._take(message)
            idle = False

    def _take(self, message: object) -> None:
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
                if runner.kv_cache.manager.prefix_cache is not None:
                    runner.kv_cache.manager.prefix_cache.drop_idle_borrowed()
            case Cancel(request_id):
                self._cancel(request_id)
            case Drop(key):
                for receiver in self.receivers.values():
                    receiver.drop(key)
            case Connect(peer, _, _, sends):
                if sends:
                    self.senders[peer] = PageSender(message)
                else:
                    self._adopt_arrived(lost=peer)
                    self.receivers[peer] = PageReceiver(message, lambda: self.inbox.put(None))

    def _cancel(self, request_id: str) -> None:
        for run in [run for run in self.waiting if run.request.request_id == request_id]:
            self.waiting.remove(run)
            self.attempts[request_id] = run.attempt
            reason = str(FinishReason.CANCELLED)
            self.queue.append(Finished(self.runner.clock(), request_id, reason=reason))
        for adoption in [each for each in self.arriving if each.key.request_id == request_id]:
            self.arriving.remove(adoption)
            self.attempts[request_id] = adoption.key.attempt
            ids, reason = adoption.request.generated_ids, str(FinishReason.CANCELLED)
            self.queue.append(Finished(self.runner.clock(), request_id, reason=reason, token_ids=ids))
        self.runner.cancel(request_id)

    def _start_waiting(self) -> None:
        """Submit requests in order while this process's own pages surely suffice for all: no prompt is preempted."""
        while self.waiting and self._has_pages(self.waiting[0]):
            run = self.waiting.popleft()
            name = run.request.request_id
            self.attempts[name] = run.attempt
            if run.hands_over:
                self.moving[name] = run.send_to
            self.left[name] = self.runner.submit(run.request, self.queue)

    def _has_pages(self, run: Run) -> bool:
        """Return whether the home pages that are left suffice for `run` and all that others may still take. A request
        that never fits is let through, to be refused."""
        pools, manager, request = self.runner.scheduler.pools, self.runner.kv_cache.manager, run.request
        if not isinstance(pools[0], SharedPagePool):
            return True  # nothing is lent, and the scheduler waits and preempts as ever
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
        name = message.key.request_id
        self.attempts[name] = message.key.attempt
        if message.sender is not None and message.handed is not None:
            self.arriving.append(message)
        elif message.handed is None:
            self.left[name] = self.runner.submit(message.request, self.queue)
        else:
            self.left[name] = adopt(self.runner, message.request, BorrowedPages(message.handed), self.queue)

    def _adopt_arrived(self, lost: int | None = None) -> None:
        """Submit the requests whose bytes are here; those whose bytes are lost are computed again.

        Args:
            lost: a process that has ended: what is not here will not come.
        """
        for message in list(self.arriving):
            assert message.handed is not None and message.sender is not None
            name, receiver = message.key.request_id, self.receivers.get(message.sender)
            found: Adoption | None = None
            if receiver is not None:
                ended = receiver.error is not None or message.sender == lost  # before the look at what is here
                found = receiver.pop(message.key, message.sent_pass, message.handed, self.runner.store)
                if found is None and not ended:
                    continue
            self.arriving.remove(message)
            if found is None:
                self.left[name] = self.runner.submit(message.request, self.queue)
            else:
                self.left[name] = adopt(self.runner, message.request, found, self.queue)

    def _target(self, sequence: Sequence) -> tuple[TransferKey, PageSender] | None:
        """Return the transfer of a sequence that is to be sent, and its channel."""
        name = sequence.request_id
        if (target := self.moving.get(name)) is None or why_not_apart(sequence.request):
            return None
        return TransferKey(name, self.attempts[name]), self.senders[target]

    def _hand_over(self) -> list[OfferPages]:
        offers = []
        for sequence in list(ready_sequences(self.runner)):
            name = sequence.request_id
            if name not in self.moving:
                continue
            key, target = TransferKey(name, self.attempts[name]), self.moving[name]
            if target is None:
                made = hand_over(self.runner, sequence)
                offers.append(OfferPages(key, made.request, made.handed))
            elif self.sending is not None and self.sending.has_sent(sequence, key):
                offers.append(self.sending.hand_over(sequence, key))
        return offers

    def _report(self, offers: list[OfferPages]) -> None:
        events: list[tuple[int, Event]] = []
        while self.queue:
            event = self.queue.popleft()
            name = event.request_id
            events.append((self.attempts[name], event))
            if isinstance(event, Finished):
                self._forget(name)
        returned, tainted = pop_returned(self.runner)
        needs = bool(self.waiting) and not self.runner.has_unfinished_requests and not self.asked_for_pages
        self.asked_for_pages |= needs
        progress = StepReport(events, offers, returned if any(returned) else [], tainted if any(tainted) else [], needs)
        if progress != StepReport():
            self.connection.send(progress)

    def _forget(self, name: str) -> None:
        """Forget a request with its last end."""
        self.left[name] = self.left.get(name, 1) - 1
        if self.left[name] == 0:
            self.moving.pop(name, None)
            if self.sending is not None:
                self.sending.forget(TransferKey(name, self.attempts[name]))
            del self.left[name], self.attempts[name]


def run_engine(
    connection: Connection,
    load: Callable[[EngineConfig], LoadedModel] | None = None,
    orphaned: Callable[[PoolEngine], None] | None = None,
) -> PoolEngine | None:
    """Run the engine that the coordinator at the other end asks for, until it says so or ends.

    Args:
        connection: to the coordinator.
        load: loads the model; None: as its config says.
        orphaned: called in another thread when the coordinator has ended; None: ends the process, in any step.

    Returns:
        the engine, if it began.
    """
    engine = None
    try:
        start = connection.recv()
        assert isinstance(start, Start)
        engine = PoolEngine(connection, start, load or (lambda config: LoadedModel.load(config, lambda line: None)))
        connection.send(engine.describe())
        begin = connection.recv()
        if not isinstance(begin, Begin):
            return engine  # the pools close
        engine.begin(begin)
        connection.send(Ready())
        threading.Thread(target=_receive, args=(engine, orphaned or _exit), daemon=True).start()
        engine.serve()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return engine
    except Exception as error:
        connection.send(EngineFailed(describe_error(error)))
        raise
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
