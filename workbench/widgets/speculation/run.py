"""Run a prompt with a speculator and without, one after the other, in the background."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from workbench.errors import WorkbenchError, describe_error
from workbench.request import Request, SamplingParameters
from workbench.trace.events import Event, Finished


@dataclass
class SpeculationEvents:
    """Events of the run with drafts that is looked at, and of all runs; the first of each is not timed."""

    current: list[Event] = field(default_factory=list)
    drafted: list[list[Event]] = field(default_factory=list)
    plain: list[list[Event]] = field(default_factory=list)
    problem: str = ""


class SpeculationComparison:
    """`both` grows meanwhile. Drafted and plain take turns, `rounds` of each after one of each that is not timed; with
    0 there is the drafted run alone. After it the runner drafts again as it did; another trial on the runner waits
    until then."""

    def __init__(
        self, runner: Any, prompt: str | Sequence[int] | None, speculate: Any, rounds: int, sampling: dict[str, Any]
    ):
        if runner.drafts is None and speculate is None:
            raise WorkbenchError('runner: it drafts nothing; give speculate="prompt_lookup" or "draft"')
        if prompt is None:
            raise WorkbenchError("prompt: a runner needs one, as text or token ids")
        self.runner, self.rounds, self.events = runner, rounds, SpeculationEvents()
        if isinstance(prompt, str):
            (request,) = runner.read(prompt, sampling)
        else:
            request = Request("", tuple(map(int, prompt)), SamplingParameters(**sampling))
        if request.sampling.num_sequences > 1:
            raise WorkbenchError("n, best_of, beams: the view looks at one sample; leave them out")
        self.request = request
        self._speculator = runner.drafts if speculate is None else _build_speculator(runner, speculate)
        self._handle: Any = None
        self._exclusive: Any = None
        self._stopped, self._thread = False, None

    def begin(self, on_change: Callable[[], None], on_end: Callable[[], None]) -> None:
        """Return at once; `news` is called as events come, `end` when all is over."""
        from workbench.widgets.live import RunnerThread

        live = RunnerThread.attach(self.runner)
        self.request, self._exclusive = replace(self.request, request_id=live.new_request_id("speculation")), live.exclusive
        live.exclusive.enqueue(self)

        def work() -> None:
            on_change()
            try:
                if live.exclusive.acquire(self, lambda: self._stopped):
                    on_change()
                    self._alternate(live, on_change)
            except Exception as error:
                self.events.problem = describe_error(error)
            finally:
                live.exclusive.release(self)
            on_end()

        self._thread = threading.Thread(target=work, name="speculation view", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped = True
        if self._exclusive is not None:
            self._exclusive.notify()
        if self._handle is not None:
            self._handle.stop()

    @property
    def waiting(self) -> bool:
        """For another trial on the same runner."""
        return self.working and self._exclusive is not None and not self._exclusive.is_first(self)

    @property
    def working(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def wait(self, seconds: float | None = None) -> None:
        if self._thread is None:
            return
        try:
            self._thread.join(seconds)
        except KeyboardInterrupt:
            self.stop()
            raise

    def _alternate(self, live: Any, news: Callable[[], None]) -> None:
        before = live.call(lambda runner: runner.drafts)
        turns = (self._speculator, self.events.drafted), (None, self.events.plain)
        try:
            for turn in range(self.rounds + 1):
                for ours, kept in turns[: 2 if self.rounds else 1]:
                    live.call(lambda runner, ours=ours: runner.speculate(ours))
                    events: list[Event] = [] if turn or ours is None else self.events.current
                    if not self._run_once(live, events, news):
                        return
                    kept.append(events)
                    news()
        finally:
            live.call(lambda runner: runner.speculate(before))

    def _run_once(self, live: Any, events: list[Event], news: Callable[[], None]) -> bool:
        """Run the request once; return whether it ran to its end."""
        self._handle = live.submit(self.request)
        if self._stopped:
            self._handle.stop()
        for event in self._handle:
            events.append(event)
            if isinstance(event, Finished):
                self._stopped = self._stopped or event.reason == "cancelled"  # by the kernel's stop button, say
                if event.error:
                    raise WorkbenchError(event.error)
            if events is self.events.current:
                news()
        return not self._stopped


def _build_speculator(runner: Any, speculate: Any) -> Any:
    from workbench.engine.drafting import build_speculator
    from workbench.engine.load import load
    from workbench.engine.speculation import NoSpeculation, parse_speculation

    settings = parse_speculation(speculate)
    if isinstance(settings, NoSpeculation):
        raise WorkbenchError('speculate: none drafts nothing; give "prompt_lookup" or "draft"')
    limits = runner.scheduler.limits
    shared = {"max_num_seqs": limits.max_num_seqs, "max_num_batched_tokens": limits.max_num_batched_tokens}
    made = partial(load, device=str(runner.model.device), **shared)
    return build_speculator(settings, runner.model.spec, runner.tokenizer, str(runner.lanes.decode), made)
