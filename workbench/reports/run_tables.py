"""Make the tables and remarks of a run's summary."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from workbench.display import Table
from workbench.machine.processor import contention_remark
from workbench.units import format_bytes, format_number, format_percent, format_quantity, format_seconds

LATENCIES = {
    "ttft_s": ("TTFT", "arrival to first token"),
    "tpot_s": ("TPOT", "time per output token after the first"),
    "itl_s": ("ITL", "between neighbouring tokens"),
    "e2el_s": ("E2EL", "arrival to last token"),
}
Summary = Mapping[str, Any]


@dataclass(frozen=True)
class Remark:
    """One line of text about a run. `is_warning` marks unreliable numbers or a failure."""

    text: str
    is_warning: bool = False


def run_tables(summary: Summary) -> Iterator[Table]:
    """Yield each table for which the run's summary has data."""
    yield latency_table(summary)
    for kind in ("tenant", "priority"):
        if summary.get(f"by_{kind}"):
            yield group_table(kind, summary[f"by_{kind}"])
    if summary.get("speculation"):
        yield speculation_table(summary["speculation"])
    yield memory_table(summary["kv"])
    if "roofline" in summary:
        yield roofline_table(summary)


def latency_table(summary: Summary) -> Table:
    rows = [
        (name, *(format_seconds(summary[key][p]) for p in ("p50", "p90", "p99")), meaning)
        for key, (name, meaning) in LATENCIES.items()
    ]
    decode, prefill = summary["phases"]["decode"], summary["phases"]["prefill"]
    speeds = f"{format_number(summary['output_tokens_per_s'])} output tokens/s over the whole run; "
    speeds += f"{format_number(decode['tokens_per_s'])} in decode, {format_number(prefill['tokens_per_s'])} in prefill"
    return Table("", rows, ("latency", "p50", "p90", "p99", "what it is"), speeds, left=("what it is",))


def group_table(kind: str, metrics: Mapping[str, Any]) -> Table:
    """Return the table of latencies by tenant or by priority."""
    rows = []
    for name, figures in metrics.items():
        times = [("queue_s", "p50"), *((key, p) for key in ("ttft_s", "tpot_s") for p in ("p50", "p99"))]
        cells = (format_seconds(figures[key][p]) for key, p in times)
        rows.append((name or "(none)", f"{figures['requests']:,}", *cells))
    headings = (kind, "requests", "queue p50", "TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99")
    return Table("", rows, headings, left=())


def speculation_table(metrics: Mapping[str, Any]) -> Table:
    counts = metrics["acceptance_histogram"]
    shares = map(format_percent, metrics["acceptance_by_position"])
    caption = (
        f"draft_acceptance_rate {metrics['draft_acceptance_rate']:.2f} ({metrics['accepted_tokens']:,} of "
        f"{metrics['drafted_tokens']:,}), mean_acceptance_length {metrics['mean_acceptance_length']:.2f}; "
        f"drafting took {format_percent(metrics['draft_share'])} of the time of verification steps"
    )
    headings = ("speculation", "verifications", *(f"accepted {n}" for n in range(len(counts))))
    verifications = ("of which", f"{metrics['verifications']:,}", *(f"{count:,}" for count in counts))
    return Table("", (verifications, ("by position", "", "", *shares)), headings, caption, left=())


def memory_table(kv: Mapping[str, Any]) -> Table:
    formula = kv["bytes_per_token_formula"]
    pages, size = kv["pages_used_peak"], kv["page_size"]
    used = f"{pages} pages x {size} tokens x {formula:,} = {pages * size * formula:,}"
    if kv["bytes_used_peak"] != pages * size * formula:
        used = "sum over the layer groups"
    agree = "equal" if kv["bytes_allocated"] == kv["bytes_allocated_formula"] else "DIFFERENT"
    rows = (
        ("a token", f"{formula:,}", "2 x layers x kv_heads x head_dim x bytes a value"),
        ("used at most", f"{kv['bytes_used_peak']:,}", used),
        ("allocated", f"{kv['bytes_allocated']:,}", f"{kv['bytes_allocated_formula']:,} ({agree})"),
    )
    return Table("", rows, ("KV cache", "bytes", "formula"), left=("formula",))


def roofline_table(summary: Summary) -> Table:
    roof, rows = summary["roofline"], []
    for name in ("prefill", "decode"):
        if name in roof:
            row = roof[name]
            shares = (row["share_of_roofline"], row["share_of_read_ceiling"], row["share_of_gemm_ceiling"])
            times = (format_seconds(row["predicted_s"]), format_seconds(row["measured_s"]))
            rows.append((name, *times, *map(format_percent, shares)))
    caption = (
        f"working set {format_bytes(roof['working_set_bytes'])}: it is read from {roof['read_level']} at up to "
        f"{format_bytes(roof['read_ceiling_bytes_per_s'])}/s; GEMM in {roof['gemm_dtype']} reaches up to "
        f"{format_quantity(roof['gemm_ceiling_flops_per_s'], 'FLOP/s')} (both measured on this machine)"
    )
    headings = ("roofline", "predicted", "measured", "of roofline", "of read ceiling", "of GEMM ceiling")
    return Table("", rows, headings, caption, left=())


def run_remarks(summary: Summary) -> Iterator[Remark]:
    backend = summary["backend"]
    yield Remark(f"backend {backend['name']} ({backend['reason']}); {summary['compiles']} graphs compiled")
    if ranks := summary.get("ranks"):
        yield Remark(f"{ranks['tensor']} ranks ({ranks['transport']}); bytes of weights and cache are of one rank")
    if cut := summary["tokens"]["cut"]:
        yield Remark(f"{cut} of the oldest prompt tokens were cut (overflow: cut_oldest)", True)
    if found := summary["tokens"].get("cached"):
        pages, computed = summary["shared_pages"], summary["tokens"]["computed"]
        yield Remark(f"{found:,} tokens were found in {pages:,} shared pages, {computed:,} were computed")
    if restored := summary["tokens"].get("restored"):
        yield Remark(f"{restored:,} tokens were swapped in from the CPU after a preemption")
    yield from (Remark(f"error: {fault}", True) for fault in summary.get("roofline", {}).get("faults", ()))
    share = summary["telemetry_share_of_decode"]
    if share is not None:
        yield Remark(f"telemetry took {format_percent(share)} of decode time")
    if slow := summary["compiling_steps"]:
        yield Remark(f"{slow} of the measured steps compiled something; raise measure.warmup", True)
    if remark := contention_remark(summary["others_cpu_share"]):
        yield Remark(remark, True)
    if replayed := summary.get("replayed_steps"):
        yield Remark(f"a replay: {replayed:,} steps were formed as recorded, not by the arrival of requests")
    failed = {k: v for k, v in summary["requests"]["by_finish_reason"].items() if k in ("refused", "error")}
    if failed:
        yield Remark(f"not every request ran: {failed}", True)
