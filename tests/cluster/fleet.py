"""Replicas without processes: a tiny runner that the test steps, behind the protocol of a replica."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from tests.engine.formats import FORMATS, runner
from tests.engine.resumable import BIAS, KNOWN, Counting
from tests.prompt.samples import byte_level
from workbench.cluster.replica import PageCounts, Report
from workbench.engine.runner import Runner, generate
from workbench.request import CustomPart, Request, SamplingParameters
from workbench.response_format import Thinking
from workbench.trace.events import Event, Finished

COUNTING = CustomPart(path=f"{Counting.__module__}:Counting")
THINK = byte_level().special_token_ids["<|think|>"]


class SteppedReplica:
    """A replica whose messages travel when the test says so: `turn` carries out what came and runs one step."""

    def __init__(self, number: int, engine: Runner | None = None):
        self.number, self.is_stopped = number, False
        self.runner = engine or runner(prefix="radix", pages=60)
        self._events: list[Event] = []
        self._inbox: list[Callable[[], object]] = []
        self.runner.set_listener(self._events.append)

    @property
    def pages(self) -> PageCounts:
        return PageCounts.of_runner(self.runner)

    def submit(self, requests: Sequence[Request]) -> None:
        assert not self.is_stopped
        self._inbox += [lambda each=each: self.runner.submit(each) for each in requests]

    def cancel(self, request_id: str) -> None:
        self._inbox.append(lambda: self.runner.cancel(request_id))

    def stop(self) -> None:
        self.is_stopped = True

    @property
    def is_idle(self) -> bool:
        return not self._inbox and not self.runner.has_unfinished_requests

    def turn(self) -> Report:
        inbox, self._inbox = self._inbox, []
        for each in inbox:
            each()
        self.runner.core.wait_for_grammars()
        if self.runner.has_unfinished_requests:
            self.runner.step()
        events = tuple(self._events)
        self._events.clear()
        return Report(events, self.pages)


def _asked(prompt: str, **sampling: Any) -> Request:
    parameters = SamplingParameters(**{"logit_bias": KNOWN, "max_tokens": 12, **sampling})
    ids = byte_level().encode(prompt)
    return Request("", (*ids, THINK) if "thinking" in sampling else tuple(ids), parameters)


MENU: tuple[Request, ...] = (
    _asked("q: ", temperature=0),
    _asked("q: " * 8, seed=3, max_tokens=20, repetition_penalty=1.2),
    _asked("q: a", seed=4, n=3, stop=("ab", "ba"), logit_bias=BIAS),
    _asked("r: " * 6, seed=5, stop=("ab",), logit_bias=BIAS, logprobs=1, prompt_logprobs=0),
    _asked("q: ", seed=6, response_format=FORMATS["choices"], temperature=2.0),
    _asked("q: ", seed=7, response_format=FORMATS["regex"], temperature=5.0, max_tokens=24),
    _asked("q: ", seed=8, thinking=Thinking(budget_tokens=6, soft_tokens=0)),
    _asked("s: ", seed=9, n=2, best_of=3),
    _asked("s: ", temperature=0, logit_bias={}, beams=3, n=2, max_tokens=6),
    _asked("s: ", seed=10, sampler=COUNTING),
    _asked("q: ", seed=11, max_tokens=1),
    Request("", (), SamplingParameters()),  # refused
)


@cache
def uninterrupted(place: int) -> dict[int, Finished]:
    """Return the ends of a request of the menu, by sample, as one engine gives them."""
    made = Request("r", MENU[place].prompt_ids, MENU[place].sampling)
    return {end.sample: end for end in generate(runner(pages=60), [made]).values()}


class Sink:
    def __init__(self) -> None:
        self.events: list[Event] = []
        self.is_done, self.error = False, ""

    @property
    def refusal(self) -> str:
        """Return why the front refused its request; empty if it did not."""
        ends = [each for each in self.events if isinstance(each, Finished) and each.reason == "refused"]
        return "".join(each.error for each in ends if each.ended_by)

    def emit(self, events: list[Event], done: bool = False, error: str = "") -> None:
        assert not self.is_done, "an event after the end"
        self.events += events
        self.is_done, self.error = done, error
