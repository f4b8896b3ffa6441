"""Make the site's tables of machines and measured figures, from the newest records of each kind in
`experiments/records/`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from workbench.display import Table

NAME = re.compile(r"(?P<kind>[\w.-]+?)-(?P<date>\d{8})-\d{6}(?:-\w+)?")
LEVELS = {"amx_tile": "AMX", "avx512f": "AVX-512", "avx2": "AVX2"}  # the first that a processor has names it


def newest(folder: Path) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return the newest record of each kind, by kind: (file name without suffix, record)."""
    found: dict[str, tuple[str, dict[str, Any]]] = {}
    dates: dict[str, str] = {}
    for path in sorted(folder.glob("*.json")):
        match = NAME.fullmatch(path.stem)
        if match and path.stem >= dates.get(match["kind"], ""):
            record = json.loads(path.read_text(encoding="utf-8"))
            dates[match["kind"]], found[match["kind"]] = path.stem, (path.stem, record)
    return found


def machine(record: dict[str, Any]) -> str:
    """Return a description of a record's machine: processor, instruction set and cores, and its accelerator if it has
    one."""
    where = record.get("environment") or {}
    cpu = where.get("cpu") or {}
    level = next((name for flag, name in LEVELS.items() if flag in cpu.get("flags", ())), "")
    words = [cpu.get("model", "not recorded"), level, f"{cpu['usable_cores']} cores" if "usable_cores" in cpu else ""]
    cards = [str(each.get("name", each) if isinstance(each, dict) else each) for each in where.get("gpu") or ()]
    return ", ".join(filter(None, [*words, *cards]))


def question(record: dict[str, Any]) -> str:
    """Return the question that a record answers, or "" if it states none."""
    experiment = record.get("experiment")
    if isinstance(experiment, dict):
        return str(experiment.get("question", ""))
    if isinstance(experiment, str) and (match := re.search(r"^question: *(.*(?:\n  .*)*)", experiment, re.M)):
        return " ".join(match[1].split()).strip("'\"")
    return str(record.get("question", ""))


def answers(record: dict[str, Any]) -> Iterable[tuple[str, str, str]]:
    """Yield (claim, outcome, reason) for each verdict in a record."""
    summary = record.get("summary")
    for verdict in summary.get("verdicts") or () if isinstance(summary, dict) else ():
        yield verdict["says"], verdict["outcome"].replace("-", " "), verdict.get("reason", "")


def _tokens(value: Any) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def headline(kind: str, record: dict[str, Any]) -> str:
    """Return the main figures of a record without verdicts, in one line; "" for other kinds of records."""
    if kind == "first_light":
        summary = record["summary"]
        return (
            f"TTFT {1e3 * summary['ttft_s']['p50']:.2f} ms, TPOT {1e3 * summary['tpot_s']['p50']:.2f} ms, "
            f"{_tokens(summary['decode_tokens_per_s'])} tokens/s in decode"
        )
    if kind.startswith("bench-"):
        done = [row for row in record["rows"] if row.get("status") == "ok"]
        return "; ".join(f"{row['work']}: {_tokens(row['tokens_per_s'])} tokens/s" for row in done[:4])
    if kind == "serving_peers":
        best = "; ".join(f"{name} {value:.3g}" for name, value in record["best"].items())
        return f"requests a second within the SLO, at most: {best}"
    if kind == "serving_bars":
        return f"through HTTP {record['throughput_ratio']:.1%} of the throughput in process"
    if kind == "kernels":
        shares = [row["share_of_ceiling"] for row in record["rows"] if row.get("share_of_ceiling")]
        return f"{len(shares)} timings, {min(shares):.0%} to {max(shares):.0%} of this machine's ceilings"
    if kind == "tensor_parallel":
        one, two = (record["measured"][f"mlir, {name}"]["ms of a step"] for name in ("one process", "shared memory"))
        return f"a step of the demo model, mlir: {one:.2f} ms in one process, {two:.2f} ms in two ranks"
    if kind == "loading":
        row = record["rows"][0]
        share = row["peak_bytes"] / row["weight_bytes"]
        return f"{row['case']}: {row['seconds']:.2f} s, {share:.1%} of the weights' bytes at peak"
    if kind == "together":
        return str(record["verdict"])
    return ""


def machines_table(root: Path) -> str:
    """Return a table of the machines of the newest records, with the kinds of records made on each."""
    by_machine: dict[str, list[str]] = {}
    for kind, (_, record) in newest(root / "experiments" / "records").items():
        if record.get("environment"):
            by_machine.setdefault(machine(record), []).append(kind)
    rows = [(name, len(kinds), ", ".join(kinds)) for name, kinds in sorted(by_machine.items())]
    return Table("", rows, ("machine", "newest records", "of")).markdown()


def figures_table(root: Path) -> str:
    """Return a table of the main figures of records without verdicts, with the machine of each."""
    rows = []
    for kind, (name, record) in newest(root / "experiments" / "records").items():
        if words := headline(kind, record):
            rows.append((kind.split("-")[0].replace("_", " "), words, machine(record), f"`{name}`"))
    return Table("", rows, ("kind", "measured", "machine", "record")).markdown()


def peers_tables(root: Path) -> str:
    """Return tables of the tokens per second of every tool. Each combination of work, format and machine takes the
    newest record that covers about as many tools as earlier ones."""
    found: dict[tuple[str, ...], dict[str, float]] = {}  # by model, work, format, machine
    source: dict[tuple[str, ...], str] = {}
    for path in sorted((root / "experiments" / "records").glob("peers-*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        model = record["model"]["name"].removeprefix("shape:")
        fresh: dict[tuple[str, ...], dict[str, float]] = {}
        for row in record["rows"]:
            if row.get("tokens_per_s"):
                fresh.setdefault((model, row["work"], row["format"], machine(record)), {})[row["peer"]] = row[
                    "tokens_per_s"
                ]
        for key, values in fresh.items():
            if len(values) > max(1, len(found.get(key, ())) - 1):
                found[key], source[key] = values, path.stem
    peers = sorted({peer for values in found.values() for peer in values}, key=lambda peer: (peer != "workbench", peer))
    text = []
    for where in sorted({key[-1] for key in found}):
        mine = {key: values for key, values in sorted(found.items()) if key[-1] == where}
        here = [peer for peer in peers if any(peer in values for values in mine.values())]
        rows = [
            (*key[:-1], *(_tokens(values[peer]) if peer in values else "" for peer in here), f"`{source[key]}`")
            for key, values in mine.items()
        ]
        text.append(f"**{where}**\n\n" + Table("", rows, ("model", "work", "format", *here, "record")).markdown())
    return "\n".join(text)


def verdicts_table(root: Path) -> str:
    """Return a table of every claim that a newest record judged, with its outcome and machine."""
    rows = []
    for _, (name, record) in sorted(newest(root / "experiments" / "records").items()):
        rows += [(says, outcome, machine(record), f"`{name}`") for says, outcome, _ in answers(record)]
    return Table("", rows, ("claim", "outcome", "machine", "record")).markdown()
