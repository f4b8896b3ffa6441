"""Serving compared: all variants run the same requests in turn."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

from workbench.engine.runner import Runner
from workbench.stages import StageCounter
from workbench.study.experiment import Experiment
from workbench.study.findings import VariantResults
from workbench.study.metrics import per_request, percentile, summarize
from workbench.study.predicted import Predictions
from workbench.study.rounds import run_requests
from workbench.study.runner_for import runner_for
from workbench.study.variants import every_variant, settings_text
from workbench.study.workload import clients_of, requests_of
from workbench.trace.recorder import Recorder

SPREADS = ("ttft_s", "tpot_s", "e2el_s")
TABLES = ("requests", "steps", "tokens")


def measure_serving(
    experiment: Experiment, on_progress: Callable[[str], None], predicted: Predictions | None = None
) -> VariantResults:
    """Measure latencies, rates and cache use of every variant, and return one row each.

    Rows are medians over interleaved rounds, after the experiment's number of warm-ups, with `predicted` beside them.
    The prefix index is emptied before each round."""
    variants = every_variant(experiment)
    on_progress = StageCounter(on_progress, len(variants) * (1 + experiment.measure.rounds))
    runners: dict[str, Runner] = {}
    alike: dict[str, Runner] = {}  # variants that differ only in their workload share one
    for name, variant in variants.items():
        on_progress(f"loading and warming up: {name}")
        same = {"workload": experiment.workload, "sampling": experiment.sampling, "measure": experiment.measure}
        key = variant.model_copy(update=same).to_yaml()
        if key not in alike:
            alike[key] = runner_for(variant)
        runners[name] = alike[key]
        for _ in range(variant.measure.warmup):
            _run_round(runners[name], variant, name)
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in variants}
    tables: dict[str, list[dict[str, Any]]] = {table: [] for table in TABLES}
    for turn in range(experiment.measure.rounds):
        for name, variant in variants.items():
            on_progress(f"round {turn + 1}: {name}")
            recorder = Recorder()
            runners[name].telemetry.listener = recorder.record
            _run_round(runners[name], variant, name)
            runners[name].telemetry.listener = None
            found = {table: getattr(recorder, table)() for table in TABLES}
            rounds[name].append(round_metrics(**found))
            for table in TABLES:
                tables[table] += [{"variant": name, "round": turn + 1, **row} for row in found[table]]
    rows = []
    for name, runner in runners.items():
        marks = {"variant": name, "settings": settings_text(experiment, name), "backend": str(runner.backends)}
        told = {} if predicted is None else {"predicted": predicted["variants"][name]}
        rows.append(marks | _median(rounds[name]) | told)
    return VariantResults(rows, {"rounds": experiment.measure.rounds}, tables)


def _run_round(runner: Runner, variant: Experiment, title: str) -> None:
    runner.reset_prefix_cache()
    requests = requests_of(variant, runner.tokenizer, runner.model.spec.vocab_size)
    run_requests(runner, requests, title, False, clients_of(variant))


def round_metrics(requests: list[dict], steps: list[dict], tokens: list[dict]) -> dict[str, Any]:
    """Return the metrics of one round. Service time is E2EL less queue time."""
    summary = summarize(requests, steps, tokens)
    each = per_request(requests, tokens)
    service = [one["e2el_s"] - one["queue_s"] for one in each if one["e2el_s"] is not None]
    return {
        **{f"{key}_{q}": summary[key][q] for key in SPREADS for q in ("p50", "p99")},
        "service_s_p50": percentile(service, 50),
        "longest_gap_s_p99": percentile([max(one["itl_s"]) for one in each if one["itl_s"]], 99),
        "output_tokens": summary["tokens"]["output"],
        "output_tokens_per_s": summary["output_tokens_per_s"],
        "kv_bytes_peak": summary["kv_bytes_peak"],
    }


def _median(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    known = {key: [one[key] for one in rounds if one[key] is not None] for key in rounds[0]}
    return {key: median(values) if values else None for key, values in known.items()}
