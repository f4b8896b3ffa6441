"""Combine techniques of three kinds, and find the points of the Pareto front that no single technique reaches.

`KINDS` are the techniques, a few settings of each; exchange them here and run

    python -m experiments.zoo_pareto

which writes the variants of `zoo_pareto.yaml` anew. Combinations in `REFUSED` are those that the engine cannot carry
out, each with the reason; they are left out. The front is that of bytes a token and KL divergence: a variant is on it
if no other has both at most as large, and one of them smaller.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from workbench.experiment.verdict import VariantRows
from workbench.runs.metrics import pareto_frontier

FILE = Path(__file__).with_suffix(".yaml")
PLAIN = "as trained"
ZOO = "experiments/zoo"
KINDS: dict[str, dict[str, dict[str, Any]]] = {
    "attention": {
        "window 256": {"attention.sliding_window": 256, "attention.num_sink_tokens": 4},
        "half windows": {
            "attention.sliding_window": 128, "attention.num_sink_tokens": 4, "attention.pattern": ["window", "full"]
        },
        "last two share": {"attention.layers": {5: {"kv_shared_with": 4}}},
    },
    "format": {
        "NF4": {"cache.codec": {"path": f"{ZOO}/normal_float.py:NormalFloat", "arguments": {"block": 32}}},
        "INT4": {"cache.codec": {"path": f"{ZOO}/int4_by_token.py:Int4"}},
    },
    "eviction": {
        "H2O 384": {"cache.evict": {"kind": "heavy_hitters", "budget": 384}},
        "H2O 192": {"cache.evict": {"kind": "heavy_hitters", "budget": 192}},
    },
}  # fmt: skip
REFUSED: dict[tuple[str, str], str] = {  # a technique, and one that it cannot be combined with: why
    ("window 256", "H2O 384"): "a window bounds a layer's cache already, and after eviction slots are not positions",
    ("window 256", "H2O 192"): "the same",
    ("half windows", "H2O 384"): "the same for the layers that have one: a budget is of all layers",
    ("half windows", "H2O 192"): "the same",
}
MIN_KL = 1e-6  # nats; below it two variants are equally near


def combinations(kinds: Mapping[str, Mapping[str, Any]] = KINDS) -> dict[str, tuple[str, ...]]:
    """Return all combinations with at most one technique of each kind, by the variant's name."""
    found = {}
    for parts in itertools.product(*((None, *names) for names in kinds.values())):
        chosen = tuple(part for part in parts if part is not None)
        found[" + ".join(chosen) or PLAIN] = chosen
    return found


def is_refused(parts: Iterable[str]) -> bool:
    return any(pair in REFUSED for pair in itertools.permutations(parts, 2))


def variants() -> dict[str, dict[str, Any]]:
    """Return the changed settings of each combination that the engine can run, by the variant's name."""
    changes = {name: change for names in KINDS.values() for name, change in names.items()}
    return {
        name: {path: value for part in parts for path, value in changes[part].items()}
        for name, parts in combinations().items()
        if not is_refused(parts)
    }


def front(rows: VariantRows) -> dict[str, float | str]:
    """Return the points on the front of bytes a token and KL divergence: combinations of three kinds and of two, all of
    them, and the names of combinations and of single techniques."""
    parts = combinations()
    found = [row for row in rows if row["variant"] in parts]
    points = [(float(row["bytes_per_token"]), max(MIN_KL, float(row["kl_mean"]))) for row in found]
    names = [found[index]["variant"] for index in pareto_frontier(points)]
    sizes = [len(parts[name]) for name in names]
    return {
        "of_three_kinds": sum(size == len(KINDS) for size in sizes),
        "of_two_kinds": sum(1 < size < len(KINDS) for size in sizes),
        "points": len(names),
        "combinations": ", ".join(name for name in names if len(parts[name]) > 1),
        "single techniques": ", ".join(name for name in names if len(parts[name]) <= 1),
    }


def written(text: str) -> str:
    """Return the experiment's YAML text with its variants replaced by the present ones; everything else stays."""
    lines = [f"  {name}: {_flow(change)}" for name, change in variants().items()]
    head, _, rest = text.partition("variants:\n")
    tail = rest[rest.index("workload:") :]
    return f"{head}variants:\n" + "\n".join(lines) + "\n" + tail


def _flow(change: Mapping[str, Any]) -> str:
    return yaml.safe_dump(dict(change), default_flow_style=True, sort_keys=False, width=10_000).strip()


if __name__ == "__main__":
    FILE.write_text(written(FILE.read_text()))
