"""Bound the difference of two models over the same texts. Tokens of one text depend on one another, so the bootstrap
resamples texts.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence

import numpy as np

from workbench.runs.bootstrap import DEFAULT_CONFIDENCE, NUM_RESAMPLES, SEED, student_t_quantile, tail_probability

POWER = 0.8  # probability with which a difference of `detectable` is seen


def difference_over_texts(
    texts: Sequence[Hashable], differences: Sequence[float], weights: Sequence[float]
) -> dict[str, float]:
    """Return sum(differences) / sum(weights) as `mean`, with a 95% interval from `low` to `high`.

    `detectable` is the smallest true difference that as many texts of this spread show with a probability of 80%: its
    interval leaves out zero. One text gives a mean alone.

    Args:
        texts: the text that each value belongs to.
        differences: a model's value minus the reference's: of a token, a question.
        weights: the amount that each value is counted over: bytes of a token, or 1.
    """
    numbers = {name: number for number, name in enumerate(dict.fromkeys(texts))}
    index, n = [numbers[name] for name in texts], len(numbers)
    sums, counts = (np.bincount(index, values, n) for values in (differences, weights))
    mean = float(sums.sum() / counts.sum())
    if n < 2:
        return {"mean": mean}
    drawn = np.random.default_rng(SEED).integers(0, n, (NUM_RESAMPLES, n))
    means = sums[drawn].sum(1) / counts[drawn].sum(1)
    tail = tail_probability(DEFAULT_CONFIDENCE, n, n - 1)
    low, high = np.quantile(means, [tail, 1 - tail])
    quantiles = (student_t_quantile(p, n - 1) for p in ((1 + DEFAULT_CONFIDENCE) / 2, POWER))
    detectable = sum(quantiles) * float(means.std()) * math.sqrt(n / (n - 1))
    return {"mean": mean, "low": float(low), "high": float(high), "detectable": detectable}
