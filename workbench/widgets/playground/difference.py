"""Compare two generations of one prompt: their first difference, the drift of log-probabilities before it, the noise of
their times."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

from workbench.widgets.playground.data import PlayedRequest

MIN_INTERVALS = 4  # intervals between tokens needed for quartiles


def first_difference(left: Sequence[int], right: Sequence[int], ended: tuple[bool, bool]) -> int | None:
    """Return the index of the first token that differs, or None without a difference.

    Args:
        left, right: token ids.
        ended: whether each text ended by itself. Such a text that is a prefix of the other one differs at its end; a
            prefix that was stopped, or reached `max_tokens`, does not differ.
    """
    common = min(len(left), len(right))
    place = next((n for n in range(common) if left[n] != right[n]), None)
    if place is None and len(left) != len(right) and ended[len(right) < len(left)]:
        return common
    return place


@dataclass(frozen=True)
class TokenChoice:
    """The token that one side chose at the first difference; `token` is None if the side's text ended there.

    `own` and `other` are the probabilities that this side's model gave to its own token and to the other side's, None
    if unknown. If the other side's token is not among the recorded ones, its probability is at most `bound`.
    """

    token: str | None
    own: float | None = None
    other: float | None = None
    bound: float | None = None


@dataclass(frozen=True)
class TextDifference:
    """The result of comparing two texts token by token.

    Args:
        position: index of the first token that differs, or None.
        compared: number of equal tokens before it.
        choices: both sides' choices at `position`.
        drift: for each equal token, the right model's log-probability minus the left model's, in nats.
    """

    position: int | None = None
    compared: int = 0
    choices: tuple[TokenChoice, TokenChoice] | None = None
    drift: tuple[float, ...] = ()

    @property
    def mean_drift(self) -> float | None:
        """Return the mean absolute value of `drift`, in nats."""
        return sum(map(abs, self.drift)) / len(self.drift) if self.drift else None

    @property
    def max_drift(self) -> float | None:
        return max(map(abs, self.drift), default=None)


def compare_texts(left: PlayedRequest, right: PlayedRequest) -> TextDifference:
    """Compare the first samples of two generations, which may still be running."""
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
    """Return the lower and the upper quartile of the seconds between tokens; None if there are too few tokens."""
    times = side.token_times
    between = [later - earlier for earlier, later in zip(times, times[1:], strict=False)]
    if len(between) < MIN_INTERVALS:
        return None
    low, _, high = quantiles(between, n=4, method="inclusive")
    return low, high


def spread(side: PlayedRequest) -> float | None:
    """Return half the interquartile range of the times between tokens, relative to their median; None if unknown."""
    half, times = middle_half(side), side.token_times
    if half is None:
        return None
    middle = median(later - earlier for earlier, later in zip(times, times[1:], strict=False))
    return (half[1] - half[0]) / 2 / middle if middle > 0 else None
