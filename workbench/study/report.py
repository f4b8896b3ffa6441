"""A record as a person reads it in a terminal."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from workbench.study import comparison_text
from workbench.study.experiment import Experiment
from workbench.study.machine import is_busy
from workbench.study.record import Record
from workbench.trace.recorder import row_name

MOST_TEXTS = 3


def show(record: Record, console: Console, file: Path | None = None) -> None:
    """Print the report of a finished run. `file` is where its experiment was read from, if that is known."""
    experiment = Experiment.from_yaml(record.experiment_text)
    if experiment.compares:
        comparison_text.show(record, console)
        return
    for part in _parts(record, experiment, file or record.path / "experiment.yaml"):
        console.print(part, soft_wrap=isinstance(part, Text))  # a path must not be broken by lines


def _parts(record: Record, experiment: Experiment, file: Path) -> Iterator[RenderableType]:
    summary = record.summary
    yield Text(experiment.question, style="bold")
    yield from _texts(record, experiment)
    yield _timings(summary)
    for kind in ("tenant", "priority"):
        if summary.get(f"by_{kind}"):
            yield groups(kind, summary[f"by_{kind}"])
    if summary.get("speculation"):
        yield _speculation(summary["speculation"])
    yield _memory(summary["kv"], summary["tokens"])
    if "roofline" in summary:
        yield _roofline(summary)
    yield from _remarks(summary)
    yield Text(f"\nrun folder  {record.path}", style="bold")
    yield Text(_next_steps(record, experiment, file))


def _texts(record: Record, experiment: Experiment) -> Iterator[RenderableType]:
    prompts = getattr(experiment.workload, "prompts", ())
    copies = getattr(experiment.workload, "copies", 1) * experiment.sampling.samples
    rows = record.requests.to_pylist()
    for index, row in enumerate(rows[:MOST_TEXTS]):
        if row["error"]:
            yield Panel(Text(row["error"], style="red"), title=Text(f"{row_name(row)}: {row['finish_reason']}"))
        elif prompts:
            text = Text(prompts[index // copies], style="dim") + Text(row["output_text"], style="default")
            title = f"{row_name(row)}: {row['output_tokens']} tokens, {row['finish_reason']}"
            yield Panel(text, title=Text(title))
    if len(rows) > MOST_TEXTS:
        yield Text(f"and {len(rows) - MOST_TEXTS} more requests in requests.parquet", style="dim")


def _timings(summary: dict) -> Table:
    table = _table("milliseconds", "p50", "p90", "p99", "what it is")
    told = {
        "ttft_s": ("TTFT", "arrival to first token"),
        "tpot_s": ("TPOT", "time per output token after the first"),
        "itl_s": ("ITL", "between neighbouring tokens"),
        "e2el_s": ("E2EL", "arrival to last token"),
    }
    for key, (name, meaning) in told.items():
        table.add_row(name, *(_ms(summary[key][p]) for p in ("p50", "p90", "p99")), meaning)
    decode, prefill = summary["phases"]["decode"], summary["phases"]["prefill"]
    speeds = f"{_rate(summary['output_tokens_per_s'])} output tokens/s over the whole run"
    speeds += f"; {_rate(decode['tokens_per_s'])} in decode, {_rate(prefill['tokens_per_s'])} in prefill"
    table.caption = speeds
    table.caption_justify = "left"
    return table


def groups(kind: str, found: dict) -> Table:
    """What the requests of each tenant, or priority, met with."""
    table = _table(kind, "requests", "queue p50", "TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99")
    for name, figures in found.items():
        row = [_ms(figures["queue_s"]["p50"])]
        row += [_ms(figures[key][p]) for key in ("ttft_s", "tpot_s") for p in ("p50", "p99")]
        table.add_row(name or "(none)", f"{figures['requests']:,}", *row)
    return table


def _speculation(found: dict) -> Table:
    table = _table("speculation", "checks", *(f"stand {n}" for n in range(len(found["acceptance_histogram"]))))
    table.add_row("of which", f"{found['checks']:,}", *(f"{count:,}" for count in found["acceptance_histogram"]))
    shares = (f"{share:.0%}" for share in found["acceptance_by_position"])
    table.add_row("by position", "", "", *shares)
    table.caption = (
        f"draft_acceptance_rate {found['draft_acceptance_rate']:.2f} ({found['accepted_tokens']:,} of "
        f"{found['drafted_tokens']:,}), mean_acceptance_length {found['mean_acceptance_length']:.2f}; drafting took "
        f"{found['draft_share'] or 0:.0%} of the steps that check"
    )
    table.caption_justify = "left"
    return table


def _memory(kv: dict, tokens: dict) -> Table:
    table = _table("KV cache", "bytes", "formula")
    formula = kv["bytes_per_token_formula"]
    table.add_row("a token", f"{formula:,}", "2 x layers x groups x dim x bytes a value")
    pages, size = kv["pages_used_peak"], kv["page_size"]
    told = f"{pages} pages x {size} tokens x {formula:,} = {pages * size * formula:,}"
    if kv["bytes_used_peak"] != pages * size * formula:
        told = "summed over layer groups"
    table.add_row("used at most", f"{kv['bytes_used_peak']:,}", told)
    agree = "equal" if kv["bytes_allocated"] == kv["bytes_allocated_formula"] else "DIFFERENT"
    table.add_row("allocated", f"{kv['bytes_allocated']:,}", f"{kv['bytes_allocated_formula']:,} ({agree})")
    return table


def _roofline(summary: dict) -> Table:
    roof = summary["roofline"]
    table = _table("roofline", "predicted s", "measured s", "of roofline", "of read ceiling", "of GEMM ceiling")
    for name in ("prefill", "decode"):
        if name in roof:
            row = roof[name]
            shares = (row["share_of_roofline"], row["share_of_read_ceiling"], row["share_of_gemm_ceiling"])
            table.add_row(name, f"{row['predicted_s']:.4f}", f"{row['measured_s']:.4f}", *(f"{s:.0%}" for s in shares))
    table.caption = (
        f"working set {roof['working_set_bytes'] / 1e6:,.1f} MB: it is read from {roof['read_level']}, at "
        f"{roof['read_ceiling_bytes_per_s'] / 1e9:,.1f} GB/s at best; GEMM in {roof['gemm_dtype']} "
        f"{roof['gemm_ceiling_flops_per_s'] / 1e9:,.0f} GFLOP/s at best (both measured here)"
    )
    table.caption_justify = "left"
    return table


def _remarks(summary: dict) -> Iterator[RenderableType]:
    lane = summary["lane"]
    yield Text(f"\nlane {lane['name']} ({lane['reason']}); {summary['compiles']} graphs compiled")
    if cut := summary["tokens"]["cut"]:
        yield Text(f"{cut} of the oldest prompt tokens were cut (overflow: cut_oldest)", style="yellow")
    if found := summary["tokens"].get("cached"):
        pages, computed = summary["shared_pages"], summary["tokens"]["computed"]
        yield Text(f"{found:,} tokens were found in {pages:,} shared pages, {computed:,} were computed")
    if restored := summary["tokens"].get("restored"):
        yield Text(f"{restored:,} tokens came back from the host after a set-back")
    share = summary["instruments_share_of_decode"]
    if share is not None:
        yield Text(f"instruments took {share:.2%} of decode time")
    if slow := summary["compiling_steps"]:
        yield Text(f"{slow} of the measured steps compiled something; raise measure.warmup", style="yellow")
    busy = summary["others_cpu_share"]
    if is_busy(busy):
        yield Text(f"other processes took {busy:.0%} of the processor: do not trust these timings", style="yellow")
    failed = {k: v for k, v in summary["requests"]["by_finish_reason"].items() if k in ("refused", "error")}
    if failed:
        yield Text(f"not every request ran: {failed}", style="red")


def _next_steps(record: Record, experiment: Experiment, file: Path) -> str:
    """Commands that make sense after this run: its own experiment changed, where there is something to change."""
    workbench, real = _program(), experiment.executor.kind == "real"
    changes = ["lane=eager"] if real and experiment.lane != "eager" else []
    changes += ["workload.copies=8"] if getattr(experiment.workload, "copies", 8) != 8 else []
    demo = real and experiment.model.name == "demo"
    lines = [
        "try next",
        f"{workbench} reproduce {record.path}",
        f"{workbench} inspect {record.path}",
        *(f"{workbench} run {file} --set {change}" for change in changes),
        *([f'{workbench} generate "class Stack:" --temperature 0.8'] if demo else []),
        f"open {record.path / 'trace.json'} in ui.perfetto.dev",
    ]
    return "\n  ".join(lines)


def _program() -> str:
    """How this command line is called from here: by name where it is on the path, else by its place."""
    if shutil.which("workbench"):
        return "workbench"
    place = os.path.relpath(Path(sys.executable).parent / "workbench")
    return place if len(place) < 40 else "workbench"


def _table(first: str, *columns: str) -> Table:
    table = Table(first, title_justify="left", pad_edge=False)
    for column in columns:
        table.add_column(column, justify="left" if column in ("what it is", "formula") else "right")
    return table


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:,.2f}"


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"
