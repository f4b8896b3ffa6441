"""Show the record of a model benchmark as a terminal table, Markdown or CSV."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from workbench.display import Table
from workbench.machine.processor import contention_remark
from workbench.units import format_bytes, format_percent, format_quantity, format_seconds

COLUMNS = ("work", "batch", "depth", "tokens/s", "spread", "step", "of read", "of GEMM", "not kernels")
KERNEL_TIME_REMARK = (
    "if a backend does not report its kernels' time, `not kernels` is at least the part outside the forward pass (>)"
)


def show(record: Mapping[str, Any], console: Console) -> None:
    console.print(Text(heading(record), style="bold"), soft_wrap=True)
    console.print(bench_table(record).rich(no_wrap=True))
    for line in remarks(record):
        console.print(Text(line), soft_wrap=True)


def bench_table(record: Mapping[str, Any]) -> Table:
    return Table("", list(map(_cells, record["rows"])), COLUMNS, left=())


def to_markdown(record: Mapping[str, Any]) -> str:
    lines = (f"- {line}\n" for line in remarks(record))
    return f"{heading(record)}\n\n{bench_table(record).markdown()}\n{''.join(lines)}"


def to_csv(record: Mapping[str, Any]) -> str:
    """Return the rows as CSV, with unrounded numbers."""
    return Table.from_dicts(list(map(_flat, record["rows"]))).csv()


def heading(record: Mapping[str, Any]) -> str:
    settings = record["settings"]
    activations = settings.get("activations", "float")
    weights = settings.get("weights", "dense") + ("" if activations == "float" else f", activations {activations}")
    return (
        f"{record['model']['name']}, weights {weights}, backend {settings['backend_used']}, "
        f"{settings['threads']} threads, median of {settings['repetitions']} repetitions, "
        f"{record['environment']['cpu']['model']}, {record['date']}"
    )


def remarks(record: Mapping[str, Any]) -> list[str]:
    """Return one line for each remark on rows, memory, cold start, ceilings and machine load."""
    rows = [row for row in record["rows"] if row["reason"]]
    lines = [f"{row['work']}, batch {row['batch']}, depth {row['depth']:,}: {row['reason']}" for row in rows]
    lines += [_memory(memory) for memory in record["memory"]]
    for name, seconds in (record["cold_start"] or {}).items():
        lines.append(
            f"{name} start: " + ", ".join(f"{what} {format_seconds(value)}" for what, value in seconds.items())
        )
    if rows := [row for row in record["rows"] if row["status"] == "ok"]:
        read, gemm = rows[0]["read_ceiling_bytes_per_s"], rows[0]["gemm_ceiling_flops_per_s"]
        rates = f"read {format_bytes(read)}/s, GEMM in {rows[0]['gemm_dtype']} {format_quantity(gemm, 'FLOP/s')}"
        lines.append(f"ceilings: {rates}")
        if any(row["outside_kernels_share"] is None for row in rows):
            lines.append(KERNEL_TIME_REMARK)
    return [*lines, *filter(None, [contention_remark(record["others_cpu_share"])])]


def _memory(memory: Mapping[str, Any]) -> str:
    names = ("weights", "cache", "activations")
    parts = " + ".join(f"{name} {format_bytes(memory[f'{name}_bytes'])}" for name in names)
    line = f"memory in decode, batch {memory['batch']}: {parts} = {format_bytes(memory['formula_bytes'])} by formula"
    if memory["measured_bytes"] is not None:
        ratio = memory["measured_bytes"] / memory["formula_bytes"]
        line += f"; the process grew by {format_bytes(memory['measured_bytes'])} ({ratio:.2f} x)"
    if memory["process_peak_bytes"] is not None:
        line += f", its peak was {format_bytes(memory['process_peak_bytes'])}"
    return line


def _cells(row: Mapping[str, Any]) -> list[str]:
    name = [row["work"], str(row["batch"]), f"{row['depth']:,}"]
    if row["status"] != "ok":
        return [*name, row["status"], *[""] * 5]
    low, high = row["spread"]
    return [
        *name,
        _number(row["tokens_per_s"]),
        f"{_number(low)} to {_number(high)}",
        format_seconds(row["step_seconds"]["p50"]),
        format_percent(row["share_of_read_ceiling"]),
        format_percent(row["share_of_gemm_ceiling"]),
        _outside(row),
    ]


def _outside(row: Mapping[str, Any]) -> str:
    """Format the fraction of a step's time outside kernels, or its lower bound."""
    share = row["outside_kernels_share"]
    return f"> {format_percent(row['outside_forward_share'])}" if share is None else format_percent(share)


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, Mapping):
            flat |= {f"{name}_{inner}": each for inner, each in value.items()}
        elif isinstance(value, list):
            flat |= {f"{name}_min": value[0], f"{name}_max": value[-1]}
        else:
            flat[name] = value
    return flat


def _number(value: float) -> str:
    return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"
