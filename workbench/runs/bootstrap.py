"""Compare two sets of repetitions by medians, with intervals from a seeded bootstrap.

Benchmarks have few repetitions, which requires two corrections. Bootstrap spreads are too narrow by a factor of sqrt((n
- 1) / n), and Gaussian instead of Student's t: the percentiles are taken further out (Hesterberg 2015, "What Teachers
Should Know About the Bootstrap", 3.3, "expanded percentile"). Resampled medians stay within the measured range, which
contains the true median only with probability 1 - 2^(1 - n): an interval states this confidence if it is below 95%.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

NUM_RESAMPLES, SEED, DEFAULT_CONFIDENCE = 4000, 0, 0.95  # resamples of a set; twice as many for unpaired sets
Samples = Mapping[Hashable, float]  # values by repetition: two sets measured alternately share their keys


@dataclass(frozen=True)
class Interval:
    low: float
    high: float


@dataclass(frozen=True)
class Contrast:
    """The difference and ratio of `other` and a baseline, with intervals.

    `ratio` is None if a value is not above 0; intervals and `confidence` are None for a single repetition.
    `repetitions` are the numbers of repetitions of the baseline and of the other set. `paired`: both were measured
    alternately and are compared repetition by repetition.
    """

    difference: float
    ratio: float | None
    difference_interval: Interval | None
    ratio_interval: Interval | None
    confidence: float | None
    repetitions: tuple[int, int]
    paired: bool


def contrast(baseline: Samples, other: Samples, target_confidence: float = DEFAULT_CONFIDENCE) -> Contrast:
    """Compare `other` with `baseline`. Swapping the two negates the difference and inverts the ratio.

    Args:
        baseline: values by repetition. Two sets with equal keys are compared pair by pair.
        other: values by repetition.
        target_confidence: confidence of the intervals; few repetitions give less, 1 - 2^(1 - n).
    """
    paired = baseline.keys() == other.keys()
    names = sorted(baseline, key=repr)
    first = np.array([baseline[name] for name in names])
    second = np.array([other[name] for name in (names if paired else sorted(other, key=repr))])
    n = min(len(first), len(second))
    confidence = min(target_confidence, 1 - 2.0 ** (1 - n)) if n > 1 else None
    difference, spread = _difference(first, second, paired, confidence)
    ratio = scaled = None
    if (first > 0).all() and (second > 0).all():
        log, logs = _difference(np.log(first), np.log(second), paired, confidence)
        ratio, scaled = math.exp(log), logs and Interval(math.exp(logs.low), math.exp(logs.high))
    return Contrast(difference, ratio, spread, scaled, confidence, (len(first), len(second)), paired)


def _difference(
    first: np.ndarray, second: np.ndarray, paired: bool, confidence: float | None
) -> tuple[float, Interval | None]:
    """Return the median of paired differences, or the difference of medians, and its interval."""
    apart = float(np.median(second - first) if paired else np.median(second) - np.median(first))
    if confidence is None:
        return apart, None
    if paired:
        found = _resampled_medians(second - first, 0)
    else:  # each set with both streams, so that swapping the sets draws the same resamples
        ways = [_resampled_medians(second, one) - _resampled_medians(first, other) for one, other in ((0, 1), (1, 0))]
        found = np.concatenate(ways)
    n = min(len(first), len(second))
    tail = tail_probability(confidence, n, n - 1 if paired else len(first) + len(second) - 2)
    low, high = np.quantile(found, [tail, 1 - tail])
    return apart, Interval(float(min(low, apart)), float(max(high, apart)))


def _resampled_medians(values: np.ndarray, stream: int) -> np.ndarray:
    generator = np.random.default_rng([SEED, stream])
    return np.median(values[generator.integers(0, len(values), (NUM_RESAMPLES, len(values)))], axis=1)


def tail_probability(confidence: float, n: int, degrees: int) -> float:
    """Return the tail probability to cut off on each side, so that an interval of `n` repetitions covers `confidence`.
    """
    return NormalDist().cdf(-math.sqrt(n / (n - 1)) * student_t_quantile((1 + confidence) / 2, degrees))


def student_t_quantile(p: float, degrees: int) -> float:
    """Return the quantile of Student's t for p above 1/2, by bisection (CDF: Abramowitz and Stegun 26.7.3, 26.7.4)."""
    low, high = 0.0, 1.0
    while _central_probability(high, degrees) < 2 * p - 1:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _central_probability(middle, degrees) < 2 * p - 1 else (low, middle)
    return (low + high) / 2


def _central_probability(t: float, degrees: int) -> float:
    """Return the probability that Student's t lies within -t and `t`."""
    angle = math.atan(t / math.sqrt(degrees))
    sine, cosine, odd = math.sin(angle), math.cos(angle), degrees % 2
    term, total = (cosine if odd else 1.0), 0.0
    for k in range(1 + odd, degrees, 2):
        total += term
        term *= cosine**2 * k / (k + 1)
    return (2 / math.pi) * (angle + sine * total) if odd else sine * total
