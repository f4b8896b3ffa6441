"""Ask which of four words of a text comes next: questions with one right answer, at no cost beside a scored text.

The four words are drawn alike from the words of the scored part, so that how often a word occurs tells nothing: an
answer that does not depend on the place is right in one of four cases (`FLOOR`).
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from workbench.measure.quality.teacher_forcing import ForcedText
from workbench.prompt.tokenization.tokenizer import Tokenizer

NUM_CHOICES = 4
FLOOR = 1 / NUM_CHOICES
WORD = re.compile(rb" [a-z]{4,}")  # with fewer letters most are articles and prepositions


def with_choices(tokenizer: Tokenizer, texts: Sequence[ForcedText], count: int, seed: int) -> list[ForcedText]:
    """Return the texts with up to `count` questions each, at different tokens; fewer in a text with few words."""
    token_bytes = cache(tokenizer.token_bytes)
    return [replace(text, rivals=_questions(text, token_bytes, count, f"{seed}/{i}")) for i, text in enumerate(texts)]


def _questions(text: ForcedText, token_bytes, count: int, seed: str) -> dict[int, tuple[int, ...]]:
    draw, ids = random.Random(seed), text.ids
    words = [
        place
        for place in range(text.first_scored, len(ids) - 1)
        if WORD.fullmatch(token_bytes(ids[place])) and not token_bytes(ids[place + 1])[:1].isalpha()
    ]
    found: dict[int, tuple[int, ...]] = {}
    for _ in range(4 * count):
        if len(found) == count or len(words) < NUM_CHOICES:
            break
        place, *others = draw.sample(words, NUM_CHOICES)
        if len({ids[each] for each in (place, *others)}) == NUM_CHOICES:
            found.setdefault(place, tuple(ids[each] for each in others))
    return found
