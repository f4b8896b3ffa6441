"""Detect offensive English by a small trained classifier, `alt-profanity-check` (the extra `moderation`).

It is a linear model over word counts. It knows no other language, no obfuscated spelling and no context;
docs/guide/serving.md has a table. Source: https://pypi.org/project/alt-profanity-check
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence

from workbench.errors import installed_by

WINDOW_WORDS = 24  # words classified together: among many harmless words an offensive one has little weight
FOUND = "offensive language"


class OffensiveLanguage:
    """A classifier for moderation, set by `classifier: {path: "workbench.gateway.profanity:OffensiveLanguage"}`.

    Args:
        threshold: minimum probability of offensive words.

    Raises:
        WorkbenchError: if the package is not installed.
    """

    def __init__(self, threshold: float = 0.5):
        with installed_by("moderation", "moderation.classifier"):
            package = importlib.import_module("profanity_check")
        self._probabilities: Callable[[Sequence[str]], Sequence[float]] = package.predict_prob
        self._threshold = threshold

    def __call__(self, text: str) -> str:
        """Return the name of the finding, or an empty string."""
        words = text.split()
        step = WINDOW_WORDS // 2
        starts = range(0, max(1, len(words) - step), step)
        windows = [" ".join(words[start : start + WINDOW_WORDS]) for start in starts]
        return FOUND if max(self._probabilities(windows)) >= self._threshold else ""
