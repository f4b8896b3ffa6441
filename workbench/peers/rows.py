"""From single runs to rows: medians, spread, and ratios inside one work and format."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from workbench.peers.catalog import WORKBENCH

Row = dict[str, Any]


def rows_of(lines: Sequence[Row], runs: Sequence[dict]) -> list[Row]:
    """Each line (peer, format, work, status, reason) with what its runs measured, where it was timed.

    `tokens_per_s` is the median over all repetitions of all rounds, `rounds` each round's median and `spread` the
    least and most of those. `of_workbench` and `of_best_peer` are ratios of medians to the first workbench
    row, and to the fastest row that is no workbench row, of the same work and format.
    """
    rows = [_measured(line, [run for run in runs if _key(run) == _key(line)]) for line in lines]
    return [{**row, **_ratios(row, [each for each in rows if _key(each)[1:] == _key(row)[1:]])} for row in rows]


def is_workbench(name: str) -> bool:
    return name.split()[0] == WORKBENCH


def _key(row: Row) -> tuple[str, str, str]:
    return row["peer"], row["format"], row["work"]


def _measured(line: Row, runs: Sequence[dict]) -> Row:
    broken = next((run for run in runs if run["status"] != "ok"), None)
    if line["status"] != "ok" or broken or not runs:
        told = broken or line
        return {**line, "status": told["status"], "reason": told.get("reason", "")}
    rates = [[each["tokens"] / each["seconds"] for each in run["measured"]] for run in runs]
    medians = [statistics.median(each) for each in rates]
    shares = [run["others_cpu_share"] for run in runs if run["others_cpu_share"] is not None]
    return {
        **line,
        "tokens_per_s": statistics.median([rate for each in rates for rate in each]),
        "rounds": medians,
        "spread": [min(medians), max(medians)],
        "load_seconds": statistics.median(run["load_seconds"] for run in runs),
        "peak_bytes": max(run["peak_bytes"] for run in runs),
        "others_cpu_share": max(shares) if shares else None,
        "how": "; then ".join(dict.fromkeys(", ".join(filter(None, (run["weights"], run["how"]))) for run in runs)),
    }


def _ratios(row: Row, beside: Sequence[Row]) -> Row:
    if "tokens_per_s" not in row:
        return {}
    ours = [each["tokens_per_s"] for each in beside if "tokens_per_s" in each and is_workbench(each["peer"])]
    peers = [each["tokens_per_s"] for each in beside if "tokens_per_s" in each and not is_workbench(each["peer"])]
    return {
        "of_workbench": row["tokens_per_s"] / ours[0] if ours else None,
        "of_best_peer": row["tokens_per_s"] / max(peers) if peers else None,
    }
