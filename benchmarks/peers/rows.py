"""Summarize the peer benchmark as rows: medians, spread, and ratios among peers with the same workload and weight
format."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.peers.catalog import WORKBENCH
from benchmarks.peers.placement import largest_placement

PeerRow = dict[str, Any]


def summarize_runs(lines: Sequence[PeerRow], runs: Sequence[dict]) -> list[PeerRow]:
    """Add to each entry in `lines` (peer, format, work, status, reason) the figures of its measurements in `runs`, if
    it was timed.

    Only runs of one core placement are compared (see placement.py): `left_out` counts the runs of other placements,
    `core_to_core_ns` is the placement's latency. `tokens_per_s` is the median over all repetitions of all rounds,
    `rounds` the median of each round, `spread` their minimum and maximum. `of_workbench` is the ratio of medians to the
    first workbench row, `of_best_peer` to the fastest other row, of the same workload and format."""
    together: dict[tuple[str, str], list[dict]] = {}
    for run in runs:
        together.setdefault(_key(run)[1:], []).append(run)
    compared = {key: largest_placement(each) for key, each in together.items()}
    rows = []
    for line in lines:
        own = [run for run in runs if _key(run) == _key(line)]
        kept = [run for run in compared.get(_key(line)[1:], ()) if _key(run) == _key(line)]
        broken = next((run for run in own if run["status"] != "ok"), None)
        if broken:
            line = {**line, "status": broken["status"], "reason": broken.get("reason", "")}
        elif own and not kept:
            line = {**line, "status": "elsewhere", "reason": "in all its rounds the cores sat elsewhere"}
        rows.append(_measured(line, kept, len(own) - len(kept)))
    return [{**row, **_ratios(row, [each for each in rows if _key(each)[1:] == _key(row)[1:]])} for row in rows]


def is_workbench(name: str) -> bool:
    return name.split()[0] == WORKBENCH


def _key(row: PeerRow) -> tuple[str, str, str]:
    return row["peer"], row["format"], row["work"]


def _measured(line: PeerRow, runs: Sequence[dict], left_out: int) -> PeerRow:
    broken = next((run for run in runs if run["status"] != "ok"), None)
    if line["status"] != "ok" or broken or not runs:
        outcome = broken or line
        return {**line, "status": outcome["status"], "reason": outcome.get("reason", "")}
    rates = [[each["tokens"] / each["seconds"] for each in run["measured"]] for run in runs]
    medians = [statistics.median(each) for each in rates]
    places = [run["core_to_core_ns"] for run in runs if run.get("core_to_core_ns") is not None]
    shares = [run["others_cpu_share"] for run in runs if run["others_cpu_share"] is not None]
    return {
        **line,
        "tokens_per_s": statistics.median([rate for each in rates for rate in each]),
        "rounds": medians,
        "spread": [min(medians), max(medians)],
        "load_seconds": statistics.median(run["load_seconds"] for run in runs),
        "peak_bytes": max(run["peak_bytes"] for run in runs),
        "others_cpu_share": max(shares) if shares else None,
        "core_to_core_ns": statistics.median(places) if places else None,
        "left_out": left_out,
        "how": "; then ".join(dict.fromkeys(", ".join(filter(None, (run["weights"], run["how"]))) for run in runs)),
    }


def _ratios(row: PeerRow, beside: Sequence[PeerRow]) -> PeerRow:
    if "tokens_per_s" not in row:
        return {}
    ours = [each["tokens_per_s"] for each in beside if "tokens_per_s" in each and is_workbench(each["peer"])]
    peers = [each["tokens_per_s"] for each in beside if "tokens_per_s" in each and not is_workbench(each["peer"])]
    return {
        "of_workbench": row["tokens_per_s"] / ours[0] if ours else None,
        "of_best_peer": row["tokens_per_s"] / max(peers) if peers else None,
    }
