"""Make a load in a thread of its own: requests arrive whether or not the runner keeps up.

load thread: arrivals ---> owner's thread, between two steps: refuse or submit ---> runner
The queue is bounded as a gateway bounds it: where `max_waiting` requests wait, one more is refused and counted.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from functools import partial

from workbench.engine.runner_thread import RunnerThread
from workbench.errors import describe_error
from workbench.request import FinishReason, Request
from workbench.trace.events import Event, Finished, Preempted, Scheduled, SettingsChanged, Stepped
from workbench.waiting import wait_and_serve
from workbench.widgets.live_bench.traffic import LoadSettings, PoissonArrivals, RequestSource

TICK_SECONDS = 0.25  # between two calls of `on_tick`, at most
CLOSE_SECONDS = 10.0  # for a step under way
CAPACITY_SECONDS, CAPACITY_REQUESTS = 2.0, 24


def measure_capacity(live: RunnerThread, settings: LoadSettings, seconds: float = CAPACITY_SECONDS) -> float:
    """Return how many requests of this mix the runner serves a second, when some always wait: measured for `seconds`.

    Of the time, what the first and the last of them take alone is a part, so that the figure is rather low.
    """
    source = RequestSource(live.runner.model.spec.vocab_size, 0, live.new_request_id("capacity"))
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


class LoadGenerator:
    """An open-loop load on a runner; `settings` may be changed at any time.

    `emit` receives what the runner does not know of: refusals at the queue's bound, and changes of the load. `on_tick`
    is called a few times a second, in the load's thread, and at the end.
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
        self._thread: threading.Thread | None = None
        self._ends, self._stopped = 0.0, True
        self._idle = threading.Event()
        self._idle.set()
        # Of the owner's thread alone:
        self._waiting: set[str] = set()  # submitted and not running
        self._running: set[str] = set()
        self._leave = live.listen(self._on_event)

    @property
    def settings(self) -> LoadSettings:
        return self._settings

    @settings.setter
    def settings(self, new: LoadSettings) -> None:
        with self._bell:
            old, self._settings = self._settings, new
            self._bell.notify()
        pairs = ((name, str(getattr(old, name)), str(getattr(new, name))) for name in LoadSettings.__match_args__)
        for name, before, after in pairs:
            if before != after:
                self._emit(SettingsChanged(self.live.runner.clock(), name=name, old=before, new=after))

    @property
    def running(self) -> bool:
        """Return whether requests arrive, or some are in progress."""
        return not self._idle.is_set()

    def start(self, seconds: float) -> None:
        """Have requests arrive for so many seconds from now; a load that runs goes on until then."""
        with self._bell:
            self._ends = self.live.runner.clock() + seconds
            if not self._stopped:
                return
            self._stopped, self.error = False, ""
            self._idle.clear()
            before, self._thread = self._thread, threading.Thread(target=self._work, name="live bench", daemon=True)
        if before is not None:
            before.join()
        self._thread.start()

    def stop(self) -> None:
        """End the load and cancel its requests, soon. Any thread may call it."""
        with self._bell:
            self._stopped = True
            self._bell.notify()
        self.live.run_soon(self._cancel_all)

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until no request arrives and all have ended, or so many seconds; return whether they have."""
        return wait_and_serve(self._idle.wait, seconds)

    def close(self) -> None:
        """End the load, its requests and its thread."""
        self.stop()
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)
        self._idle.wait(CLOSE_SECONDS)
        self._leave()

    def emit(self, events: list[Event], done: bool = False, error: str = "") -> None:
        """Take the end of a request, as a sink of the runner's thread."""
        if error:
            self.error = error
            self.stop()

    def offer(self, request: Request, arrival: float) -> None:
        """Submit a request that at `arrival`, or refuse it; in the owner's thread."""
        if self._stopped:
            return  # it would arrive after the load's end
        if len(self._waiting) >= self.max_waiting:
            words = f"the queue is full: {len(self._waiting)} requests wait"
            refused = Finished(
                arrival, request.request_id, reason=FinishReason.REFUSED.value, ended_by="overloaded", error=words,
                prompt_tokens=len(request.prompt_ids),
            )  # fmt: skip
            self._emit(refused)
            return
        self._waiting.add(request.request_id)
        self.live.submit_to(self, [request], start_time=arrival)

    def _work(self) -> None:
        clock = self.live.runner.clock
        arrivals = PoissonArrivals(clock(), self._rng)
        try:
            while True:
                with self._bell:
                    now = clock()
                    if self._stopped or now >= self._ends:
                        self._stopped = True
                        break
                    load = self._settings
                    times = arrivals.advance(now, load.rate)
                    self._send(times, load)
                    self._bell.wait(min(TICK_SECONDS, arrivals.seconds_to_next(load.rate), self._ends - now))
                    # The present rate held until now, also where it is changed next.
                    times = arrivals.advance(clock(), load.rate)
                    self._send(times, load)
                self._on_tick()
        except Exception as error:
            self.error, self._stopped = describe_error(error), True
        self.live.run_soon(self._note_idle)

    def _send(self, times: list[float], load: LoadSettings) -> None:
        for arrival in times:
            self.live.run_soon(partial(self.offer, self._source.next_request(load), arrival))

    def _cancel_all(self) -> None:
        for name in (*self._waiting, *self._running):
            self.live.runner.cancel(name)
        self._note_idle()

    def _note_idle(self) -> None:
        if self._stopped and not self._waiting and not self._running and not self._idle.is_set():
            self._idle.set()
            self._on_tick()

    def _on_event(self, event: Event) -> None:
        name = event.request_id
        if name not in self._waiting and name not in self._running:
            return
        match event:
            case Scheduled(action="admitted"):
                self._waiting.discard(name)
                self._running.add(name)
            case Preempted():
                self._running.discard(name)
                self._waiting.add(name)
            case Finished():
                self._waiting.discard(name)
                self._running.discard(name)
                self._note_idle()
