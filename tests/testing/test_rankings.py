"""The kit of rankings and searches: it passes what keeps the laws, and names the law that a broken part breaks."""

from __future__ import annotations

import math
from typing import Any

import pytest

from workbench.testing import check_ranking, check_search


class First:
    """Continue every branch with its likeliest token."""

    def advance(self, branches: Any) -> tuple[int, list[tuple[int, int]]]:
        return 0, [(at, int(branch.logits.argmax())) for at, branch in enumerate(branches)]


class Beyond(First):
    def advance(self, branches: Any) -> tuple[int, list[tuple[int, int]]]:
        return len(branches), super().advance(branches)[1]


class Counting(First):
    def __init__(self) -> None:
        self.calls = 0

    def advance(self, branches: Any) -> tuple[int, list[tuple[int, int]]]:
        self.calls += 1
        return self.calls % len(branches), super().advance(branches)[1]


class CountingRanking:
    def __init__(self) -> None:
        self.calls = 0.0

    def __call__(self, samples: Any) -> list[float]:
        self.calls += 1
        return [self.calls] * len(samples)


def lengths(samples: Any) -> list[float]:
    return [float(len(sample.token_ids)) for sample in samples]


VALID = "gives one finite score for each sample"
SAME = "gives the same result for the same input, whatever came before"
GOING = "names only existing branches and tokens"


@pytest.mark.parametrize(
    ("check", "part", "broken"),
    [
        (check_ranking, lengths, []),
        (check_ranking, lambda samples: [0.0], [VALID, SAME]),
        (check_ranking, lambda samples: [math.nan for _ in samples], [VALID, SAME]),
        (check_ranking, lambda samples: [1 / len(each.token_ids) for each in samples], [VALID, SAME]),
        (check_ranking, CountingRanking, [SAME]),
        (check_search, First, []),
        (check_search, Beyond, [GOING, SAME]),
        (check_search, Counting, [SAME]),
    ],
)
def test_a_broken_law_is_named(check: Any, part: Any, broken: list[str]) -> None:
    report = check(part, examples=20)
    assert [law.law for law in report.laws if not law.ok] == broken, str(report)
