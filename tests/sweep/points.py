"""Sweeps that are over in a second or two: a shape of four layers, a handful of tokens."""

from __future__ import annotations

from pathlib import Path

from workbench.sweep.folder import SweepFolder, experiment_with_axes

TINY = """
question: does it run?
model: {name: "shape:tiny", dtype: float32}
backend: eager
sampling: {temperature: 0}
workload: {kind: random, requests: 2, prompt_tokens: 8, output_tokens: 4}
measure: {warmup: 0, ceilings: false}
"""


def write(folder: Path, more: str = "") -> Path:
    path = folder / "tiny.yaml"
    path.write_text(TINY + more)
    return path


def planned(folder: Path, *sets: str, more: str = "") -> SweepFolder:
    """Return the sweep of the tiny experiment over the axes `sets`, not yet run."""
    return SweepFolder.create(experiment_with_axes(write(folder, more), sets), folder / "runs", "tiny")
