"""Tables of the variants of an experiment."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from workbench.display import Table
from workbench.experiment.verdict import RuleChange
from workbench.machine.processor import is_contended
from workbench.runs.record import Record

Rows = Sequence[Mapping[str, Any]]
Cell = Callable[[Any], str]


def _whole(value: float) -> str:
    return f"{value:,.0f}"


def _share(value: float) -> str:
    return f"{value:.1%}"


def _small(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}" if value < 1e-3 else f"{value:.4f}"


def _ms(value: float) -> str:
    return f"{value * 1e3:,.2f}"


# What a row may hold, in the order of its table; a figure that no row has is no column.
QUALITY: tuple[tuple[str, str, Cell], ...] = (
    ("questions", "questions", _whole),
    ("right", "right", _share),
    ("answered", "answered", _share),
    ("bits_per_byte", "bits/byte", "{:.4f}".format),
    ("kl_mean", "KL mean", _small),
    ("kl_p99", "KL p99", _small),
    ("kl_max", "KL max", _small),
    ("same_top", "same top token", _share),
    ("greedy_equal", "greedy equal", _share),
    ("same_texts_share", "same texts", _share),
    ("first_divergence", "parts at token", "{:.1f}".format),
    ("bits_a_token", "bits/token", "{:.2f}".format),
    ("entropy", "entropy", "{:.2f}".format),
    ("most_likely", "most likely tokens", _share),
    ("distinct_2", "distinct 2-grams", _share),
    ("repeated_4", "4-grams again", _share),
    ("looped", "ends in a loop", _share),
    ("repeated_alike", "same again", str),
    ("copied", "copied", _share),
    ("copy_gain", "copy gain", "{:.2f}".format),
)
COSTS: tuple[tuple[str, str, Cell], ...] = (
    ("backend", "backend", str),
    ("weight_bytes", "weight bytes", _whole),
    ("bytes_per_token", "bytes/token", _whole),
    ("stored_bytes_per_token", "stored for good", _whole),
    ("sequences", "sequences that fit", _whole),
    ("ttft_first_s", "first TTFT ms", _ms),
    ("ttft_s", "TTFT ms", _ms),
    ("ttft_s_p50", "TTFT ms", _ms),
    ("visible_s_p50", "first text seen ms", _ms),
    ("ttft_s_p99", "TTFT p99", _ms),
    ("tpot_s_p50", "TPOT ms", _ms),
    ("tpot_s_p99", "TPOT p99", _ms),
    ("tpot_ratio", "TPOT ratio", "{:.3f}".format),
    ("tpot_ratio_low", "from", "{:.3f}".format),
    ("tpot_ratio_high", "to", "{:.3f}".format),
    ("e2el_s_p50", "E2EL ms", _ms),
    ("e2el_s_p99", "E2EL p99", _ms),
    ("service_s_p50", "E2EL less queue ms", _ms),
    ("longest_gap_s_p99", "longest gap p99", _ms),
    ("longest_gap_s", "longest gap ms", _ms),
    ("gap_s_p50", "gap before ms", _ms),
    ("behind_ttft_s", "TTFT behind ms", _ms),
    ("short_ttft_s_p50", "short TTFT ms", _ms),
    ("short_ttft_s_p99", "short TTFT p99", _ms),
    ("seconds", "all of it s", "{:.2f}".format),
    ("slo_attainment", "SLO attainment", _share),
    ("goodput_requests_per_s", "goodput/s", "{:.2f}".format),
    ("cache_hit_rate", "cache hits", _share),
    ("cache_waste", "pages empty", _share),
    ("sequences_mean", "sequences at once", "{:.1f}".format),
    ("cached_tokens", "cached tokens", _whole),
    ("requests_per_s", "requests/s", "{:.2f}".format),
    ("output_tokens_per_s", "output tokens/s", _whole),
    ("predicted_output_tokens_per_s", "predicted at most", _whole),
    ("messages", "messages", _whole),
    ("same_tokens", "same tokens", str),
    ("kv_bytes_peak", "cache bytes", _whole),
    ("varying_outputs", "outputs in varying batches", str),
    ("varying_bits", "sets of bits", str),
    ("same_bits", "in the same", str),
    ("diverged_prompts", "diverged prompts", str),
    ("price_prefill", "prefill takes x", "{:.2f}".format),
    ("price_decode_one", "decode of one", "{:.2f}".format),
    ("price_decode_many", "of many", "{:.2f}".format),
    ("num_speculative_tokens", "drafted", _whole),
    ("draft_acceptance_rate", "accepted", _share),
    ("mean_acceptance_length", "tokens a check", "{:.2f}".format),
    ("step_ms", "step ms", "{:.3f}".format),
    ("draft_ms", "of it drafting", "{:.3f}".format),
    ("speed_up_alone", "speed-up alone", "{:.2f}".format),
    ("predicted_speed_up", "predicted", "{:.2f}".format),
    ("loses_from", "loses from load", _whole),
    ("same_tokens_share", "same outputs", _share),
    ("rounds_per_question", "rounds", "{:.2f}".format),
    ("calls_per_question", "calls", "{:.2f}".format),
    ("prompt_tokens_per_question", "prompt tokens", _whole),
    ("cached_tokens_per_question", "of them cached", _whole),
    ("computed_tokens_per_question", "computed", _whole),
    ("output_tokens_per_question", "output tokens", _whole),
    ("thinking_tokens_per_question", "of them thought", _whole),
    ("later_ttft_s", "later rounds' TTFT ms", _ms),
    ("later_cold_ttft_s", "from a cold start", _ms),
    ("tools_s_per_question", "in tools ms", _ms),
    ("seconds_per_question", "a question s", "{:.2f}".format),
)
CURVES: tuple[tuple[str, str, Cell], ...] = (
    ("slo_attainment", "SLO attainment", _share),
    ("ttft_s_p50", "TTFT p50 ms", _ms),
    ("ttft_s_p99", "TTFT p99 ms", _ms),
    ("longest_gap_s_p99", "longest gap p99 ms", _ms),
    ("cache_hit_rate", "cache hits", _share),
    ("prefill_s", "prefill ms", _ms),
    ("predicted_prefill_s", "at least", _ms),
    ("prefill_flops_share", "of FLOP/s", _share),
    ("decode_step_s", "decode step ms", _ms),
    ("predicted_decode_step_s", "at least", _ms),
    ("decode_bytes_share", "of bytes/s", _share),
    ("e2el_s", "E2EL ms", _ms),
)

PREDICTED: tuple[tuple[str, str, Cell], ...] = (
    ("ttft_s_p50", "TTFT p50 ms", _ms),
    ("ttft_s_p90", "p90", _ms),
    ("tpot_s_p50", "TPOT p50 ms", _ms),
    ("tpot_s_p90", "p90", _ms),
    ("longest_gap_s_p99", "longest gap p99 ms", _ms),
    ("slo_attainment", "SLO attainment", _share),
    ("goodput_requests_per_s", "goodput/s", "{:.2f}".format),
    ("output_tokens_per_s", "output tokens/s", _whole),
)


def variant_tables(rows: Rows) -> list[Table]:
    """Return the tables that the rows have data for: quality, copying by depth, costs."""
    contexts = list(dict.fromkeys(context for row in rows for context in row.get("decode_tokens_per_s", {})))
    loads = list(dict.fromkeys(load for row in rows for load in row.get("tokens_per_s", {})))
    decoded = [{**row, "backend": row["decode_backend"]} if "decode_backend" in row else row for row in rows]
    speeds = [(f"decode_tokens_per_s.{context}", f"tok/s at {int(context):,}", _whole) for context in contexts]
    speeds += [(f"tokens_per_s.{load}", f"tok/s of {load}", _whole) for load in loads]
    costs = _table("what it costs and buys", (*COSTS, *speeds), list(map(flatten, decoded)))
    found = [_table("quality", QUALITY, rows), _by_depth(rows), costs, _predictions(rows), *_curves(rows)]
    return [table for table in found if len(table.headings) > 1]


def _predictions(rows: Rows) -> Table:
    """Build the table of a fleet's prediction beside what was measured; figures that none has are no columns."""
    of = [row for row in rows if row.get("prediction")]
    columns = [each for each in PREDICTED if any(each[0] in row["prediction"] for row in of)]
    cells: list[list[object]] = []
    for row in of:
        ratios = row["measured_over_predicted"]
        cells.append(
            [row["variant"], "predicted", *(_cell(row["prediction"].get(key), tell) for key, _, tell in columns)]
        )
        cells.append(["", "measured", *(_cell(row.get(key), tell) for key, _, tell in columns)])
        cells.append(["", "measured / predicted", *(_cell(ratios.get(key), "{:.2f}".format) for key, *_ in columns)])
    headings = ["what was predicted", "", *(heading for _, heading, _ in columns)] if columns else [""]
    return Table("", cells, headings, left=("",))


