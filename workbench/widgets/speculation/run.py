"""Run a prompt with a speculator and without, one after the other, in the background."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from workbench.errors import WorkbenchError, in_words
from workbench.request import Request, SamplingParameters
from workbench.trace.events import Event, Finished


@dataclass
class Both:
    """Events of the run with drafts that is looked at, and of all runs; the first of each is not timed."""

    seen: list[Event] = field(default_factory=list)
    drafted: list[list[Event]] = field(default_factory=list)
    plain: list[list[Event]] = field(default_factory=list)
    problem: str = ""


class Trial:
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
        self.runner, self.rounds, self.both = runner, rounds, Both()
        if isinstance(prompt, str):
            (request,) = runner.read(prompt, sampling)
        else:
            request = Request("", tuple(map(int, prompt)), SamplingParameters(**sampling))
        if request.sampling.samples > 1:
            raise WorkbenchError("n, best_of, beams: the view looks at one sample; leave them out")
        self.request = request
        self._drafts = runner.drafts if speculate is None else _drafts(runner, speculate)
        self._asked: Any = None
        self._trials: Any = None
        self._stopped, self._thread = False, None

    def begin(self, news: Callable[[], None], end: Callable[[], None]) -> None:
        """Return at once; `news` is called as events come, `end` when all is over."""
        from workbench.widgets.live import Live

        live = Live.of(self.runner)
        self.request, self._trials = replace(self.request, request_id=live.name("speculation")), live.trials
        live.trials.join(self)

        def work() -> None:
            news()
            try:
                if live.trials.wait(self, lambda: self._stopped):
                    news()
                    self._take_turns(live, news)
            except Exception as error:
                self.both.problem = in_words(error)
            finally:
                live.trials.leave(self)
            end()

        self._thread = threading.Thread(target=work, name="speculation view", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped = True
        if self._trials is not None:
            self._trials.look()
        if self._asked is not None:
            self._asked.stop()

    @property
    def waiting(self) -> bool:
        """For another trial on the same runner."""
        return self.working and self._trials is not None and not self._trials.first(self)

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

    def _take_turns(self, live: Any, news: Callable[[], None]) -> None:
        before = live.call(lambda runner: runner.drafts)
        turns = (self._drafts, self.both.drafted), (None, self.both.plain)
        try:
            for turn in range(self.rounds + 1):
                for ours, kept in turns[: 2 if self.rounds else 1]:
                    live.call(lambda runner, ours=ours: runner.speculate(ours))
                    events: list[Event] = [] if turn or ours is None else self.both.seen
                    if not self._once(live, events, news):
                        return
                    kept.append(events)
                    news()
        finally:
            live.call(lambda runner: runner.speculate(before))

    def _once(self, live: Any, events: list[Event], news: Callable[[], None]) -> bool:
        """Run the request once; return whether it ran to its end."""
        self._asked = live.ask(self.request)
        if self._stopped:
            self._asked.stop()
        for event in self._asked:
            events.append(event)
            if isinstance(event, Finished):
                self._stopped = self._stopped or event.reason == "cancelled"  # by the kernel's stop button, say
                if event.error:
                    raise WorkbenchError(event.error)
            if events is self.both.seen:
                news()
        return not self._stopped


def _drafts(runner: Any, speculate: Any) -> Any:
    from workbench.engine.drafting import drafts_of
    from workbench.engine.load import load
    from workbench.engine.speculation import NoSpeculation, speculation_from

    settings = speculation_from(speculate)
    if isinstance(settings, NoSpeculation):
        raise WorkbenchError('speculate: none drafts nothing; give "prompt_lookup" or "draft"')
    limits = runner.scheduler.limits
    shared = {"max_num_seqs": limits.max_num_seqs, "max_num_batched_tokens": limits.max_num_batched_tokens}
    made = partial(load, device=str(runner.model.device), **shared)
    return drafts_of(settings, runner.model.spec, runner.tokenizer, str(runner.lanes.decode), made)
