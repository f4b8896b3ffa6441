"""Make the tables that compare the variants of an experiment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from workbench.display import Table
from workbench.experiment.verdict import RuleChange
from workbench.machine.processor import contention_remark
from workbench.runs.measures import format_measure, measure_of, own_measures
from workbench.runs.record import Record
from workbench.units import format_duration, format_number, format_percent

Rows = Sequence[Mapping[str, Any]]

# Measures of a row in the order of columns. A measure that no row has gets no column.
QUALITY = (
    "questions", "right", "answered", "bits_per_byte", "kl_mean", "kl_p99", "kl_max", "same_top", "greedy_equal",
    "same_texts_share", "first_divergence", "bits_a_token", "entropy", "most_likely", "distinct_2", "repeated_4",
    "looped", "repeated_alike", "copied", "copy_gain", "choices_right", "needles_right", "needles_floor",
)  # fmt: skip
COSTS = (
    "backend", "weight_bytes", "bytes_per_token", "stored_bytes_per_token", "sequences", "ttft_first_s", "ttft_s",
    "ttft_s_p50", "visible_s_p50", "ttft_s_p99", "tpot_s_p50", "tpot_s_p99", "tpot_ratio", "tpot_ratio_low",
    "tpot_ratio_high", "e2el_s_p50", "e2el_s_p99", "service_s_p50", "longest_gap_s_p99", "longest_gap_s", "gap_s_p50",
    "behind_ttft_s", "short_ttft_s_p50", "short_ttft_s_p99", "seconds", "slo_attainment", "goodput_requests_per_s",
    "cache_hit_rate", "cache_waste", "sequences_mean", "cached_tokens", "requests_per_s", "output_tokens_per_s",
    "predicted_output_tokens_per_s", "messages", "same_tokens", "kv_bytes_peak", "varying_outputs", "varying_bits",
    "same_bits", "diverged_prompts", "price_prefill", "price_decode_one", "price_decode_many", "num_speculative_tokens",
    "draft_acceptance_rate", "mean_acceptance_length", "step_ms", "draft_ms", "speed_up_alone", "predicted_speed_up",
    "loses_from", "same_tokens_share", "rounds_per_question", "calls_per_question", "prompt_tokens_per_question",
    "cached_tokens_per_question", "computed_tokens_per_question", "output_tokens_per_question",
    "thinking_tokens_per_question", "later_ttft_s", "later_cold_ttft_s", "tools_s_per_question", "seconds_per_question",
)  # fmt: skip
CURVES = (
    "slo_attainment", "ttft_s_p50", "ttft_s_p99", "longest_gap_s_p99", "cache_hit_rate", "prefill_s",
    "predicted_prefill_s", "prefill_flops_share", "decode_step_s", "predicted_decode_step_s", "decode_bytes_share",
    "e2el_s",
)  # fmt: skip
PREDICTED = (
    "ttft_s_p50", "ttft_s_p90", "tpot_s_p50", "tpot_s_p90", "longest_gap_s_p99", "slo_attainment",
    "goodput_requests_per_s", "output_tokens_per_s",
)  # fmt: skip
FRONTS = ("decode_tokens_per_s.", "tokens_per_s.")  # prefixes of measures by context length and by load


def variant_tables(rows: Rows) -> list[Table]:
    """Return each table for which the rows have data: quality, differences, copying by depth, costs."""
    flat = [flatten({**row, "backend": row.get("decode_backend", row.get("backend"))}) for row in rows]
    speeds = [name for name in dict.fromkeys(name for row in flat for name in row) if name.startswith(FRONTS)]
    costs = (*COSTS, *speeds, *own_measures())
    found = [
        _table("quality", QUALITY, rows), _differences(rows), _by_depth(rows), _table("costs and speed", costs, flat),
        _predictions(rows), *_curves(rows),
    ]  # fmt: skip
    return [table for table in found if len(table.headings) > 1]


def _predictions(rows: Rows) -> Table:
    """Build the table of a fleet's predicted and measured numbers. Measures that no row has get no columns."""
    of = [row for row in rows if row.get("prediction")]
    names = [name for name in PREDICTED if any(name in row["prediction"] for row in of)]
    cells: list[list[object]] = []
    for row in of:
        ratios = {name: row["measured_over_predicted"].get(name) for name in names}
        cells.append([row["variant"], "predicted", *_cells(row["prediction"], names)])
        cells.append(["", "measured", *_cells(row, names)])
        cells.append(["", "measured / predicted", *map(format_number, ratios.values())])
    headings = ["what was predicted", "", *map(heading, names)] if names else [""]
    return Table("", cells, headings, left=("",))


