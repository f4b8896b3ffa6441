"""Generate a load in a separate thread: requests arrive whether or not the runner keeps up with them.

load thread: arrivals ---> runner's thread, between two steps: refuse or submit ---> runner
The queue is bounded like a gateway's: while `max_waiting` requests wait, a new one is refused and counted.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from workbench.engine.load import load
from workbench.engine.runner_thread import RunnerThread
from workbench.errors import WorkbenchError
from workbench.request import FinishReason, Request
from workbench.trace.events import Event, Finished, Preempted, Scheduled, SettingsChanged, Stepped
from workbench.widgets.job import Job
from workbench.widgets.live_bench.traffic import LONGEST_REQUEST, LoadSettings, PoissonArrivals, RequestSource

if TYPE_CHECKING:
    from workbench.engine.runner import Runner

TICK_SECONDS = 0.25  # between two calls of `on_tick`, at most
CLOSE_SECONDS = 10.0  # longest wait for a step under way
CAPACITY_SECONDS, CAPACITY_REQUESTS = 2.0, 24  # of the capacity measurement
BENCH_ENGINE = {
    "backend": "eager", "page_size": 16, "pages": 112, "prefix": "radix", "max_num_seqs": 16,
    "max_num_batched_tokens": 512,
}  # fmt: skip
BENCH_SCHEDULE = {"max_num_seqs": 8, "chunk_tokens": 512}  # at the beginning


def attach_runner(runner: Runner | None, resources: ExitStack) -> RunnerThread:
    """Return the thread of `runner`, or of a demo model that is loaded now and closed together with `resources`."""
    owned = runner is None
    if runner is None:
        runner = load("demo", **BENCH_ENGINE)
        resources.callback(runner.close)
    context = runner.model.spec.max_position_embeddings
    if context < LONGEST_REQUEST:
        raise WorkbenchError(
            f"LiveBench: its longest requests have {LONGEST_REQUEST} tokens, and the model's context is {context}"
        )
    live = RunnerThread.attach(runner)
    if owned:
        resources.callback(live.close)
        resources.callback(lambda: live.call(lambda each: each.reset_prefix_cache()))
        live.call(lambda each: each.set_schedule(**BENCH_SCHEDULE))
    return live


def measure_capacity(live: RunnerThread, settings: LoadSettings, seconds: float = CAPACITY_SECONDS) -> float:
    """Return how many requests of this mix the runner serves per second while its queue is full, measured for
    `seconds`.

    One request is served before, because a process' first step can take seconds. The time includes the first and last
    requests' partly filled batches, so the result is rather low.
    """
    source = RequestSource(live.runner.model.spec.vocab_size, 0, live.new_request_id("capacity"))
    live.submit([source.next_request(settings)]).wait(CLOSE_SECONDS)
    requests = [source.next_request(settings) for _ in range(CAPACITY_REQUESTS)]
    began = time.perf_counter()
    handle = live.submit(requests)
    handle.wait(seconds)
    took = time.perf_counter() - began
    served = sum(isinstance(each, Finished) for each in handle.events[:])
    steps = [each for each in handle.events[:] if isinstance(each, Stepped)]
    handle.stop()
    handle.wait(CLOSE_SECONDS)
    tokens = sum(each.prefill_tokens + each.decode_tokens for each in steps)
    wanted = sum(len(each.prompt_ids) + each.sampling.max_output_tokens - 1 for each in requests)
    return max(served, len(requests) * tokens / wanted, 0.1) / took


@dataclass(eq=False)
class _OfferedRequest:
    """An unfinished request of the load, as a sink of the runner's thread."""

    on_end: Callable[[str], None]
    cancel: Callable[[], None] = lambda: None
    is_running: bool = False

    def emit(self, events: list[Event], done: bool = False, error: str = "") -> None:
        if done:  # also after a cancellation before the runner had the request, which emits no event
            self.on_end(error)


