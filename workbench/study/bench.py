"""The canonical model-level table: prefill and decode at two depths, one sequence and sixteen, on this machine."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from workbench.cache.pages import pages_for
from workbench.engine.load import load
from workbench.engine.runner import Runner
from workbench.errors import WorkbenchError
from workbench.study.bench_works import Figures, Pair, Work, most_tokens, repetition
from workbench.study.ceilings import Ceilings, ceilings_for
from workbench.study.environment import environment
from workbench.study.fresh_process import cold_start, memory_in_decode
from workbench.study.machine import cpu_times, others_cpu_share
from workbench.study.measure_ceilings import thread_count
from workbench.study.metrics import percentile
from workbench.study.run_folder import write_atomically

BATCHES, DEPTHS = (1, 16), (0, 4096)
BUDGET = 512  # tokens a step at most
PAGE = 64


def canonical(
    batches: Sequence[int] = BATCHES, depths: Sequence[int] = DEPTHS, prompt: int = 512, output: int = 128
) -> tuple[Work, ...]:
    return tuple(
        Work(kind, batch, depth, prompt, output) for batch in batches for depth in depths for kind in ("prefill", "decode")
    )


def mixed_work(lengths: Sequence[Pair]) -> Work:
    return Work("mixed", len(lengths), lengths=tuple(lengths))


def bench(
    model: str,
    works: Sequence[Work] | None = None,
    *,
    settings: Mapping[str, Any] | None = None,
    threads: int | None = None,
    repetitions: int = 3,
    memory: bool = True,
    cold: bool = False,
    tell: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Time `works` (None: the canonical ones) on `model` in interleaved repetitions after a warm-up; the record.

    `settings` go to `workbench.load` (dtype, lane, weights, seed). `memory` and `cold` start processes of their own.
    `tell` receives a line before each piece of work. A work that does not fit into the context is a row that says so.
    """
    if repetitions < 1:
        raise WorkbenchError(f"repetitions {repetitions}: must be at least 1")
    works, settings = tuple(canonical() if works is None else works), {"model": model, **(settings or {})}
    before, surroundings = cpu_times(), environment()
    with thread_count(threads) as used:
        tell("loading")
        runner = load(**settings, max_num_batched_tokens=BUDGET, page_size=PAGE, **_room(works, _context(model)))
        spec = runner.model.spec
        possible = [work for work in works if most_tokens(work, BUDGET) <= spec.context]
        found: dict[Work, list[Figures]] = {work: [] for work in possible}
        for turn in range(repetitions + 1):
            for work in possible:
                name = f"repetition {turn}/{repetitions}" if turn else "warm-up"
                tell(f"{name}: {work.kind}, batch {work.batch}, depth {work.depth}")
                found[work] += [repetition(runner, work, turn)] if turn else [repetition(runner, work, turn)][1:]
        busy = others_cpu_share(before)
        tell("measuring what this machine reads and multiplies at best")
        rows = [_row(work, found.get(work, []), runner, used) for work in works]
        batches = sorted({work.batch for work in possible if work.kind == "decode"})
        record = {
            "question": "How fast is this model on this machine, and how near to its limits?",
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "model": {"name": model, "parameters": spec.parameters, "weight_bytes": runner.model.weight_bytes},
            "settings": {**settings, "threads": used, "repetitions": repetitions, "lane_used": str(runner.model.lane)},
            "rows": rows,
            "memory": [],
            "cold_start": None,
            "others_cpu_share": busy,
            "environment": surroundings,
        }
    del runner  # its memory is no part of what the other processes find
    for batch in batches if memory else ():
        tell(f"memory in decode, batch {batch}")
        record["memory"].append(memory_in_decode(settings, used, batch, 512, 32))
    if cold:
        tell("cold start")
        record["cold_start"] = cold_start(settings, used)
    return record


def write_record(record: Mapping[str, Any], folder: Path) -> Path:
    """`bench-MODEL-DATE.json` in `folder`, whole or not at all. Raises WorkbenchError where it cannot be written."""
    date = "".join(character for character in record["date"][:19] if character.isdigit())
    model = Path(str(record["model"]["name"]).removeprefix("shape:")).name
    path = folder / f"bench-{model}-{date[:8]}-{date[8:]}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(record, indent=2, allow_nan=False) + "\n"
        write_atomically(path, lambda file: file.write(text.encode()))
    except OSError as error:
        raise WorkbenchError(f"{path}: the record cannot be written there ({error})") from error
    return path
