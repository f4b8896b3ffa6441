"""Ask a semantic cache 500 questions whose right answers are known, for the claim `semantic-cache`."""

from __future__ import annotations

import itertools
import random

from experiments.semantic_cache import demo_embedding
from workbench.claims.summary import Figures
from workbench.gateway.similarity import cosine, unit

THRESHOLD = 0.95  # the source's
ACTIONS = ("enable", "disable", "lock", "unlock", "export", "import", "rename", "delete", "copy", "restore")
OBJECTS = (
    "my account", "a project", "the calendar", "two-factor login", "the weekly report", "a shared folder",
    "my mailbox", "the payment card", "a team", "the backup",
)  # fmt: skip
FRAMES = (
    "How do I {} {}?", "How can I {} {}?", "Please explain how to {} {}.", "I want to {} {}. How does that work?",
    "What are the steps to {} {}?",
)  # fmt: skip


def similar_questions(quick: bool) -> Figures:
    """Return the fraction of questions that the cache answers from a similar question, and the fraction of these
    answers that is wrong.

    A hundred things to ask in five wordings each, all different texts, in a drawn order; a question without a similar
    one in the cache is added to it. Two questions have one right answer where action and object are the same.
    Embeddings: the mean of the demo model's token embeddings.
    """
    embed = demo_embedding()
    asked = [
        ((action, thing), frame.format(action, thing))
        for action, thing, frame in itertools.product(ACTIONS, OBJECTS, FRAMES)
    ]
    random.Random(0).shuffle(asked)
    kept: list[tuple[tuple[str, str], tuple[float, ...]]] = []
    hits = wrong = 0
    asked = asked[:100] if quick else asked
    for meaning, text in asked:
        vector = unit(embed(text))
        score, found = max(((cosine(vector, other), of) for of, other in kept), default=(0.0, meaning))
        if score >= THRESHOLD:
            hits, wrong = hits + 1, wrong + (found != meaning)
        else:
            kept.append((meaning, vector))
    return {"queries": len(asked), "hit_rate": hits / len(asked), "wrong_share": wrong / hits if hits else 0.0}
