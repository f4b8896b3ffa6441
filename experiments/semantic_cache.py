"""Measure semantic caching: true and false hits, with and without a second gate that compares facts.

    python -m experiments.semantic_cache [--json] [--out experiments/records]

Pairs of questions are paraphrases, which may share an answer, or differ in one word that turns the answer. A cache that
holds the first is asked the second, at thresholds from 0.5 to 1. Embeddings: the mean of the demo model's token
embeddings, and counts of groups of three letters. The rule, written before the run: some threshold without the gate has
at most 5% false hits and at least half of the true ones (the gate is not needed); with the gate, false hits are at most
5% at every threshold, and at least half of the paraphrases pass the gate.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from workbench import load
from workbench.display import Table
from workbench.gateway.similarity import cosine, facts_differ, unit
from workbench.machine.environment import environment
from workbench.progress import discard
from workbench.runs.folder import write_dated_record

PARAPHRASES = (
    ("How do I enable two-factor login?", "How can two-factor login be enabled?"),
    ("What is the capital of France?", "Tell me the capital city of France."),
    ("How do I reset my password?", "I forgot my password, how do I reset it?"),
    ("Convert 5 miles to kilometers", "How many kilometers are 5 miles?"),
    ("Why is the sky blue?", "What makes the sky look blue?"),
    ("How do I sort a list in Python?", "Sorting a list in Python: how?"),
    ("What time does the shop close?", "When does the shop close?"),
    ("How do I add a user to a group in Linux?", "In Linux, how is a user added to a group?"),
    ("What is the boiling point of water?", "At what temperature does water boil?"),
    ("Who wrote Hamlet?", "Who is the author of Hamlet?"),
    ("How long does shipping take?", "How many days until my order is delivered?"),
    ("Explain recursion to a beginner", "Explain recursion for beginners, please"),
    ("What does HTTP 404 mean?", "What is the meaning of HTTP 404?"),
    ("How do I cancel my subscription?", "I want to cancel my subscription. How?"),
    ("What is 12 * 7?", "Compute 12 * 7"),
    ("How do I undo my last commit in git?", "In git, how can I undo the last commit?"),
    ("Is the museum open on Monday?", "On Monday, is the museum open?"),
    ("How many legs does a spider have?", "What number of legs has a spider?"),
    ("How do I increase the font size?", "How can I increase the size of the font?"),
    ("Where can I park near the station?", "Is there parking near the station, and where?"),
    ("How do I delete my account?", "What are the steps to delete my account?"),
    ("What is the population of Japan?", "How many people live in Japan?"),
    ("How do I export my data as CSV?", "Exporting my data as CSV, how does it work?"),
    ("Which vitamins are in oranges?", "What vitamins do oranges have?"),
)
OPPOSITES = (
    ("How do I enable two-factor login?", "How do I disable two-factor login?"),
    ("What is the capital of France?", "What is the capital of Spain?"),
    ("Convert 5 miles to kilometers", "Convert 5 kilometers to miles"),
    ("Convert 5 miles to kilometers", "Convert 6 miles to kilometers"),
    ("How do I add a user to a group in Linux?", "How do I remove a user from a group in Linux?"),
    ("What time does the shop close?", "What time does the shop open?"),
    ("Is the museum open on Monday?", "Is the museum open on Sunday?"),
    ("Is this mushroom edible?", "Is this mushroom inedible?"),
    ("Which medicines can be taken with alcohol?", "Which medicines cannot be taken with alcohol?"),
    ("How do I increase the font size?", "How do I decrease the font size?"),
    ("What does `git stash push` do?", "What does `git stash pop` do?"),
    ("What is 12 * 7?", "What is 12 + 7?"),
    ("How do I encrypt a file?", "How do I decrypt a file?"),
    ("Who won the match?", "Who lost the match?"),
    ("Which countries are in the EU?", "Which countries are not in the EU?"),
    ("What is the largest planet?", "What is the smallest planet?"),
    ("How do I sort in ascending order?", "How do I sort in descending order?"),
    ("Should the valve be open before the test?", "Should the valve be open after the test?"),
    ("What does np.argmax return?", "What does np.argmin return?"),
    ("Is it legal to park here?", "Is it illegal to park here?"),
    ("Translate the text into German", "Translate the text into French"),
    ("How do I lock the door remotely?", "How do I unlock the door remotely?"),
    ("How much is the ticket for an adult?", "How much is the ticket for a child?"),
    ("How do plants absorb water in summer?", "How do plants absorb water in winter?"),
    ("Can cats eat grapes?", "Can dogs eat grapes?"),
    ("How do I cook white rice?", "How do I cook brown rice?"),
    ("What are the side effects of aspirin?", "What are the side effects of ibuprofen?"),
    ("how is the weather in paris", "how is the weather in rome"),
)
# Written after the gate compared exchanged words, which the pairs above had asked for; the gate was not changed since.
LATER_PARAPHRASES = (
    ("How do I renew my passport?", "How can I get my passport renewed?"),
    ("What is the speed of light?", "How fast is light?"),
    ("How do I merge two branches in git?", "In git, how do I merge two branches?"),
    ("Why do cats purr?", "What is the reason that cats purr?"),
    ("How many bytes are in a kilobyte?", "A kilobyte has how many bytes?"),
    ("Where is the nearest pharmacy?", "Can you tell me where the nearest pharmacy is?"),
    ("How do I install numpy with pip?", "Installing numpy with pip, how does that work?"),
    ("Who painted the Mona Lisa?", "The Mona Lisa was painted by whom?"),
    ("What is 15% of 240?", "Calculate 15% of 240"),
    ("Does the train stop in Leeds?", "Is Leeds a stop of the train?"),
    ("How do I change the oil of a car?", "Changing the oil of my car: what are the steps?"),
    ("When was the telephone invented?", "In what year was the telephone invented?"),
)
LATER_OPPOSITES = (
    ("How do I renew my passport?", "How do I renew my visa?"),
    ("Is tomato a fruit?", "Is tomato a vegetable?"),
    ("What is 15% of 240?", "What is 15% of 420?"),
    ("How do I freeze my card?", "How do I unfreeze my card?"),
    ("Who is older, Anna or Ben?", "Who is younger, Anna or Ben?"),
    ("Translate from German to English", "Translate from English to German"),
    ("Can I take ibuprofen while pregnant?", "Can I take paracetamol while pregnant?"),
    ("When does summer time begin?", "When does summer time end?"),
    ("How do I stop the server?", "How do I restart the server?"),
    ("Is Alice taller than Bob?", "Is Bob taller than Alice?"),
    ("What is the plural of mouse?", "What is the plural of house?"),
    ("Does the warranty cover water damage?", "Does the warranty cover fire damage?"),
    ("What happens if I pay early?", "What happens if I pay late?"),
    ("How do I mute a channel?", "How do I leave a channel?"),
)
THRESHOLDS = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98)
FALSE_HITS_ALLOWED, HITS_WANTED = 0.05, 0.5
Kinds = dict[str, tuple[tuple[str, str], ...]]
FIRST: Kinds = {"paraphrases": PARAPHRASES, "opposites": OPPOSITES}
LATER: Kinds = {"paraphrases": LATER_PARAPHRASES, "opposites": LATER_OPPOSITES}
Embed = Callable[[str], Sequence[float]]


def demo_embedding() -> Embed:
    """Return an embedding function: the mean of the demo model's token embeddings."""
    runner = load("demo", backend="eager", report=discard)
    tokenizer, embedding = runner.tokenizer, runner.model.embedding
    assert tokenizer is not None and embedding is not None
    table = embedding.weight

    def embed(text: str) -> Sequence[float]:
        with torch.inference_mode():
            return table[torch.tensor(tokenizer.encode(text))].float().mean(0).tolist()

    return embed


