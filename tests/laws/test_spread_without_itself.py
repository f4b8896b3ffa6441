"""A run is held against the spread of others: it is not among the repetitions that it is compared with."""

from __future__ import annotations

import json
from pathlib import Path

from tests.runs.small_folders import run_folder
from workbench.reports.latency_check import check_latencies


def test_a_slow_run_beside_its_repetitions_is_above_their_spread(tmp_path: Path) -> None:
    before, other, after = (run_folder(tmp_path, ttft_s={"p50": ttft}) for ttft in (1.0, 1.5, 9.0))
    (found,) = (each for each in check_latencies(before, after) if each.name == "TTFT")
    assert (found.low, found.high, found.now) == (1.0, 1.5, 9.0) and not found.within_spread
    assert json.loads((other.path / "summary.json").read_text())["ttft_s"] == {"p50": 1.5}
