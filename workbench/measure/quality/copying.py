"""Measure copying from context: generated code assigns an identifier at some depth, and a model has to repeat it at the
end.

    class Crate:
        def __init__(self): self.total = 0
        def push(self, ...): ...                     filler, seeded
        def init_state(self): self.NAME = 7          at the given depth
        def ...
        def last(self): return self.NAME             scored: the name's tokens

The gain is the name's log-probability minus its log-probability without the assignment, in nats per token."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from workbench.engine.runner import Runner
from workbench.errors import WorkbenchError
from workbench.measure.quality.teacher_forcing import ForcedText, score_tokens
from workbench.prompt.tokenization.tokenizer import Tokenizer
from workbench.settings import Count, Fraction01, Settings

VERBS = ("push", "pop", "scan", "merge", "flip", "split", "shift", "count", "trim", "wrap", "fetch", "store", "clear")
NOUNS = (
    "item",
    "node",
    "line",
    "word",
    "block",
    "field",
    "index",
    "value",
    "entry",
    "point",
    "frame",
    "token",
    "chunk",
)
OPERATIONS = ("+", "-", "*", "//", "%")
SYLLABLES = tuple(c + v for c in "bdfgklmnprstvz" for v in "aeiou")


class CopyingSettings(Settings):
    """Settings of copying: identifiers are assigned in generated code at several depths and repeated at its end."""

    names: Count = 4
    tokens: Count | Literal["auto"] = "auto"  # tokens of each text; auto: nine tenths of the model's context
    depths: Annotated[tuple[Fraction01, ...], Field(min_length=1)] = (
        0.0,
        0.25,
        0.5,
        0.75,
        1.0,
    )  # positions of an assignment, 0 at the text's beginning, 1 at its end


@dataclass(frozen=True)
class Snippet:
    """One text of generated code.

    `text.first_scored` is the index of the name's first token. `distance` is the number of tokens from the assigned
    name to it, None in the text without an assignment."""

    text: ForcedText
    name: int
    depth: float | None
    distance: int | None


def generate_snippets(
    tokenizer: Tokenizer, names: int, tokens: int, depths: Sequence[float], seed: int
) -> list[Snippet]:
    """Generate texts for `names` invented identifiers: one without the assignment, and one for each depth.

    Depth 0 is the beginning and 1 the end. All texts of a name have almost `tokens` tokens and the same filler."""
    made = []
    for index in range(names):
        draw = random.Random(f"{seed}/{index}")
        asked = tokenizer.encode(f".{_invented(draw)}")
        made += _for_one_name(tokenizer, index, asked, tokens, depths, draw)
    return made


def _for_one_name(
    tokenizer: Tokenizer, index: int, name: list[int], tokens: int, depths: Sequence[float], draw: random.Random
) -> list[Snippet]:
    head = tokenizer.encode("class Crate:\n\n    def __init__(self):\n        self.total = 0\n\n")
    ask = tokenizer.encode("    def last(self):\n        return self")
    before, after = tokenizer.encode("    def init_state(self):\n        self"), tokenizer.encode(" = 7\n\n")
    room = tokens - len(head) - len(before) - len(after) - len(ask) - 2 * len(name)
    filler: list[list[int]] = []
    while room >= (length := len(method := tokenizer.encode(_method(draw)))):
        filler.append(method)
        room -= length
    if not filler:
        raise WorkbenchError(
            f"copying: texts of {tokens} tokens are too short for code around the assignment; raise the number"
        )

    def snippet(depth: float | None) -> Snippet:
        place = None if depth is None else round(depth * len(filler))
        ids, stands = list(head), None
        for number in range(len(filler) + 1):
            if number == place:
                stands = len(ids) + len(before)
                ids += [*before, *name, *after]
            ids += filler[number] if number < len(filler) else ask
        first = len(ids)
        distance = None if stands is None else first - stands
        return Snippet(ForcedText((*ids, *name), first, num_prompt_tokens=first), index, depth, distance)

    return [snippet(None), *(snippet(depth) for depth in depths)]


def _method(draw: random.Random) -> str:
    one, other, result = draw.sample(NOUNS, 3)
    name = f"{draw.choice(VERBS)}_{draw.choice(NOUNS)}_{draw.randrange(100)}"
    return (
        f"    def {name}(self, {one}, {other}):\n"
        f"        {result} = {one} {draw.choice(OPERATIONS)} {draw.randrange(2, 10)}\n"
        f"        if {result} > {other}:\n            return {one}\n        return {result}\n\n"
    )


def _invented(draw: random.Random) -> str:
    return "_".join("".join(draw.choices(SYLLABLES, k=2)) for _ in range(2))


def measure_copying(runner: Runner, snippets: Sequence[Snippet]) -> list[dict]:
    """Score the snippets, and return one row for each snippet that has an assignment.

    Rows have name, depth, distance, `gain` in nats per token, and `copied`: the fraction of the name's tokens that the
    model predicts as most likely."""
    scores = score_tokens(runner, [snippet.text for snippet in snippets])
    nats = [[logprob for logprob, _ in each] for each in scores]
    without = {snippet.name: nats[i] for i, snippet in enumerate(snippets) if snippet.depth is None}
    return [
        {
            "name": snippet.name,
            "depth": snippet.depth,
            "distance": snippet.distance,
            "gain": (math.fsum(nats[i]) - math.fsum(without[snippet.name])) / len(nats[i]),
            "copied": sum(likely for _, likely in scores[i]) / len(scores[i]),
        }
        for i, snippet in enumerate(snippets)
        if snippet.depth is not None
    ]


def mean_by_depth(rows: Sequence[dict]) -> dict[float, dict[str, float]]:
    """Return for each depth the means over names of gain, copied fraction and distance."""
    found = {}
    for depth in sorted({row["depth"] for row in rows}):
        here = [row for row in rows if row["depth"] == depth]
        found[depth] = {key: sum(row[key] for row in here) / len(here) for key in ("gain", "copied", "distance")}
    return found
