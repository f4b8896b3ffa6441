"""Ask for facts ("needles") that stand between the paragraphs of a text: names, numbers and sentences, at all depths.

    Read the text, and answer the questions behind it.
    ...                                                              paragraphs
    The keeper of Velby is called Ruth Calder.                       a needle at a depth of 0 to 1
    ...
    Question: What is the keeper of Velby called?
    Answer: Ruth Calder                                              scored: the answer's tokens
    Question: ...

One forward pass over a text asks all its questions: the right answers stand in it, as a model that answers greedily
would have written them. An answer is right where each of its tokens is the model's most likely one. The floor is the
share of right answers to the same questions behind the same text without needles.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from workbench.engine.runner import Runner
from workbench.errors import WorkbenchError
from workbench.measure.quality.teacher_forcing import ForcedText, score_tokens
from workbench.prompt.tokenization.tokenizer import Tokenizer
from workbench.settings import Count, Settings

Kind = Literal["name", "number", "sentence"]
ROLES = ("keeper", "baker", "doctor", "teacher", "mayor", "captain", "gardener", "painter", "judge", "clerk")
THINGS = ("locker", "bus", "warehouse", "boat", "station", "garden", "bridge", "ticket", "tower", "farm")
PLACES = tuple(a + b for a in ("Vel", "Nor", "Kars", "Ten", "Mil", "Ash") for b in ("by", "ham", "wick", "stead"))
FIRST_NAMES = (
    "Ruth",
    "Peter",
    "Maria",
    "Daniel",
    "Helen",
    "Victor",
    "Laura",
    "Simon",
    "Clara",
    "Martin",
    "Alice",
    "Hugo",
)
LAST_NAMES = ("Calder", "Novak", "Brooks", "Larsen", "Weaver", "Morris", "Keller", "Parker", "Doyle", "Foster", "Reed")
ADJECTIVES = ("small", "old", "green", "quiet", "heavy", "bright", "cold", "young")
ANIMALS = ("horse", "cat", "goose", "bear", "fox", "sheep", "owl", "rabbit")
VERBS = ("waits near", "sleeps behind", "walks around", "looks at", "runs from", "sits under")
OPENING = "Read the text, and answer the questions behind it.\n\n"


class NeedleSettings(Settings):
    """Settings of needles: facts between the paragraphs of texts, at evenly spread depths, and questions for them."""

    texts: Count = 20
    each: Count = 10  # needles and questions of a text, at depths from 0 to 1


@dataclass(frozen=True)
class Needle:
    kind: Kind
    fact: str
    question: str
    answer: str
    depth: float


@dataclass(frozen=True)
class Haystack:
    """A text with needles, or the same text without them, and the questions behind it. `answers` are the slices of the
    answers' tokens among the scored ones, in the order of `needles`."""

    text: ForcedText
    needles: tuple[Needle, ...]
    answers: tuple[slice, ...]


def draw_needles(count: int, turn: int, draw: random.Random) -> list[Needle]:
    """Draw needles in the order of their depths, about different places. `turn` shifts the kinds along the depths."""
    kinds: tuple[Kind, ...] = ("name", "number", "sentence")
    places = draw.sample(PLACES, count)
    depths = [number / max(1, count - 1) for number in range(count)]
    return [_needle(kinds[(turn + i) % len(kinds)], places[i], depths[i], draw) for i in range(count)]


def _needle(kind: Kind, place: str, depth: float, draw: random.Random) -> Needle:
    role, thing = draw.choice(ROLES), draw.choice(THINGS)
    if kind == "name":
        answer = f"{draw.choice(FIRST_NAMES)} {draw.choice(LAST_NAMES)}"
        fact, question = f"The {role} of {place} is called {answer}.", f"What is the {role} of {place} called?"
    elif kind == "number":
        answer = str(draw.randrange(1000, 10_000))
        fact = f"The number of the {thing} in {place} is {answer}."
        question = f"What is the number of the {thing} in {place}?"
    else:
        one, other, far = draw.choice(ADJECTIVES), draw.choice(ADJECTIVES), draw.choice(THINGS)
        answer = f"The {one} {draw.choice(ANIMALS)} {draw.choice(VERBS)} the {other} {far}"
        fact, question = f"The sign in {place} says: {answer}.", f"What does the sign in {place} say?"
    return Needle(kind, fact, question, answer, depth)