def trigram_embedding() -> Embed:
    """Return an embedding function: counts of groups of three letters, each at the vector position given by its
    hash."""

    def embed(text: str) -> Sequence[float]:
        padded = f"  {text.lower()}  "
        counts = Counter(padded[place : place + 3] for place in range(len(padded) - 2))
        vector = [0.0] * 1024
        for group, count in counts.items():
            vector[sum(ord(letter) * 31**place for place, letter in enumerate(group)) % len(vector)] += count
        return vector

    return embed


def measure(embed: Embed, kinds: Kinds) -> dict[str, Any]:
    """Return the hit rates of paraphrases and of opposites at each threshold, with and without the gate, and the range
    of scores of both."""
    scores = {
        kind: [cosine(unit(embed(one)), unit(embed(other))) for one, other in pairs] for kind, pairs in kinds.items()
    }
    opened = {kind: [not facts_differ(one, other) for one, other in pairs] for kind, pairs in kinds.items()}
    rows = []
    for threshold in THRESHOLDS:
        row: dict[str, Any] = {"threshold": threshold}
        for kind, found in scores.items():
            near = [score >= threshold for score in found]
            passed = [hit and is_open for hit, is_open in zip(near, opened[kind], strict=True)]
            row |= {f"{kind}_hit": sum(near) / len(near), f"{kind}_hit_gated": sum(passed) / len(passed)}
        rows.append(row)
    ranges = {kind: [min(found), max(found)] for kind, found in scores.items()}
    return {"rows": rows, "scores": ranges}


