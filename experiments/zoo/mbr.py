"""Minimum Bayes risk: of many samples give the one that is most like all others.

Eikema and Aziz, 2020, "Is MAP Decoding All You Need?", equation 3, with u a utility of one text where another is right,
and the samples y(1) ... y(n) both candidates and evidence:

    answer  =  argmax over i of  (1 / n) * sum over j of u(y(i), y(j))

Here u is the F1 score of the texts' n-grams of tokens, `order` long, in place of BEER or METEOR, and j is not i.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from workbench import WorkbenchError
from workbench.parts import Finished


@dataclass(frozen=True)
class MinimumRisk:
    """A ranking by expected utility, from 0 to 1."""

    order: int = 2

    def __post_init__(self) -> None:
        if self.order < 1:
            raise WorkbenchError(f"order must be 1 or more, not {self.order}")

    def grams(self, ids: Sequence[int]) -> Counter[tuple[int, ...]]:
        return Counter(tuple(ids[at : at + self.order]) for at in range(len(ids) - self.order + 1))

    def utility(self, one: Counter[tuple[int, ...]], other: Counter[tuple[int, ...]]) -> float:
        """Return the F1 score of two texts' n-grams; two texts without any are equal."""
        total = one.total() + other.total()
        return 2 * (one & other).total() / total if total else 1.0

    def __call__(self, samples: Sequence[Finished]) -> list[float]:
        grams = [self.grams(sample.token_ids) for sample in samples]
        others = max(1, len(grams) - 1)
        return [sum(self.utility(one, other) for other in grams if other is not one) / others for one in grams]