def make_haystacks(
    tokenizer: Tokenizer, texts: Mapping[str, str], needles: NeedleSettings, tokens: int, seed: int
) -> list[tuple[Haystack, Haystack]]:
    """Return texts of at most `tokens` tokens, each with needles and without them.

    Raises WorkbenchError if the texts hold too few paragraphs, or the needles do not fit into `tokens`.
    """
    if needles.each > len(PLACES):
        raise WorkbenchError(f"workload.needles.each {needles.each}: at most {len(PLACES)}, of as many places")
    draw = random.Random(f"needles {seed}")
    paragraphs = _paragraphs(tokenizer, texts, draw)
    return [
        _haystack(tokenizer, paragraphs, draw_needles(needles.each, turn, draw), tokens, draw)
        for turn in range(needles.texts)
    ]


def _paragraphs(tokenizer: Tokenizer, texts: Mapping[str, str], draw: random.Random) -> Iterator[list[int]]:
    for name in draw.sample(sorted(texts), len(texts)):
        for paragraph in texts[name].split("\n\n"):
            yield tokenizer.encode(f"{paragraph}\n\n")


def _haystack(
    tokenizer: Tokenizer, paragraphs: Iterator[list[int]], needles: list[Needle], tokens: int, draw: random.Random
) -> tuple[Haystack, Haystack]:
    opening = [*tokenizer.bos_token_ids, *tokenizer.encode(OPENING)]
    facts = [tokenizer.encode(f"{needle.fact}\n\n") for needle in needles]
    ending: list[int] = []  # the questions, in any order
    answers = [slice(0)] * len(needles)
    for i in draw.sample(range(len(needles)), len(needles)):
        ending += tokenizer.encode(f"Question: {needles[i].question}\nAnswer:")
        answer = tokenizer.encode(f" {needles[i].answer}")
        answers[i] = slice(len(ending), len(ending) + len(answer))
        ending += [*answer, *tokenizer.encode("\n\n")]
    room, hay = tokens - len(opening) - len(ending) - sum(map(len, facts)), []
    for paragraph in paragraphs:
        if (room := room - len(paragraph)) < 0:
            break
        hay.append(paragraph)
    if len(hay) < len(needles):
        raise WorkbenchError(
            f"workload.needles: {len(hay)} paragraphs fit between {len(needles)} needles in {tokens} tokens; take a "
            "longer context, fewer texts or fewer needles a text"
        )

    def join(planted: bool) -> Haystack:
        ids, places = list(opening), [round(needle.depth * len(hay)) for needle in needles]
        for number in range(len(hay) + 1):
            for fact, place in zip(facts, places, strict=True):
                if planted and place == number:
                    ids += fact
            ids += hay[number] if number < len(hay) else []
        text = ForcedText((*ids, *ending), len(ids), len(ids) + len(ending) - 1)
        return Haystack(text, tuple(needles), tuple(answers))

    return join(planted=True), join(planted=False)


def measure_needles(runner: Runner, haystacks: Sequence[Haystack]) -> list[dict[str, Any]]:
    """Score the answers, and return one row for each: text, kind, depth, `right`, and `nats` of the whole answer."""
    scores = score_tokens(runner, [each.text for each in haystacks])
    rows = []
    for index, each in enumerate(haystacks):
        for needle, answer in zip(each.needles, each.answers, strict=True):
            tokens = scores[index][answer]
            rows.append(
                {
                    "text": index,
                    "kind": needle.kind,
                    "depth": needle.depth,
                    "right": all(likely for _, likely in tokens),
                    "nats": -math.fsum(logprob for logprob, _ in tokens),
                }
            )
    return rows


def needle_summary(rows: Sequence[Mapping[str, Any]], floor: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the share of right answers: of all, by kind and by depth, beside the floor of the reference."""

    def mean(found: Sequence[Mapping[str, Any]]) -> float:
        return sum(row["right"] for row in found) / len(found)

    def by(column: str) -> dict[str, float]:
        return {
            f"{each}": mean([row for row in rows if row[column] == each]) for each in sorted({r[column] for r in rows})
        }

    return {
        "needles_right": mean(rows),
        "needles_floor": mean(floor),
        "needles": {"kind": by("kind"), "depth": by("depth")},
        "needle_questions": len(rows),
    }
