"""Self-consistency: sample many answers, and give the one that most of them agree on.

Wang et al., 2022, "Self-Consistency Improves Chain of Thought Reasoning in Language Models", section 2. With a(i) the
answer in sample i, as `pattern` finds it, of n samples:

    answer  =  argmax over a of  sum over i of [ a(i) = a ]

The vote ranks the samples of `best_of`: those with the answer of the majority come first. Of equal votes the first
sample's answer is taken; a sample without an answer has no vote.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import workbench
from workbench.parts import Finished


@dataclass(frozen=True)
class Vote:
    """A ranking. The answer is the last match of `pattern` in the text, its first group where it has one."""

    pattern: str = r"-?\d[\d,.]*"

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise workbench.WorkbenchError(f"pattern {self.pattern!r}: {error}") from None

    def answer(self, text: str) -> str | None:
        matches = list(re.finditer(self.pattern, text, re.MULTILINE))
        return None if not matches else matches[-1][1 if matches[-1].re.groups else 0]

    def __call__(self, samples: Sequence[Finished]) -> list[float]:
        answers = [self.answer(sample.output_text) for sample in samples]
        votes = Counter(answer for answer in answers if answer is not None)
        return [float(votes[answer]) if answer is not None else 0.0 for answer in answers]


TASKS = {  # what a Python file goes on with, as a name
    "if __name__ == ": "__main__", "class A:\n    def __init__(": "self", "x = []\nx.": "append",
    "for i in range(len(items)):\n    print(items[": "i", "try:\n    import json\nexcept ": "ImportError",
    "total = 0\nfor number in numbers:\n    total += ": "number", "class TestA(unittest.": "TestCase",
    "lock = threading.": "Lock", "def area(width, height):\n    return width * ": "height",
}  # fmt: skip
SAMPLES = 8


def figures() -> dict[str, float]:
    """Return the share of right answers of one sample and of the vote, and the difference, by the demo model."""
    runner, vote = workbench.load("demo"), Vote(r"\A\W*(\w+)")
    alone = voted = 0.0
    for prompt, right in TASKS.items():
        events = runner.stream(prompt, n=SAMPLES, max_tokens=6)
        ends = sorted((event for event in events if isinstance(event, Finished)), key=lambda end: end.sample)
        scores = vote(ends)
        alone += sum(vote.answer(end.output_text) == right for end in ends) / SAMPLES
        voted += vote.answer(ends[scores.index(max(scores))].output_text) == right
    count = len(TASKS)
    return {"right_alone": alone / count, "right_by_vote": voted / count, "right_gain": (voted - alone) / count}
