"""Find offensive English by a small trained classifier, `alt-profanity-check` (the extra `moderation`).

It is linear, over words that it counts: a text is as offensive as its words. It knows no other language, no spelling
that hides a word, and no meaning; docs/guide/serving.md has a table. Source: https://pypi.org/project/alt-profanity-check
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence

from workbench.errors import WorkbenchError

WINDOW_WORDS = 24  # that are judged together: among many harmless words a bad one counts little
FOUND = "offensive language"


class OffensiveLanguage:
    """A classifier of moderation: `classifier: {path: "workbench.gateway.profanity:OffensiveLanguage"}`.

    Args:
        threshold: the probability from which words are offensive.

    Raises:
        WorkbenchError: where the package is not installed.
    """

    def __init__(self, threshold: float = 0.5):
        try:
            package = importlib.import_module("profanity_check")
        except ImportError:
            raise WorkbenchError('moderation.classifier: pip install "inference-workbench[moderation]"') from None
        self._probabilities: Callable[[Sequence[str]], Sequence[float]] = package.predict_prob
        self._threshold = threshold

    def __call__(self, text: str) -> str:
        """Return the name of what was found; empty for nothing."""
        words = text.split()
        step = WINDOW_WORDS // 2
        starts = range(0, max(1, len(words) - step), step)
        windows = [" ".join(words[start : start + WINDOW_WORDS]) for start in starts]
        return FOUND if max(self._probabilities(windows)) >= self._threshold else ""
