"""Every entry keeps the laws of its kit, as it is and at the ends of its parts' ranges. Attention and formats have
settings of their own for it: `test_attention.py`, `test_formats.py`."""

from __future__ import annotations

from typing import Any

import pytest

from tests.thorough import tries
from tests.zoo.loaded import part_of
from workbench.claims.laws import check_technique
from workbench.claims.technique import load_zoo
from workbench.testing import check_policy, check_sampler

EXAMPLES = {"sampling": None, "schedule": 15, "eviction": 1, "draft": tries(2)}
ENTRIES = {name: entry for name, entry in load_zoo().items() if entry.settings.kind in EXAMPLES}
OTHER_ENDS: list[tuple[str, dict[str, Any]]] = [
    ("dry", {"multiplier": 0.0}), ("dry", {"multiplier": 50.0, "base": 4.0, "allowed": 1, "breakers": "3, 5"}),
    ("xtc", {"threshold": 0.001, "probability": 1.0}), ("xtc", {"threshold": 0.9, "probability": 0.0}),
    ("top_n_sigma", {"n": 0.001}), ("top_n_sigma", {"n": 50.0}), ("top_a", {"a": 1.0}), ("top_a", {"a": 0.0}),
    ("eta", {"epsilon": 0.999}), ("eta", {"epsilon": 1e-9}), ("mirostat", {"target": 0.1, "rate": 1.0}),
    ("mirostat", {"target": 20.0}), ("typical", {"mass": 0.2}), ("typical", {"mass": 0.99}),
    ("tail_free", {"z": 0.01}), ("tail_free", {"z": 1.0}), ("entropy_temperature", {"highest": 0.01, "theta": 5.0}),
    ("entropy_temperature", {"highest": 5.0, "theta": 0.0}), ("watermark", {"delta": 100.0, "gamma": 0.9}),
    ("dola", {"first": 3, "stop": 4, "alpha": 0.0}), ("dola", {"alpha": 1.0}),
    ("cfg", {"gamma": 0.01}), ("cfg", {"gamma": 50.0}), ("context_aware", {"alpha": 0.0}),
    ("context_aware", {"alpha": 50.0}),
    ("edf", {"default": 1.0}), ("least_slack", {"prefill_seconds": 0.1, "decode_seconds": 1.0}),
    ("sjf", {"predictor": "limit"}), ("sjf", {"predictor": "prompt"}), ("sjf", {"starvation_limit": 60}),
    ("cache_aware", {"window": 2, "starvation_limit": 60}), ("dlpm", {"quantum": 1}), ("dlpm", {"quantum": 10**9}),
    ("trail", {"share": 0.0}), ("trail", {"share": 1.0}), ("fastserve", {"quantum": 1, "max_preemptions": 5}),
    ("fastserve", {"quantum": 8, "starvation_limit": 60}), ("hrrn", {"prefill_seconds": 1.0}),
]  # fmt: skip


@pytest.mark.sampled(20)
@pytest.mark.parametrize("name", ENTRIES)
def test_every_entry_keeps_the_laws(name: str) -> None:
    entry = ENTRIES[name]
    for report in check_technique(entry, EXAMPLES[entry.settings.kind]):
        report.raise_if_failed()


@pytest.mark.parametrize(("name", "arguments"), OTHER_ENDS, ids=str)
def test_the_ends_of_ranges_keep_the_laws(name: str, arguments: dict[str, Any]) -> None:
    check = check_policy if ENTRIES[name].settings.kind == "schedule" else check_sampler
    check(part_of(name, **arguments), examples=12).raise_if_failed()
