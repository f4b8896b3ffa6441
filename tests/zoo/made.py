"""A folder with entries of our own, for tests."""

from __future__ import annotations

from pathlib import Path

from workbench.claims.comparison import BASELINE, TECHNIQUE
from workbench.claims.summary import LawCount, Summary
from workbench.claims.technique import LoadedTechnique

YAML = """\
technique: Hotter
kind: sampling
paper: "A and B, 2024: On heat (arXiv:0000.00000)"
use: {sampling.filters: [{path: "FOLDER/hotter.py:Hotter", arguments: {times: 0.5}}]}
says: "Colder logits repeat more."
rule: "loop_ratio >= 1.0 and bits_per_byte_ratio <= 0.9"
"""
SOURCE = '''\
"""Hotter: multiply the logits.

A and B, 2024, equation 1:

    l'  =  times * l
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Hotter:
    times: float = 1.0

    def __call__(self, logits, histories=()):
        return logits * self.times


def figures():
    return {"heat": 2.0}
'''


def folder(place: Path, **changes: str) -> Path:
    """Return a folder `zoo` with the entry `hotter`; `changes` replace lines of its YAML by their first word."""
    zoo = place / "zoo"
    zoo.mkdir(parents=True, exist_ok=True)
    (zoo / "hotter.py").write_text(SOURCE)
    lines = [line for line in YAML.replace("FOLDER", str(zoo)).splitlines() if line.split(":")[0] not in changes]
    lines += [f"{name}: {value}" for name, value in changes.items() if value]
    (zoo / "hotter.yaml").write_text("\n".join(lines) + "\n")
    return zoo


def summary_of(entry: LoadedTechnique, busy: float | None = 0.0, **figures: float) -> Summary:
    known = {"distinct_ratio": 1.0, "loop_ratio": 1.0, "bits_per_byte_ratio": 0.8, "time_ratio": 2.0, "heat": 2.0}
    return Summary(
        "technique", {**known, **figures}, "demo", "A CPU", "v3", "2026-11-27T12:00:00+00:00", busy, entry.inputs,
        laws=LawCount(2, ("b",)), backends={BASELINE: "eager", TECHNIQUE: "eager"},
    )  # fmt: skip