def _curves(rows: Rows) -> list[Table]:
    """Build the tables of simulated variants: some metrics for each value, in the first column, of a swept setting."""
    tables = []
    for key, heading, tell in CURVES:
        of = [row for row in rows if any(point.get(key) is not None for point in row.get("curve", ()))]
        if of:
            points = of[0]["curve"]
            cells = [[row["variant"], *(_cell(point.get(key), tell) for point in row["curve"])] for row in of]
            headings = [f"{heading}, {points[0]['path']}", *(str(point["value"]) for point in points)]
            tables.append(Table("", cells, headings, left=()))
    return tables


def _table(name: str, known: Sequence[tuple[str, str, Cell]], rows: Rows) -> Table:
    columns = [column for column in known if any(row.get(column[0]) is not None for row in rows)]
    cells = [[row["variant"], *(_cell(row.get(key), tell) for key, _, tell in columns)] for row in rows]
    return Table("", cells, [name, *(heading for _, heading, _ in columns)], left=("backend",))


def _cell(value: Any, format: Cell) -> str:
    return "-" if value is None else format(value)


def _by_depth(rows: Rows) -> Table:
    """Build the table of copying: the fraction of the identifiers' tokens that are most likely, and the gain in nats a
    token, by depth (0% is the beginning)."""
    depths = list(dict.fromkeys(depth for row in rows for depth in row.get("copying", {})))
    cells = [[row["variant"], *(_copied(row.get("copying", {}).get(depth)) for depth in depths)] for row in rows]
    return Table("", cells, ["copied (gain), from depth", *(f"{float(depth):.0%}" for depth in depths)], left=())