class LoadGenerator:
    """A generator of an open-loop load on a runner; `settings` may be changed at any time.

    `emit` receives the events that the runner does not emit: refusals by the full queue, and changes of the load.
    `on_tick` is called a few times a second, in the load's thread, and at the end.
    """

    def __init__(
        self,
        live: RunnerThread,
        settings: LoadSettings,
        emit: Callable[[Event], None],
        on_tick: Callable[[], None] = lambda: None,
        max_waiting: int = 24,
        seed: int = 0,
    ):
        self.live, self.max_waiting = live, max_waiting
        self.error = ""
        self._settings, self._emit, self._on_tick = settings, emit, on_tick
        self._source = RequestSource(live.runner.model.spec.vocab_size, seed, live.new_request_id("bench"))
        self._rng = random.Random(seed)
        self._bell = threading.Condition()
        self._job: Job | None = None  # the load under way, until its requests have ended
        self._ends = 0.0  # of the arrivals, on the runner's clock
        self._sent: set[str] = set()  # requests on their way to the runner's thread
        self._offered: dict[str, _OfferedRequest] = {}  # unfinished requests; used in the runner's thread only
        self._leave = live.listen(self._on_event)

    @property
    def settings(self) -> LoadSettings:
        return self._settings

    @settings.setter
    def settings(self, new: LoadSettings) -> None:
        with self._bell:
            old, self._settings = self._settings, new
            self._bell.notify_all()
        pairs = ((name, str(getattr(old, name)), str(getattr(new, name))) for name in LoadSettings.__match_args__)
        for name, before, after in pairs:
            if before != after:
                self._emit(SettingsChanged(self.live.runner.clock(), name=name, old=before, new=after))

    @property
    def running(self) -> bool:
        """Return whether requests still arrive or are in progress."""
        return self._job is not None

    def start(self, seconds: float) -> None:
        """Let requests arrive for `seconds` from now; a running load is extended or shortened to that time.

        A load that starts while another is being stopped, or has failed, does not wait for the other one's end.
        """
        with self._bell:
            ends = self.live.runner.clock() + seconds
            if self._job is None or self._job.stopped or self._job.error:
                # The thread waits for `_bell`; after an interrupt here it ends, because its job is not `_job`.
                self._job = Job(self._work, self._end, self._cancel_soon, "live bench").start()
            self._ends, self.error = ends, ""
            self._bell.notify_all()

    def stop(self) -> None:
        """End the load soon and cancel its requests. Any thread may call it."""
        if (job := self._job) is not None:
            job.stop()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until no more requests arrive and all have ended, at most `seconds`; return whether that happened.

        The stop button ends the load.
        """
        job = self._job
        return job is None or job.wait(seconds)

    def close(self) -> None:
        """End the load, cancel its requests, and end its thread."""
        self.stop()
        self.wait(CLOSE_SECONDS)
        self._leave()

    def offer(self, job: Job, request: Request, arrival: float) -> None:
        """Submit a request that arrived at `arrival`, or refuse it; called in the runner's thread."""
        try:
            if not (job.stopped or self.error):
                self._submit(request, arrival)
        finally:
            self._note_settled(request.request_id)

    def _submit(self, request: Request, arrival: float) -> None:
        waiting = sum(not each.is_running for each in self._offered.values())
        if waiting >= self.max_waiting:
            words = f"the queue is full, with {waiting} waiting"
            refused = Finished(
                arrival, request.request_id, reason=FinishReason.REFUSED.value, ended_by="overloaded", error=words,
                prompt_tokens=len(request.prompt_ids),
            )  # fmt: skip
            self._emit(refused)
            return
        offered = self._offered[request.request_id] = _OfferedRequest(partial(self._on_end, request.request_id))
        offered.cancel = self.live.submit_to(offered, [request], start_time=arrival)

    def _work(self, job: Job) -> None:
        clock = self.live.runner.clock
        arrivals = PoissonArrivals(clock(), self._rng)
        while True:
            with self._bell:
                if self._job is not job:
                    return
                now, load, most = clock(), self._settings, TICK_SECONDS
                is_arriving = not job.stopped and now < self._ends
                if not is_arriving and not self._sent and not self._offered:
                    self._job = None
                    return
                if not is_arriving:  # its requests are in progress
                    load = replace(load, rate=0.0)
                else:
                    most = min(most, self._ends - now)
                self._send(job, arrivals.advance(now, load.rate), load)
                self._bell.wait(min(most, arrivals.seconds_to_next(load.rate)))
                # The old rate held until now, also if it was changed during the wait.
                self._send(job, arrivals.advance(clock(), load.rate), load)
            self._on_tick()

    def _end(self, job: Job) -> None:
        if job.error:
            self._cancel_soon()
            with self._bell:
                if self._job is job:  # else another load has started since
                    self.error = job.error
                self._bell.wait_for(lambda: self._job is not job or not (self._sent or self._offered))
                self._job = None if self._job is job else self._job
        self._on_tick()

    def _send(self, job: Job, times: list[float], load: LoadSettings) -> None:
        for arrival in times:
            request = self._source.next_request(load)
            self._sent.add(request.request_id)
            self.live.run_soon(partial(self.offer, job, request, arrival))

    def _cancel_soon(self) -> None:
        with self._bell:
            self._bell.notify_all()
        self.live.run_soon(lambda: [each.cancel() for each in tuple(self._offered.values())])

    def _on_end(self, name: str, error: str) -> None:
        self._offered.pop(name, None)
        if error:  # the runner's own error, which ends all of its requests
            self.error, self._ends = error, 0.0
        self._note_settled(name)

    def _note_settled(self, name: str) -> None:
        with self._bell:
            self._sent.discard(name)
            self._bell.notify_all()

    def _on_event(self, event: Event) -> None:
        offered = self._offered.get(event.request_id)
        if offered is None:
            return
        match event:
            case Scheduled(action="admitted"):
                offered.is_running = True
            case Preempted():
                offered.is_running = False
