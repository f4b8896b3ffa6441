"""Play two generations of one prompt in turn, in the background, and find where they part."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

from workbench.machine.processor import cpu_times, is_contended, others_cpu_share
from workbench.waiting import wait_and_serve
from workbench.widgets.playground.data import BackgroundGeneration, PlayedRequest
from workbench.widgets.playground.runners import RunnerCache

NUM_LOGPROBS = 20  # of every token: the other side's token is most often among so many
SIDES = ("left", "right")
MIN_INTERVALS = 4  # token times of which a middle half is shown


def first_difference(left: Sequence[int], right: Sequence[int], ended: tuple[bool, bool]) -> int | None:
    """Return the index of the first token that differs; None where there is none.

    Args:
        left, right: token ids.
        ended: whether each text ended by itself. A text that did and is the other's beginning differs at its end; one
            that was stopped, or reached `max_tokens`, does not.
    """
    common = min(len(left), len(right))
    place = next((n for n in range(common) if left[n] != right[n]), None)
    if place is None and len(left) != len(right) and ended[len(right) < len(left)]:
        return common
    return place


@dataclass(frozen=True)
class TokenChoice:
    """The choice of one side at the place where texts part. `token` is None where its text ended there.

    `own` and `other` are the probabilities that its model gives to its own token and to the other side's; None where
    not known. `other` is at most `bound` where that token was not among the most probable.
    """

    token: str | None
    own: float | None = None
    other: float | None = None
    bound: float | None = None


@dataclass(frozen=True)
class TextDifference:
    """Two texts compared by tokens.

    Args:
        position: index of the first token that differs; None without one.
        compared: tokens that both have before it.
        choices: of both sides at `position`.
        drift: the right model's log-probability less the left's of each of the `compared` tokens, in nats.
    """

    position: int | None = None
    compared: int = 0
    choices: tuple[TokenChoice, TokenChoice] | None = None
    drift: tuple[float, ...] = ()

    @property
    def mean_drift(self) -> float | None:
        """Mean absolute value of `drift`, in nats."""
        return sum(map(abs, self.drift)) / len(self.drift) if self.drift else None

    @property
    def max_drift(self) -> float | None:
        return max(map(abs, self.drift), default=None)


def compare_texts(left: PlayedRequest, right: PlayedRequest) -> TextDifference:
    """Compare the first samples of two generations, which may still go on."""
    both = left, right
    tokens = [list(side.tokens_by_sample.get(0, ())) for side in both]
    ended = left.finish_reasons.get(0) == "stop", right.finish_reasons.get(0) == "stop"
    ids = [[token.id for token in side] for side in tokens]
    position = first_difference(ids[0], ids[1], ended)
    compared = min(map(len, ids)) if position is None else position
    drift = tuple(
        later - earlier
        for (earlier, _), (later, _) in zip(left.logprobs[:compared], right.logprobs[:compared], strict=False)
        if earlier is not None and later is not None
    )
    if position is None:
        return TextDifference(None, compared, None, drift)
    chosen = [side[position] if position < len(side) else None for side in tokens]
    chosen_ids = [None if token is None else token.id for token in chosen]
    first, second = (_choice(both[n], position, chosen[n], chosen_ids[1 - n]) for n in range(2))
    return TextDifference(position, compared, (first, second), drift)


def _choice(side: PlayedRequest, position: int, token: Any, other: int | None) -> TokenChoice:
    if token is None or position >= len(side.logprobs):
        return TokenChoice(None if token is None else token.spelling)
    own, likely = side.logprobs[position]
    probability = None if own is None else math.exp(own)
    if other is None or not likely:
        return TokenChoice(token.spelling, probability)
    if other in likely:
        return TokenChoice(token.spelling, probability, math.exp(likely[other]))
    return TokenChoice(token.spelling, probability, None, math.exp(min(likely.values())))


def middle_half(side: PlayedRequest) -> tuple[float, float] | None:
    """Return the quartiles of the seconds between two tokens; None for a few tokens."""
    times = side.token_times
    between = [later - earlier for earlier, later in zip(times, times[1:], strict=False)]
    if len(between) < MIN_INTERVALS:
        return None
    low, _, high = quantiles(between, n=4, method="inclusive")
    return low, high


def spread(side: PlayedRequest) -> float | None:
    """Return half of the middle half of the times between tokens, over their median."""
    half, times = middle_half(side), side.token_times
    if half is None:
        return None
    middle = median(later - earlier for earlier, later in zip(times, times[1:], strict=False))
    return (half[1] - half[0]) / 2 / middle if middle > 0 else None


class BackgroundPair:
    """Play two experiments of one prompt, one after the other: each has the machine for itself.

    `first` is the side that begins. Before each the prefix cache is emptied, so that neither finds the other's prompt.
    `difference` is that of the texts so far, `others` the share of the processor that other processes took.
    """

    def __init__(
        self,
        experiments: tuple[Any, Any],
        runners: RunnerCache,
        on_change: Callable[[], None],
        on_end: Callable[[BackgroundPair], None],
        first: int = 0,
    ):
        self.experiments, self.first = experiments, first
        self.others: float | None = None
        self._runs = tuple(
            BackgroundGeneration(experiment, runners, on_change, self._side_ended, NUM_LOGPROBS, timed=True)
            for experiment in experiments
        )
        self._on_end = on_end
        self._lock, self._stopped, self._done = threading.RLock(), False, threading.Event()
        self._playing = first

    @property
    def sides(self) -> tuple[PlayedRequest, PlayedRequest]:
        return self._runs[0].played, self._runs[1].played

    @property
    def difference(self) -> TextDifference:
        return compare_texts(*self.sides)

    @property
    def done(self) -> bool:
        return self._done.is_set()

    @property
    def stopped(self) -> bool:
        return self._stopped

    @property
    def error(self) -> str:
        """The error of the first side that has one, with its name."""
        return next((f"{name}: {run.error}" for name, run in zip(SIDES, self._runs, strict=True) if run.error), "")

    @property
    def failed_side(self) -> int | None:
        return next((n for n, run in enumerate(self._runs) if run.error), None)

    @property
    def status(self) -> str:
        if self.done:
            return "stopped" if self._stopped else ""
        status = self._runs[self._playing].status
        return f"{SIDES[self._playing]}: {status}" if status else ""

    @property
    def contended(self) -> bool:
        return is_contended(self.others)

    def start(self) -> None:
        self._before = cpu_times()
        self._runs[self.first].start()

    def stop(self) -> None:
        with self._lock:
            if self.done:
                return
            self._stopped = True
            self._runs[self._playing].stop()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until both have ended, or so many seconds; return whether they have."""
        try:
            return wait_and_serve(self._done.wait, seconds)
        except KeyboardInterrupt:
            self.stop()
            raise

    def _side_ended(self, run: BackgroundGeneration) -> None:
        """In the thread that played a side."""
        with self._lock:
            self._stopped = self._stopped or run.stopped  # the kernel's stop button too
            if run is self._runs[self.first] and not self._stopped and not run.error:
                self._playing = 1 - self.first
                self._runs[self._playing].start()
                return
            self.others = others_cpu_share(self._before)
        try:
            self._on_end(self)
        finally:
            self._done.set()
