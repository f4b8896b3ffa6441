"""A folder with claims of our own, for tests."""

from __future__ import annotations

import json
from pathlib import Path

from workbench.claims.claim import LoadedClaim, load_claims
from workbench.claims.evidence import inputs_of
from workbench.claims.summary import Summary, store_summaries

FUNCTIONS = '''
from workbench.display import Table


def small(n):
    """Return n."""
    return {"n": n, "words": "a few"}


def look(quick, model="demo"):
    return {"n": 1 if quick else 2, "letters": len(model)}


def quick(rows):
    return {"seconds": rows[0]["seconds"] if "seconds" in rows[0] else rows[0]["ttft_s_p50"]}


def tables(n):
    return [Table("where", [("1",)], ("n",))]
'''
CLAIMS = {
    "size": """
says: It is small
sources: {A: "3"}
trials: [{calculation: "mine.py:small", arguments: {n: 4}}]
rule: n <= 3 else n <= 5
limits: up to {n}
where: mine.py:tables
""",
    "look": """
says: It looks small
sources: {A: "3"}
models: [demo]
trials: [{measurement: "mine.py:look"}]
rule: n <= 3 else n <= 5
limits: up to 5
""",
    "speed": """
says: It is quick
sources: {B: 1 s}
trials: [{run: speedy, figures: "mine.py:quick"}]
rule: seconds < 1
""",
    "far": """
says: It is far
sources: {C: "9"}
trials: [{missing: a telescope}]
rule: n <= 3
""",
}
SPEEDY = "question: How quick?\nworkload: {kind: random}\nvariants: {one: {}}\n"


def folder(place: Path) -> Path:
    """`claims/` with four claims and their functions, and `speedy.yaml` beside it."""
    claims = place / "claims"
    claims.mkdir()
    (claims / "mine.py").write_text(FUNCTIONS)
    for name, text in CLAIMS.items():
        (claims / f"{name}.yaml").write_text(text)
    (place / "speedy.yaml").write_text(SPEEDY)
    return claims


def claim(folder: Path, name: str, **changed: object) -> LoadedClaim:
    """Return a claim of the folder, after `changed` keys (as JSON, which is YAML); None takes one away."""
    file = folder / f"{name}.yaml"
    lines = [line for line in file.read_text().splitlines() if line.split(":")[0] not in changed]
    lines += [f"{key}: {json.dumps(value)}" for key, value in changed.items() if value is not None]
    file.write_text("\n".join(lines) + "\n")
    return load_claims(folder)[name]


def measured(folder: Path, seconds: float, date: str = "2026-11-21T12:00:00", **fields: object) -> None:
    """Store a summary of `speed`."""
    speed = load_claims(folder)["speed"]
    known = {"machine": "A CPU", "level": "v3", "others_cpu_share": 0.0, "inputs": inputs_of(speed, speed.trials[0])}
    summary = Summary("run speedy", {"seconds": seconds}, date=date, **{**known, **fields})  # type: ignore[arg-type]
    store_summaries(speed.file, [summary])