def judge(found: dict[str, dict[str, Any]], kinds: Kinds) -> dict[str, Any]:
    """Return the verdict by the rule written before the run: whether a threshold alone suffices, and whether the gate
    holds (also a gate of facts alone)."""
    paraphrases, opposites = kinds["paraphrases"], kinds["opposites"]
    rows = [row for each in found.values() for row in each["rows"]]
    alone = any(row["opposites_hit"] <= FALSE_HITS_ALLOWED and row["paraphrases_hit"] >= HITS_WANTED for row in rows)
    opened = sum(not facts_differ(*pair) for pair in paraphrases) / len(paraphrases)
    worst = max(row["opposites_hit_gated"] for row in rows)
    by_facts = [[pair for pair in pairs if not facts_alone_differ(*pair)] for pairs in (paraphrases, opposites)]
    return {
        "a_threshold_alone_suffices": alone,
        "largest_false_hits_gated": worst,
        "paraphrases_through_the_gate": opened,
        "opposites_through_the_gate": [list(pair) for pair in opposites if not facts_differ(*pair)],
        "paraphrases_through_facts_alone": len(by_facts[0]) / len(paraphrases),
        "opposites_through_facts_alone": len(by_facts[1]) / len(opposites),
        "gate_holds": worst <= FALSE_HITS_ALLOWED and opened >= HITS_WANTED,
    }


def facts_alone_differ(one: str, other: str) -> bool:
    """Return whether two questions differ in numbers, names, negations, opposites or code; other words are ignored."""
    return bool(facts_differ(one, other)) and not facts_differ(one, other).startswith(("words", "order"))


def table(name: str, found: dict[str, Any]) -> Table:
    headings = ("threshold", "hits", "false hits", "hits, gated", "false hits, gated")
    columns = ("paraphrases_hit", "opposites_hit", "paraphrases_hit_gated", "opposites_hit_gated")
    cells = [[row["threshold"], *(f"{row[column]:.0%}" for column in columns)] for row in found["rows"]]
    ranges = "; ".join(f"{kind} {low:.2f} to {high:.2f}" for kind, (low, high) in found["scores"].items())
    return Table(name, cells, headings, note=f"cosines: {ranges}")


def main(
    as_json: Annotated[bool, typer.Option("--json", help="the record on standard output")] = False,
    out: Annotated[Path | None, typer.Option(help="folder for a dated record")] = None,
) -> None:
    """Ask a semantic cache paraphrases and opposites of the questions that it holds."""
    date = datetime.now(UTC).isoformat(timespec="seconds")
    embeddings = {"demo's token embeddings": demo_embedding(), "letter trigrams": trigram_embedding()}
    sets = {"first": FIRST, "later": LATER}
    found = {
        which: {name: measure(embed, kinds) for name, embed in embeddings.items()} for which, kinds in sets.items()
    }
    record = {
        "experiment": "semantic_cache", "date": date, "environment": environment(),
        "verdict": {which: judge(found[which], kinds) for which, kinds in sets.items()},
        "pairs": {which: {kind: len(pairs) for kind, pairs in kinds.items()} for which, kinds in sets.items()},
        "embeddings": found,
    }  # fmt: skip
    if as_json:
        print(json.dumps(record, indent=2))
    else:
        for which, by_name in found.items():
            for name, each in by_name.items():
                Console(width=140).print(table(f"{name}, {which} pairs", each).text())
        print(json.dumps(record["verdict"], indent=2))
    if out is not None:
        print(write_dated_record(record, out, "semantic_cache"), file=sys.stderr)


if __name__ == "__main__":
    typer.run(main)
