"""Measure a technique: run its experiment with baseline and technique, and turn the rows into the figures of its
kind."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from workbench.claims.comparison import BASELINE, FIGURES, TECHNIQUE, Kind
from workbench.claims.schedules import simulate_policies
from workbench.claims.summary import LawCount, Summary, measured_on
from workbench.claims.technique import FIGURES_FUNCTION, LoadedTechnique, experiment_of, own_figures
from workbench.custom import resolve_path, user_code
from workbench.errors import WorkbenchError
from workbench.experiment.experiment import VariantResults
from workbench.machine.ceilings import intra_op_threads
from workbench.machine.environment import environment
from workbench.machine.processor import cpu_times, others_cpu_share
from workbench.measure.compare_variants import measure_variants

Figures = dict[str, float | None]  # None: not measured
Row = Mapping[str, Any]


def measure_technique(
    technique: LoadedTechnique,
    quick: bool = False,
    model: str = "",
    on_progress: Callable[[str], None] = lambda line: None,
) -> Summary:
    """Measure a technique against its baseline.

    Args:
        technique: the technique.
        quick: take a first look, which measures less, leaves out some figures and checks no laws.
        model: model to measure on; the first of its models, or that of its kind, unless given.
        on_progress: called with a line at each stage.

    Raises:
        WorkbenchError: the engine refuses baseline or technique, or the technique's own `figures` returns no numbers.
    """
    kind, experiment = technique.settings.kind, experiment_of(technique, quick, model)
    before = cpu_times()
    with intra_op_threads(experiment.measure.threads):
        if kind == "schedule":
            found = VariantResults(simulate_policies(experiment, (BASELINE, TECHNIQUE), on_progress), {})
        else:
            found = measure_variants(experiment, on_progress)
        rows = {row["variant"]: row for row in found.rows}
        figures = _FROM_ROWS[kind](rows[BASELINE], rows[TECHNIQUE], found)
        own = _own(technique)
    others = others_cpu_share(before) if found.others_cpu_share is None else found.others_cpu_share
    backends = {name: row.get("decode_backend") or row["backend"] for name in (BASELINE, TECHNIQUE)
                if (row := rows[name]).get("backend")}  # fmt: skip
    on_progress("laws")
    laws = LawCount() if quick else _laws(technique)
    where = measured_on(environment(), experiment.model_dump(mode="json"))
    return Summary("technique", figures | own, others_cpu_share=others, inputs=technique.inputs, laws=laws,
                   backends=backends, **where)  # fmt: skip


def _laws(technique: LoadedTechnique) -> LawCount:
    from workbench.claims.laws import check_technique

    laws = [law for report in check_technique(technique) for law in report.laws if law.tried]
    return LawCount(len(laws), tuple(law.law for law in laws if not law.ok))


def _own(technique: LoadedTechnique) -> Figures:
    """Return the figures of the technique's function `figures`; empty without one."""
    names = own_figures(technique.source_file)
    if not names:
        return {}
    where = f"{technique.source_file.parent.name}/{technique.source_file.name}: {FIGURES_FUNCTION}()"
    with user_code(where):
        found = resolve_path(f"{technique.source_file}:{FIGURES_FUNCTION}")()
    wrong = [name for name, value in found.items() if isinstance(value, bool) or not isinstance(value, int | float)]
    if wrong or not set(found) <= set(names):
        raise WorkbenchError(f"{where}: must return numbers by the names {', '.join(names)}, not {found!r}")
    if taken := set(names) & set(FIGURES[technique.settings.kind]):
        raise WorkbenchError(
            f"{where}: {taken.pop()!r} is a figure of every {technique.settings.kind} technique; rename it"
        )
    return {name: float(found[name]) if name in found else None for name in names}


def ratio(value: float | None, baseline: float | None) -> float | None:
    """Return value / baseline; None if either is missing or the baseline is not above 0."""
    if value is None or baseline is None or not baseline > 0 or not math.isfinite(value):
        return None
    return value / baseline


def _cache_figures(baseline: Row, technique: Row, found: VariantResults) -> Figures:
    depths = sorted(baseline.get("copying", {}), key=float)
    needle = [row["copying"][depths[0]]["gain"] if depths else None for row in (technique, baseline)]
    return {
        "bits_per_byte": technique["bits_per_byte"],
        "bits_per_byte_ratio": ratio(technique["bits_per_byte"], baseline["bits_per_byte"]),
        "kl": technique["kl_mean"],
        "copying": ratio(technique.get("copy_gain"), baseline.get("copy_gain")),
        "needle": ratio(*needle),
        "bytes_ratio": ratio(technique["kv_bytes"], baseline["kv_bytes"]),
        "decode_time_ratio": ratio(_step_seconds(technique), _step_seconds(baseline)),
    }


def _step_seconds(row: Row) -> float | None:
    """Return the seconds of a decode step at the longest context."""
    rates = row.get("decode_tokens_per_s")
    return 1 / rates[max(rates, key=int)] if rates else None


def _text_figures(baseline: Row, technique: Row, found: VariantResults) -> Figures:
    texts = found.tables["texts"]
    looped = {name: sum(text["looped"] for text in texts if text["variant"] == name) for name in (BASELINE, TECHNIQUE)}
    return {
        "distinct_ratio": ratio(1 - technique["repeated_4"], 1 - baseline["repeated_4"]),
        "loops": looped[TECHNIQUE],
        "baseline_loops": looped[BASELINE],
        "loop_ratio": (looped[TECHNIQUE] + 1) / (looped[BASELINE] + 1),
        "bits_per_byte_ratio": ratio(technique["bits_per_byte"], baseline["bits_per_byte"]),
        "time_ratio": ratio(technique["s_per_token"], baseline["s_per_token"]),
    }


def _draft_figures(baseline: Row, technique: Row, found: VariantResults) -> Figures:
    alone = min(technique["tokens_per_s"], key=int)
    return {
        "acceptance_length": technique.get("mean_acceptance_length"),
        "acceptance_rate": technique.get("draft_acceptance_rate"),
        "steps_ratio": ratio(*(_steps_per_token(found.tables["runs"], name, alone) for name in (TECHNIQUE, BASELINE))),
        "time_ratio": ratio(baseline["tokens_per_s"][alone], technique["tokens_per_s"][alone]),
    }


def _steps_per_token(runs: Sequence[Row], variant: str, load: str) -> float | None:
    mine = [run for run in runs if run["variant"] == variant and str(run["load"]) == load]
    return ratio(sum(run["steps"] for run in mine), sum(run["tokens"] for run in mine))


def _schedule_figures(baseline: Row, technique: Row, found: VariantResults) -> Figures:
    return {
        "attainment": technique["slo_attainment"],
        "attainment_ratio": ratio(technique["slo_attainment"], baseline["slo_attainment"]),
        "ttft_p50_ratio": ratio(technique["ttft_s_p50"], baseline["ttft_s_p50"]),
        "ttft_p99_ratio": ratio(technique["ttft_s_p99"], baseline["ttft_s_p99"]),
        "e2el_mean_ratio": ratio(technique["e2el_s_mean"], baseline["e2el_s_mean"]),
        "fairness": technique["fairness"],
        "decision_us": technique["decision_us"],
    }


_FROM_ROWS: dict[Kind, Callable[[Row, Row, VariantResults], Figures]] = {
    "attention": _cache_figures,
    "format": _cache_figures,
    "eviction": _cache_figures,
    "sampling": _text_figures,
    "draft": _draft_figures,
    "schedule": _schedule_figures,
}
