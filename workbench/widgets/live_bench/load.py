"""Make a load in a thread of its own: requests arrive whether or not the runner keeps up.

load thread: arrivals ---> owner's thread, between two steps: refuse or submit ---> runner
The queue is bounded as a gateway bounds it: where `max_waiting` requests wait, one more is refused and counted.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import workbench
from workbench.engine.runner_thread import RunnerThread
from workbench.errors import WorkbenchError, describe_error
from workbench.request import FinishReason, Request
from workbench.trace.events import Event, Finished, Preempted, Scheduled, SettingsChanged, Stepped
from workbench.waiting import wait_and_serve
from workbench.widgets.live_bench.traffic import LONGEST_REQUEST, LoadSettings, PoissonArrivals, RequestSource

if TYPE_CHECKING:
    from workbench.engine.runner import Runner

TICK_SECONDS = 0.25  # between two calls of `on_tick`, at most
CLOSE_SECONDS = 10.0  # for a step under way
CAPACITY_SECONDS, CAPACITY_REQUESTS = 2.0, 24
BENCH_ENGINE = {
    "backend": "eager", "page_size": 16, "pages": 112, "prefix": "radix", "max_num_seqs": 16,
    "max_num_batched_tokens": 512,
}  # fmt: skip
BENCH_SCHEDULE = {"max_num_seqs": 8, "chunk_tokens": 512}  # at the beginning


def attach_runner(runner: Runner | None, resources: ExitStack) -> RunnerThread:
    """Return the thread of a runner, or of the demo model loaded for a bench: `resources` closes what is made here."""
    owned = runner is None
    if runner is None:
        runner = workbench.load("demo", **BENCH_ENGINE)
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


@dataclass(eq=False)
class _Run:
    """A load from its start to its end; each has a thread of its own, which ends with it.

    A load that begins as another is being stopped does not wait for that one's thread.
    """

    ends: float  # on the runner's clock
    is_stopped: bool = False


@dataclass(eq=False)
class _OfferedRequest:
    """A request of the load until its end, as a sink of the runner's thread."""

    on_end: Callable[[str], None]
    cancel: Callable[[], None] = lambda: None
    is_running: bool = False

    def emit(self, events: list[Event], done: bool = False, error: str = "") -> None:
        if done:  # also where it was cancelled before the runner had it, and no event says so
            self.on_end(error)


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
        self._run = _Run(0.0, is_stopped=True)
        self._thread: threading.Thread | None = None
        self._idle = threading.Event()
        self._idle.set()
        self._offered: dict[str, _OfferedRequest] = {}  # that have not ended; of the owner's thread alone
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
        """Return whether requests arrive, or some are in progress."""
        return not self._idle.is_set()

    def start(self, seconds: float) -> None:
        """Have requests arrive for so many seconds from now; a load that runs goes on until then."""
        with self._bell:
            ends = self.live.runner.clock() + seconds
            if not self._run.is_stopped:
                self._run.ends = ends
                self._bell.notify_all()
                return
            run = _Run(ends)
            thread = threading.Thread(target=self._work, args=(run,), name="live bench", daemon=True)
            self._idle.clear()
            try:
                thread.start()  # it waits for the bell
            except BaseException:  # an interrupt: a thread that has started after all ends, for its run is not known
                self.live.run_soon(self._note_idle)
                raise
            self._run, self._thread, self.error = run, thread, ""

    def stop(self) -> None:
        """End the load and cancel its requests, soon. Any thread may call it."""
        self._stop_arrivals()
        self.live.run_soon(self._cancel_all)

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until no request arrives and all have ended, or so many seconds; return whether they have.

        The stop button ends the load.
        """
        try:
            return wait_and_serve(self._idle.wait, seconds)
        except KeyboardInterrupt:
            self.stop()
            raise

    def close(self) -> None:
        """End the load, its requests and its thread."""
        self.stop()
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)
        self._idle.wait(CLOSE_SECONDS)
        self._leave()

    def offer(self, run: _Run, request: Request, arrival: float) -> None:
        """Submit a request that came at `arrival`, or refuse it; in the owner's thread."""
        if run.is_stopped:
            return  # it would arrive after the load's end
        waiting = sum(not each.is_running for each in self._offered.values())
        if waiting >= self.max_waiting:
            words = f"the queue is full: {waiting} requests wait"
            refused = Finished(
                arrival, request.request_id, reason=FinishReason.REFUSED.value, ended_by="overloaded", error=words,
                prompt_tokens=len(request.prompt_ids),
            )  # fmt: skip
            self._emit(refused)
            return
        offered = self._offered[request.request_id] = _OfferedRequest(partial(self._on_end, request.request_id))
        offered.cancel = self.live.submit_to(offered, [request], start_time=arrival)

    def _work(self, run: _Run) -> None:
        clock = self.live.runner.clock
        arrivals = PoissonArrivals(clock(), self._rng)
        try:
            while True:
                with self._bell:
                    now = clock()
                    if run is not self._run or run.is_stopped or now >= run.ends:
                        run.is_stopped = True
                        break
                    load = self._settings
                    times = arrivals.advance(now, load.rate)
                    self._send(run, times, load)
                    self._bell.wait(min(TICK_SECONDS, arrivals.seconds_to_next(load.rate), run.ends - now))
                    # The present rate held until now, also where it is changed next.
                    times = arrivals.advance(clock(), load.rate)
                    self._send(run, times, load)
                self._on_tick()
        except Exception as error:
            self.error, run.is_stopped = describe_error(error), True
        self.live.run_soon(self._note_idle)

    def _send(self, run: _Run, times: list[float], load: LoadSettings) -> None:
        for arrival in times:
            self.live.run_soon(partial(self.offer, run, self._source.next_request(load), arrival))

    def _stop_arrivals(self) -> None:
        with self._bell:
            self._run.is_stopped = True
            self._bell.notify_all()

    def _cancel_all(self) -> None:
        for each in tuple(self._offered.values()):
            each.cancel()
        self._note_idle()

    def _on_end(self, name: str, error: str) -> None:
        self._offered.pop(name, None)
        if error:  # of the runner itself, which ends all that it serves
            self.error = error
            self._stop_arrivals()
        self._note_idle()

    def _note_idle(self) -> None:
        with self._bell:  # `start` may be making the next run, which is not idle
            is_news = self._run.is_stopped and not self._offered and not self._idle.is_set()
            if is_news:
                self._idle.set()
        if is_news:
            self._on_tick()

    def _on_event(self, event: Event) -> None:
        offered = self._offered.get(event.request_id)
        if offered is None:
            return
        match event:
            case Scheduled(action="admitted"):
                offered.is_running = True
            case Preempted():
                offered.is_running = False
