"""A folder with claims of our own, for tests."""

from __future__ import annotations

import json
from pathlib import Path

CLAIM = '''
from workbench.claims.claim import (
    CalculationEvidence, Claim, ClaimSource, ClaimTrial, MeasurementEvidence, MissingEvidence, Ruling,
    RunEvidence,
)  # fmt: skip
from workbench.display import Table
from workbench.experiment.verdict import Verdict


def small(found):
    """At most 3: holds; at most 5: with limits; else refuted."""
    n = found["n"]
    return Ruling("holds" if n <= 3 else "holds-with-limits" if n <= 5 else "refuted", f"n is {n}", "up to 5", {"n": n})


def quick(rows):
    seconds = rows[0]["seconds"] if "seconds" in rows[0] else rows[0]["ttft_s_p50"]
    outcome = "holds" if seconds < 1 else "refuted"
    return Verdict("speed", "It is quick", "under a second", outcome, f"{seconds} s")


WAYS = {"examples": {"holds": {"n": 1}, "holds-with-limits": {"n": 5}, "refuted": lambda: {"n": 9}}}
SPEEDS = {"holds": [{"seconds": 0.5}], "refuted": [{"seconds": 2}]}
CLAIMS = (
    Claim("size", "It is small", (ClaimSource("A", "3"),),
          (ClaimTrial(CalculationEvidence(lambda: {"n": 4}), small, **WAYS),),
          condition_tables=lambda records: [Table("where", [("1",)], ("n",))]),
    Claim("look", "It looks small", (ClaimSource("A", "3"),),
          (ClaimTrial(MeasurementEvidence("looking", lambda quick: {"n": 1 if quick else 2}), small, **WAYS),)),
    Claim("speed", "It is quick", (ClaimSource("B", "1 s"),),
          (ClaimTrial(RunEvidence("speedy"), quick, SPEEDS, {"holds-with-limits": "it is quick or it is not"}),)),
    Claim("far", "It is far", (ClaimSource("C", "9"),), (ClaimTrial(MissingEvidence("a telescope"), small, **WAYS),)),
)
'''
SPEEDY = "question: How quick?\nworkload: {kind: random}\nvariants: {one: {}}\n"


def folder(place: Path) -> Path:
    """`claims/` with a file, `speedy.yaml` and `records/` beside it."""
    claims = place / "claims"
    claims.mkdir()
    (claims / "mine.py").write_text(CLAIM)
    (place / "speedy.yaml").write_text(SPEEDY)
    (place / "records").mkdir()
    return claims


def record(
    place: Path, seconds: float, date: str = "20261121-120000", busy: float = 0.0, cpu: dict | None = None,
    **settings: object,
) -> None:  # fmt: skip
    """A record of `speedy` in `place`."""
    from workbench.experiment.experiment import Experiment

    experiment = Experiment.from_yaml(SPEEDY).model_dump(mode="json") | settings
    value = {
        "summary": {"rows": [{"variant": "one", "seconds": seconds}], "others_cpu_share": busy, "verdicts": []},
        "environment": {"date": "2026-11-21T12:00:00+00:00", "cpu": {"model": "A CPU", "usable_cores": 2} | (cpu or {}),
                        "memory_bytes": 2**30, "gpu": []},
        "experiment": experiment,
    }  # fmt: skip
    (place / "records" / f"speedy-{date}.json").write_text(json.dumps(value))
