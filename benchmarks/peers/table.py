"""Show the record of the peer benchmark as tables and Markdown, and write it to experiments/records/."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from workbench.display import Table
from workbench.machine.processor import contention_remark
from workbench.runs.folder import write_dated_record

COLUMNS = ("peer", "tokens/s", "rounds", "of workbench", "of best peer", "load s", "peak MB", "how, or why not")


def peers_tables(record: Mapping[str, Any]) -> list[Table]:
    """Return one table for each workload and weight format."""
    return [Table(title, list(map(_cells, rows)), COLUMNS, left=COLUMNS[-1:]) for title, rows in _sections(record)]


def peers_markdown(record: Mapping[str, Any]) -> str:
    """Return the tables as Markdown, with the machine and the versions of every peer's packages."""
    settings, cpu = record["settings"], record["environment"]["cpu"]
    lines = [
        f"{record['model']['name']}, seed {record['model']['seed']}, {settings['threads']} threads, "
        f"{settings['rounds']} interleaved rounds of {settings['repetitions']}, {cpu['model']}, {record['date']}",
        "",
        f"Cores hand a cache line over in {_nanoseconds(record['runs'])}.",
        "",
        *(f"- {name}: {_versions(found)}" for name, found in record["peers"].items()),
    ]
    return "\n".join([*lines, "", *(table.markdown() for table in peers_tables(record))])


def write_record(record: Mapping[str, Any], folder: Path) -> Path:
    """Write `peers-MODEL-DATE.json` into `folder` atomically. Raises WorkbenchError where it cannot be written."""
    return write_dated_record(record, folder, f"peers-{record['model']['name'].removeprefix('shape:')}")


def _sections(record: Mapping[str, Any]) -> list[tuple[str, list[dict]]]:
    """Return (title, rows) for each workload and format with any row, timed rows first, fastest first."""
    sections: dict[tuple[str, str], list[dict]] = {}
    for row in record["rows"]:
        sections.setdefault((row["work"], row["format"]), []).append(row)
    return [
        (f"{work}, {format}", sorted(rows, key=lambda row: -row.get("tokens_per_s", 0.0)))
        for (work, format), rows in sections.items()
    ]


def _cells(row: Mapping[str, Any]) -> list[str]:
    if "tokens_per_s" not in row:
        return [row["peer"], row["status"], *[""] * 5, row["reason"]]
    how = row["how"]
    if remark := contention_remark(row["others_cpu_share"]):
        how += f" ({remark})"
    if row.get("left_out"):
        how += f" ({row['left_out']} rounds with the cores elsewhere left out)"
    low, high = row["spread"]
    return [
        row["peer"], _number(row["tokens_per_s"]), f"{_number(low)} to {_number(high)}", _ratio(row["of_workbench"]),
        _ratio(row["of_best_peer"]), f"{row['load_seconds']:.1f}", f"{row['peak_bytes'] / 1e6:,.0f}", how,
    ]  # fmt: skip


def _nanoseconds(runs: Sequence[Mapping[str, Any]]) -> str:
    found = [run["core_to_core_ns"] for run in runs if run.get("core_to_core_ns") is not None]
    return f"{min(found):.0f} to {max(found):.0f} ns" if found else "a time that was not measured"


def _number(value: float) -> str:
    return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _versions(found: Mapping[str, str | None]) -> str:
    return ", ".join(f"{name} {version}" for name, version in found.items() if version) or "not run"
