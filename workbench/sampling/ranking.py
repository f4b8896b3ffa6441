"""Rank the samples of one request by a user-defined ranking: `best_of` samples are drawn, and the n best are returned.

A ranking is called once, with the finished samples in order of sample number, and returns a score for each; the largest
score is best, and the first of equal scores. So votes, expected utilities and verifiers need no change of the engine.
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
    """A function that returns a score for each sample; it must not change them. Attributes of a sample: `token_ids`,
    `output_text` and `score` (the model's log-probability, summed over its tokens).
    """

    def __call__(self, samples: Sequence[Finished], /) -> Sequence[float]: ...


def load_ranking(part: CustomPart) -> Ranking:
    """Build the ranking that `part` names; raises WorkbenchError if it cannot be one."""
    made = load_custom(part)
    if not callable(made):
        raise WorkbenchError(f"ranking {part.path}: not callable; it needs __call__(self, samples)")
    check_arity(made, 1, f"ranking {part.path}", "(samples)")
    return cast(Ranking, made)


def rank_samples(ranking: Ranking, samples: Sequence[Finished], name: str) -> list[float]:
    """Return the scores of `samples`. Raises WorkbenchError with the name of the ranking if it fails or does not return
    numbers.
    """
    try:
        scores = [float(score) for score in ranking(samples)]
    except Exception as error:
        raise WorkbenchError(f"ranking {name}: raised {type(error).__name__}: {error}") from error
    if len(scores) != len(samples) or not all(map(math.isfinite, scores)):
        raise WorkbenchError(f"ranking {name}: must return {len(samples)} finite numbers, one a sample, not {scores}")
    return scores