def _copied(found: Mapping[str, float] | None) -> str:
    return "-" if found is None else f"{found['copied']:.0%} ({found['gain']:+.2f})"


def to_csv(rows: Rows) -> str:
    """Return one CSV line a variant, every number as measured; nested metrics are named group.metric."""
    return Table.from_dicts([flatten(row) for row in rows]).csv()


def show(record: Record, console: Console) -> None:
    """Print the question, table, verdicts, remarks and path of a run."""
    summary = record.summary
    question = next(line for line in record.experiment_text.splitlines() if line.startswith("question:"))
    console.print(Text(question.removeprefix("question:").strip(" '\""), style="bold"), soft_wrap=True)
    for found in variant_tables(summary["rows"]):
        console.print(found)
    for verdict in summary["verdicts"]:
        console.print(Text(f"{verdict['claim']}: {verdict['outcome']}", style="bold"), soft_wrap=True)
        for name in ("says", "rule", "reason"):
            console.print(Text(f"  {name:8}{verdict[name]}"), soft_wrap=True)
        for change in verdict.get("changed", ()):  # records that are older than the field have none
            console.print(Text(f"  changed {RuleChange(**change)}"), soft_wrap=True)
    for line in remarks(summary):
        console.print(Text(line), soft_wrap=True)
    console.print(Text(f"run folder  {record.path}", style="bold"), soft_wrap=True)


def remarks(summary: Mapping[str, Any]) -> list[str]:
    lines = [f"{summary['wall_s']:.0f} s in all"]
    about, picture = summary["about"], summary.get("picture")
    if about.get("texts") == "held-out modules":
        lines.append(
            f"text: {about['known']} of {about['listed']} held-out modules are here as the model's card has them"
        )
    if picture:
        lines.append(f"picture: {picture.get('svg') or picture['problem']}")
    busy = summary["others_cpu_share"]
    if is_contended(busy):
        lines.append(f"other processes took {busy:.0%} of the processor: do not trust these times")
    return lines


def flatten(row: Mapping[str, Any], front: str = "") -> dict[str, Any]:
    """Return nested values by names joined by dots, those of a curve by its swept value."""
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
