"""Metrics of requests grouped by tenant or priority, for fair-share and priority scheduling."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

GROUP_METRICS = ("queue_s", "ttft_s", "tpot_s")


def metrics_by_group(
    figures: Iterable[Mapping[str, Any]], by: str, distribution: Callable[[Iterable[float | None]], dict]
) -> dict[str, dict]:
    """Summarize queue time, TTFT and TPOT for each value of one request field.

    Args:
        figures: Metrics of requests, one mapping each.
        by: The field to group by: `tenant` or `priority`.
        distribution: Summary of a sequence of seconds (`metrics.distribution`).

    Returns:
        By group name the number of requests and a distribution for each of `GROUP_METRICS`; empty for a single group.
    """
    groups: dict[Any, list[Mapping[str, Any]]] = defaultdict(list)
    for each in figures:
        groups[each[by]].append(each)
    if len(groups) < 2:
        return {}
    return {
        str(name): {"requests": len(mine)} | {key: distribution(each[key] for each in mine) for key in GROUP_METRICS}
        for name, mine in sorted(groups.items())
    }