def _curves(rows: Rows) -> list[Table]:
    """Build the tables of simulated variants: metrics by value of a swept setting (first column)."""
    tables = []
    for name in CURVES:
        of = [row for row in rows if any(point.get(name) is not None for point in row.get("curve", ()))]
        if of:
            points = of[0]["curve"]
            cells = [[row["variant"], *(format_measure(name, point.get(name)) for point in row["curve"])] for row in of]
            headings = [f"{heading(name)}, {points[0]['path']}", *(str(point["value"]) for point in points)]
            tables.append(Table("", cells, headings, left=()))
    return tables


def _table(title: str, known: Sequence[str], rows: Rows) -> Table:
    names = [name for name in known if any(row.get(name) is not None for row in rows)]
    cells = [[row["variant"], *_cells(row, names)] for row in rows]
    return Table("", cells, [title, *map(heading, names)], left=("backend",))


def _cells(row: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    return [format_measure(name, row.get(name)) for name in names]


def heading(name: str) -> str:
    return measure_of(name).heading


def _differences(rows: Rows) -> Table:
    """Build the table of differences from the reference: mean, 95% interval, and the smallest difference that as many
    texts of this spread show with a probability of 80%."""
    of = [row for row in rows if row.get("difference")]
    names = list(dict.fromkeys(name for row in of for name in row["difference"]))
    cells = [[row["variant"], *(_interval(row["difference"].get(name)) for name in names)] for row in of]
    headings = [f"{heading(f'difference_{name}_mean')} [95%] (detectable)" for name in names]
    return Table("", cells, ["difference from the reference", *headings], left=())


def _interval(found: Mapping[str, float] | None) -> str:
    if not found:
        return "-"
    bounds = f" [{found['low']:+.4f}, {found['high']:+.4f}] ({found['detectable']:.4f})" if "low" in found else ""
    return f"{found['mean']:+.4f}{bounds}"


def _by_depth(rows: Rows) -> Table:
    """Build the table of copying by depth of the copied text (0% is the beginning): the fraction of identifiers' tokens
    that are predicted as most likely, and the gain in nats per token."""
    depths = list(dict.fromkeys(depth for row in rows for depth in row.get("copying", {})))
    cells = [[row["variant"], *(_copied(row.get("copying", {}).get(depth)) for depth in depths)] for row in rows]
    return Table("", cells, ["copied (gain), from depth", *map(format_percent, map(float, depths))], left=())


def _copied(found: Mapping[str, float] | None) -> str:
    return "-" if found is None else f"{format_percent(found['copied'])} ({found['gain']:+.2f})"


def show(record: Record, console: Console) -> None:
    """Print a run's question, table, verdicts, remarks and path."""
    summary = record.summary
    question = next(line for line in record.experiment_text.splitlines() if line.startswith("question:"))
    console.print(Text(question.removeprefix("question:").strip(" '\""), style="bold"), soft_wrap=True)
    for found in variant_tables(summary["rows"]):
        console.print(found)
    for verdict in summary["verdicts"]:
        console.print(Text(f"{verdict['claim']}: {verdict['outcome']}", style="bold"), soft_wrap=True)
        for name in ("says", "rule", "reason"):
            console.print(Text(f"  {name:8}{verdict[name]}"), soft_wrap=True)
        for change in verdict.get("changed", ()):  # older records lack this field
            console.print(Text(f"  changed {RuleChange(**change)}"), soft_wrap=True)
    for line in remarks(summary):
        console.print(Text(line), soft_wrap=True)
    console.print(Text(f"run folder  {record.path}", style="bold"), soft_wrap=True)


def remarks(summary: Mapping[str, Any]) -> list[str]:
    lines = [f"{format_duration(summary['wall_s'])} in all"]
    about, picture = summary["about"], summary.get("picture")
    if about.get("texts") == "held-out modules":
        lines.append(
            f"text: {about['known']} of {about['listed']} held-out modules are here as the model's card has them"
        )
    if "package" in about:
        lines.append(f"text: {about['texts']} of {about['package']} ({about['licence']})")
    if "sizes" in about:
        cut = "" if about["enough"] else "; fewer than the protocol's: wider intervals"
        lines.append(f"sizes: {about['sizes']}{cut}")
    if picture:
        lines.append(f"picture: {picture.get('svg') or picture['problem']}")
    return [*lines, *filter(None, [contention_remark(summary["others_cpu_share"])])]


def flatten(row: Mapping[str, Any], front: str = "") -> dict[str, Any]:
    """Return the innermost values of nested mappings by their names joined with dots; values of a curve are named by
    their swept value."""
    flat: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{front}{name}.")
        elif name == "curve":
            for point in value:
                flat |= flatten({f"{name}.{point['value']}": {k: v for k, v in point.items() if k != "value"}}, front)
        else:
            flat[front + name] = value
    return flat
