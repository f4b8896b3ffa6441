"""Requests apart by whose they are, or by how urgent: what fair share and priorities are for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

FIGURES = ("queue_s", "ttft_s", "tpot_s")


def apart(
    figures: Iterable[Mapping[str, Any]], by: str, distribution: Callable[[Iterable[float | None]], dict]
) -> dict[str, dict]:
    """`distribution` of what the requests of each tenant, or priority, met with; empty where all have the same."""
    groups: dict[Any, list[Mapping[str, Any]]] = defaultdict(list)
    for each in figures:
        groups[each[by]].append(each)
    if len(groups) < 2:
        return {}
    return {
        str(name): {"requests": len(mine)} | {key: distribution(each[key] for each in mine) for key in FIGURES}
        for name, mine in sorted(groups.items())
    }
