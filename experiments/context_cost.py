"""Measure the time that a quantized cache saves in long contexts: `python -m experiments.context_cost FOLDER` writes a
record.

Decode steps of TinyLlama's shape with random weights in bfloat16, over caches of bfloat16, INT8 and INT4 that take
turns step by step. The rule, written before the run: a step takes at most `MARGIN` times dense's time x (bytes of
weights and of the cache) / (bytes of weights and of the dense cache).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import typer

from workbench.engine.config import EngineConfig
from workbench.engine.loaded_model import LoadedModel
from workbench.engine.runner import Runner
from workbench.engine.shared_layers import share_layers
from workbench.kv_cache.pages import pages_for
from workbench.machine.environment import environment
from workbench.machine.processor import cpu_times, others_cpu_share
from workbench.request import Request, SamplingParameters
from workbench.runs.folder import write_dated_record
from workbench.trace.events import Stepped

MODEL, MARGIN, STEPS, PAGE = "shape:tinyllama-1.1b", 1.2, 24, 64
FORMATS = "dense", "int8", "int4"
# Context and layers: fewer of the 22 in longer contexts, since a prefill of all takes half an hour here. A layer's
# share of weights and cache is the same in each; the head, which all have, weighs more.
POINTS = (2048, 22), (8192, 8), (32_768, 2)


def decode_steps(runner: Runner, context: int) -> Iterator[Stepped]:
    """Yield the decode steps of one sequence after a prompt of `context` tokens."""
    prompt = tuple((31 * position) % 30_000 + 5 for position in range(context))
    request = Request(f"{context}", prompt, SamplingParameters(temperature=0.0, max_tokens=STEPS + 2, ignore_eos=True))
    for event in runner.stream([request]):
        if isinstance(event, Stepped) and event.phase == "decode":
            yield event


def measure(loaded: LoadedModel, context: int, layers: int) -> list[dict[str, Any]]:
    """Return one row for each cache format. `times_allowed` is the measured step time divided by the time that the rule
    allows; the rule holds where it is at most 1."""
    part = share_layers(replace(loaded, tokenizer=None), range(layers))
    runs = {}
    for form in FORMATS:
        config = EngineConfig.build(
            MODEL, dtype="bfloat16", weights="dense", backend="mlir", cache=form, page_size=PAGE,
            pages=pages_for(context + STEPS + 2, PAGE) + 1, max_num_seqs=1,
        )  # fmt: skip
        runs[form] = decode_steps(Runner(config, part), context)
        next(runs[form])  # prefills, and steps once unmeasured
        print(context, layers, form, "is prefilled", flush=True)
    before = cpu_times()
    steps = [{form: next(run) for form, run in runs.items()} for _ in range(STEPS)]
    busy, rows, weights = others_cpu_share(before), [], part.transformer.weight_bytes
    for form in FORMATS:
        seconds = [step[form].wall_seconds for step in steps]
        rows.append({
            "context": context, "layers": layers, "cache": form, "step_seconds": median(seconds), "steps": seconds,
            "cache_bytes": steps[-1][form].kv_bytes, "weight_bytes": weights, "others_cpu_share": busy,
        })  # fmt: skip
        read, dense = (weights + rows[place]["cache_bytes"] for place in (-1, 0))
        rows[-1]["times_allowed"] = rows[-1]["step_seconds"] / (MARGIN * rows[0]["step_seconds"] * read / dense)
    return rows


def main(out: Path) -> None:
    loaded = LoadedModel.load(EngineConfig.build(MODEL, dtype="bfloat16", weights="dense", backend="mlir"))
    spec = loaded.transformer.spec  # whose context is 2,048: positions beyond it cost the same
    loaded.transformer.spec = spec.model_copy(update={"max_position_embeddings": 2 * POINTS[-1][0]})
    rows = [row for point in POINTS for row in measure(loaded, *point)]
    for row in rows:
        print({name: value for name, value in row.items() if name != "steps"})
    record = {
        "experiment": "context_cost", "date": datetime.now(UTC).isoformat(timespec="seconds"), "rows": rows,
        "holds": all(row["times_allowed"] <= 1 for row in rows[1:]), "environment": environment(),
    }  # fmt: skip
    print(write_dated_record(record, out, "context_cost"), record["holds"])


if __name__ == "__main__":
    typer.run(main)
