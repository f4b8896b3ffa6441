"""Serving compared: all variants run the same requests in turn. The chart shows latency against throughput, and each
rate beside its bound."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from workbench.engine.runner import Runner
from workbench.experiment.build import clients_of, requests_of
from workbench.experiment.experiment import Experiment
from workbench.experiment.variants import VariantResults, described, every_variant
from workbench.measure.chart import import_altair, place_labels
from workbench.measure.predictions import Predictions
from workbench.measure.rounds import load_runners, run_requests
from workbench.progress import StageCounter
from workbench.runs.metrics import TABLES, round_metrics
from workbench.trace.recorder import Recorder

WIDTH, HEIGHT = 380, 280
MEASURED, BOUND = "#0b6e4f", "#a8a8a8"
PANELS = (("ttft_s_p50", "TTFT p50, s"), ("tpot_s_p50", "time per output token p50, s"))
RATE = "output_tokens_per_s"
Rows = Sequence[Mapping[str, Any]]


def measure_serving(
    experiment: Experiment, on_progress: Callable[[str], None], predicted: Predictions | None = None
) -> VariantResults:
    """Measure latencies, rates and cache use of every variant, and return one row each.

    Rows are medians over interleaved rounds, after the experiment's number of warm-ups, with `predicted` beside them.
    The prefix index is emptied before each round."""
    variants = every_variant(experiment)
    on_progress = StageCounter(on_progress, len(variants) * (2 + experiment.measure.rounds))
    same = {"workload": experiment.workload, "sampling": experiment.sampling, "measure": experiment.measure}
    runners = load_runners(variants, on_progress, same)
    for name, variant in variants.items():
        on_progress(f"warm-up: {name}")
        for _ in range(variant.measure.warmup):
            _run_round(runners[name], variant, name)
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in variants}
    tables: dict[str, list[dict[str, Any]]] = {table: [] for table in TABLES}
    for turn in range(experiment.measure.rounds):
        for name, variant in variants.items():
            on_progress(f"round {turn + 1}: {name}")
            recorder = Recorder()
            runners[name].set_listener(recorder.record)
            _run_round(runners[name], variant, name)
            runners[name].set_listener(None)
            found = {table: getattr(recorder, table)() for table in TABLES}
            rounds[name].append(round_metrics(**found))
            for table in TABLES:
                tables[table] += [{"variant": name, "round": turn + 1, **row} for row in found[table]]
    rows = []
    for name, runner in runners.items():
        marks = described(experiment, name, runner.core.backends)
        prediction = {} if predicted is None else {"predicted": predicted["variants"][name]}
        rows.append(marks | _median(rounds[name]) | prediction)
    return VariantResults(rows, {"rounds": experiment.measure.rounds}, tables)


def _run_round(runner: Runner, variant: Experiment, title: str) -> None:
    runner.reset_prefix_cache()
    requests = requests_of(variant, runner.tokenizer, runner.model.spec.vocab_size)
    run_requests(runner, requests, title, False, clients_of(variant))


def _median(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    known = {key: [one[key] for one in rounds if one[key] is not None] for key in rounds[0]}
    return {key: median(values) if values else None for key, values in known.items()}


def chart(rows: Rows, title: str) -> Any:
    """Draw an Altair chart: tokens a second of each variant as a bar with its bound as a tick, and TTFT and TPOT
    against them."""
    altair = import_altair()
    panels = [_bars(altair, rows), *(_against(altair, rows, key, title) for key, title in PANELS)]
    return altair.hconcat(*panels).properties(title=title)


def _bars(altair: Any, rows: Rows) -> Any:
    values = [{"variant": row["variant"], "rate": row[RATE], "bound": row["predicted"][RATE]} for row in rows]
    least, most = min(v["rate"] for v in values), max(max(v["rate"], v["bound"]) for v in values)
    scale = altair.Scale(type="log", domain=[0.5 * least, 1.5 * most], nice=False)
    y = altair.Y("variant:N", sort=None, title=None, axis=altair.Axis(labelLimit=260))
    base = altair.Chart(altair.Data(values=values)).encode(y=y)
    bars = base.mark_bar(color=MEASURED).encode(
        x=altair.X("rate:Q", scale=scale, title="output tokens a second (tick: bound by this machine's ceilings)"),
        x2=altair.datum(0.5 * least),
    )
    ticks = base.mark_tick(color="black", thickness=2).encode(x=altair.X("bound:Q", scale=scale))
    return (bars + ticks).properties(width=WIDTH, height=altair.Step(26))


def _against(altair: Any, rows: Rows, key: str, title: str) -> Any:
    points = [
        {"variant": row["variant"], "rate": each[RATE], "latency": each[key], "kind": kind}
        for kind in ("bound", "measured")
        for row in rows
        if (each := row if kind == "measured" else row["predicted"]).get(key)
    ]
    if not points:
        return altair.Chart(altair.Data(values=[])).mark_point()
    ends = {
        name: (0.6 * min(p[name] for p in points), 2.0 * max(p[name] for p in points)) for name in ("rate", "latency")
    }
    x = altair.X(
        "rate:Q", title="output tokens a second", scale=altair.Scale(type="log", domain=ends["rate"], nice=False)
    )
    y = altair.Y("latency:Q", title=title, scale=altair.Scale(type="log", domain=ends["latency"], nice=False))
    base = altair.Chart(altair.Data(values=points)).encode(x=x, y=y)
    kinds = altair.Scale(domain=["measured", "bound"], range=[MEASURED, BOUND])
    colour = altair.Color("kind:N", title=None, scale=kinds)
    dots = base.mark_point(filled=True, size=50, opacity=1).encode(color=colour)
    seen = [point for point in points if point["kind"] == "measured"]

    def at(value: float, name: str) -> float:
        return math.log(value / ends[name][0]) / math.log(ends[name][1] / ends[name][0])

    pixels = [(WIDTH * at(p["rate"], "rate"), HEIGHT * (1 - at(p["latency"], "latency"))) for p in seen]
    texts = [
        altair.Chart(altair.Data(values=[point]))
        .mark_text(align="right" if label.left else "left", dx=label.dx, dy=label.dy, fontSize=11)
        .encode(x=x, y=y, text="variant:N")
        for point, label in zip(seen, place_labels(pixels, [p["variant"] for p in seen], WIDTH), strict=True)
    ]
    return altair.layer(dots, *texts).properties(width=WIDTH, height=HEIGHT)
