"""Rank the samples of one request by a part of the user's own: `best_of` samples are drawn, the n best are returned.

A ranking is called once, with the finished samples in order of their numbers, and returns a score for each; the largest
is the best, and of equal scores the first. So votes, expected utilities and verifiers are values beside the engine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol, cast

from workbench.custom import check_arity, load_custom
from workbench.errors import WorkbenchError
from workbench.request import CustomPart
from workbench.trace.events import Finished


class Ranking(Protocol):
    """Return a score for each sample, which must not be changed. `token_ids`, `output_text` and `score` (the model's
    log-probability, summed over its tokens) say what it is."""

    def __call__(self, samples: Sequence[Finished], /) -> Sequence[float]: ...


def load_ranking(part: CustomPart) -> Ranking:
    """Build the ranking that `part` names; WorkbenchError if it cannot be one."""
    made = load_custom(part)
    if not callable(made):
        raise WorkbenchError(f"ranking {part.path}: not callable; it needs __call__(self, samples)")
    check_arity(made, 1, f"ranking {part.path}", "(samples)")
    return cast(Ranking, made)


def rank_samples(ranking: Ranking, samples: Sequence[Finished], name: str) -> list[float]:
    """Return the scores of `samples`. WorkbenchError, naming the part, where it fails or gives anything but numbers."""
    try:
        scores = [float(score) for score in ranking(samples)]
    except Exception as error:
        raise WorkbenchError(f"ranking {name}: raised {type(error).__name__}: {error}") from error
    if len(scores) != len(samples) or not all(map(math.isfinite, scores)):
        raise WorkbenchError(f"ranking {name}: must return {len(samples)} finite numbers, one a sample, not {scores}")
    return scores
