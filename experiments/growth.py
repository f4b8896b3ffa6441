"""Measure how the time of a token grows along an axis: `python -m experiments.growth FOLDER` writes a record there.

Decode steps of SmolLM2's shape with random weights and of the real file, both in bfloat16, along context, batch, layers
and vocabulary. The rule, written before the run: the share of the roofline that a step reaches (the cost model's time /
the measured time) is along each curve the same as at its first point, within `TOLERANCE`.
"""

from __future__ import annotations

from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import typer

from compiled_kernels.rounds import interleaved
from workbench.bench.growth import AXES, grown
from workbench.bench.model import bench_row, run_repetition
from workbench.engine.config import EngineConfig
from workbench.engine.loaded_model import LoadedModel
from workbench.machine.ceilings import ceilings_for
from workbench.machine.environment import environment
from workbench.runs.folder import write_dated_record

TOLERANCE, STEPS = 0.15, 16  # decode steps a round
MODELS = "shape:smollm2-135m", "smollm2"


def curve(points: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add to each point of a curve the measured and predicted seconds of a token, and `growth`: the relative excess of
    measured over predicted growth since the first point."""
    for point in points:
        share = point["share_of_roofline"]
        point["token_s"] = point["step_seconds"]["p50"] / point["batch"]
        point |= {"predicted_token_s": point["token_s"] * share, "growth": points[0]["share_of_roofline"] / share - 1}
    return points


def main(out: Path, rounds: int = 5) -> None:
    works = {}
    for name in MODELS:
        config = EngineConfig.build(name, dtype="bfloat16", weights="dense", backend="mlir", pages=80)
        loaded = LoadedModel.load(config)
        for axis, values in AXES.items():
            works |= {(name, axis, value): grown(config, loaded, axis, value, STEPS) for value in values}
    found = defaultdict(list)
    for turn, key in interleaved(works, rounds, print, str, rotate=True):
        case, runner = works[key]
        found[key] += [run_repetition(runner, case, turn)] * bool(turn)
    ceilings = ceilings_for(2**28, compiled=True, refresh=True)
    curves = defaultdict(list)
    for key, (case, runner) in works.items():
        row = bench_row(case, found[key], runner, ceilings)
        curves[key[:2]].append({"path": key[1], "value": key[2], **row})
    rows = [{"variant": name, "axis": axis, "curve": curve(points)} for (name, axis), points in curves.items()]
    record = {
        "experiment": "growth", "date": datetime.now(UTC).isoformat(timespec="seconds"), "rounds": rounds, "rows": rows,
        "holds": all(abs(point["growth"]) <= TOLERANCE for row in rows for point in row["curve"]),
        "ceilings": ceilings.as_json(), "environment": environment(),
    }  # fmt: skip
    print(write_dated_record(record, out, "growth"), record["holds"])


if __name__ == "__main__":
    typer.run(main)
