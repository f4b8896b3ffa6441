"""Print terminal tables of operators, checks and timings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from workbench.display import Table
from workbench.machine.processor import contention_remark
from workbench.units import format_bytes, format_percent, format_quantity, format_seconds

CHECK_STATUSES = ("ok", "gap", "failed")
WORDS = ("backend", "case", "ran", "data in")  # columns that hold no numbers


def show_list(operators: Sequence[Mapping[str, Any]], console: Console) -> None:
    for entry in operators:
        console.print(
            Text(entry["operator"], style="bold") + Text(f"  {', '.join(entry['backends'])}", style="default")
        )
        for line in (entry["formula"], entry["source"]):
            console.print(Text(f"  {line}"), soft_wrap=True)
        console.print(Text(f"  {entry['place']}, {entry['cases']} cases, {entry['timed']} of them timed", style="dim"))
        for gap in entry["gaps"]:
            console.print(Text(f"  gap on {gap['backend']}, {gap['cases']} cases: {gap['reason']}"), soft_wrap=True)


def show_check(rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Print counts by operator, backend and level, then every gap with its reason, then every failure."""
    counts = Counter((row["operator"], row["backend"], row["level"], row["status"]) for row in rows)
    forms = {(row["operator"], row["backend"], row["level"]): row["execution"] for row in rows}
    cells = []
    order = list(dict.fromkeys(operator for operator, _, _ in forms))
    for (operator, backend, level), form in sorted(forms.items(), key=lambda item: order.index(item[0][0])):
        numbers = [counts[operator, backend, level, status] for status in CHECK_STATUSES]
        row = (operator, backend, level, *(str(number or "") for number in numbers), form)
        cells.append([Text(cell, style="red" if numbers[-1] else "") for cell in row])
    headings = ("operator", "backend", "level", *CHECK_STATUSES, "ran")
    console.print(Table("", cells, headings, left=WORDS).rich(no_wrap=True))
    gaps = Counter((row["operator"], row["backend"], row["reason"]) for row in rows if row["status"] == "gap")
    for (operator, backend, reason), count in gaps.items():
        console.print(Text(f"gap  {operator} on {backend}, {count} cases: {reason}", style="dim"), soft_wrap=True)
    failures: dict[tuple[str, ...], list[str]] = {}
    for row in rows:
        if row["status"] == "failed":
            failures.setdefault((row["operator"], row["backend"], row["level"], row["reason"]), []).append(row["case"])
    for (operator, backend, level, reason), cases in failures.items():
        line = f"failed  {operator} on {backend}{level and f' at {level}'}, {'; '.join(cases)}: {reason}"
        console.print(Text(line, style="red"), soft_wrap=True)
    total = Counter(row["status"] for row in rows)
    console.print(", ".join(f"{total[status]} {status}" for status in CHECK_STATUSES))


def show_bench(record: Mapping[str, Any], console: Console) -> None:
    cells, before = [], None
    for row in record["rows"]:
        heading = f"{row['operator']} {row['case']}"
        cells.append((heading if heading != before else "", row["backend"], *_cells(row)))
        before = heading
    note = f"{record['threads']} threads, {record['environment']['cpu']['model']}, {record['date']}"
    if remark := contention_remark(record["others_cpu_share"]):
        note += f"; {remark}"
    headings = ("case", "backend", "time", "p10 to p90", "memory", "arithmetic", "of ceiling", "x eager", "data in")
    console.print(Table("", cells, headings, left=WORDS).rich(no_wrap=True))
    console.print(Text(note, style="dim"), soft_wrap=True)
    reasons = Counter(
        (row["operator"], row["backend"], row["reason"]) for row in record["rows"] if row["status"] != "ok"
    )
    for (operator, backend, reason), count in reasons.items():
        line = f"not timed  {operator} on {backend}, {count} cases: {reason}"
        console.print(Text(line, style="dim"), soft_wrap=True)


def show_ahead(rows: Sequence[Mapping[str, Any]], target: str, console: Console) -> None:
    """Print a table with one line per case and its status at each compiled level, then the reason of each missing or
    failed one."""
    levels = list(dict.fromkeys(row["level"] for row in rows))
    cases: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        cases.setdefault((row["operator"], row["case"]), {})[row["level"]] = row["status"]
    rows_shown = [(*case, *(status.get(level, "") for level in levels)) for case, status in cases.items()]
    headings = ("operator", "case", *(f"text of {level}" for level in levels))
    console.print(Table("", rows_shown, headings, left=WORDS).rich(no_wrap=True))
    reasons = Counter((row["status"], row["operator"], row["level"], row["reason"]) for row in rows if row["reason"])
    for (status, operator, level, reason), count in reasons.items():
        line = f"{status}  {operator}, text of {level}, {count} {'case' if count == 1 else 'cases'}: {reason}"
        console.print(Text(line, style="red" if status == "failed" else "dim"), soft_wrap=True)
    total = Counter(row["status"] for row in rows)
    console.print(f"for {target}: {', '.join(f'{count} {status}' for status, count in total.items())}")


def show_stages(overview: Mapping[str, Any], console: Console) -> None:
    console.print(Text(f"{overview['operator']} {overview['case']} on {overview['backend']}", style="bold"))
    console.print(Text(f"artifact {overview['artifact']} ({overview['note']})"), soft_wrap=True)
    sizes = [(stage["stage"], f"{stage['lines']:,}", f"{stage['characters']:,}") for stage in overview["stages"]]
    console.print(Table("", sizes, ("stage", "lines", "characters"), left=()).rich(no_wrap=True))
    if "predicted" not in overview:
        return
    predicted, generated, measured = overview["predicted"], overview["generated"], overview["measured"]
    console.print(f"at the least  {predicted['bytes']:,} bytes, {predicted['flops']:,} FLOPs")
    if generated:
        console.print(f"generated     {generated['bytes']:,} bytes read and written, by the compiler's own account")
    if measured:
        rates = f"{format_bytes(measured['bytes_per_s'])}/s, {format_quantity(measured['flops_per_s'], 'FLOP/s')}"
        console.print(f"measured      {format_seconds(measured['seconds'])}, {rates}, data in {measured['data']}")
    else:
        console.print(Text(f"not measured  {overview['not_measured']}"))


def _cells(row: Mapping[str, Any]) -> list[str]:
    if row["status"] != "ok":
        return ["not timed", *[""] * 6]
    spread = f"{format_seconds(row['p10_seconds'])} to {format_seconds(row['p90_seconds'])}"
    share, speedup = row.get("share_of_ceiling"), row.get("speedup_over_eager")
    return [
        format_seconds(row["seconds"]),
        spread,
        f"{format_bytes(row['bytes_per_s'])}/s",
        format_quantity(row["flops_per_s"], "FLOP/s"),
        "" if share is None else f"{format_percent(share)} {row['bound']}",
        "" if speedup is None else f"{speedup:.2f}",
        row["data"],
    ]
