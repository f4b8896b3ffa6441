"""Loading takes little more memory than the weights, whatever the format: each way in a process of its own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from experiments.loading import CASES, Case, measure_all
from tests.thorough import THOROUGH

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason=f"{sys.platform} reports no peak of resident memory"
)
MEASURED = (
    "files bfloat16, stored fused", "files to int4", "files bfloat16, fused when loaded",
    "files bfloat16, mlir's panels", "random int8",
)[: None if THOROUGH else 2]  # fmt: skip
MAX_PEAK_SHARE = 1.15
FIXED_BYTES = 12 * 2**20  # Python's objects and blocks under way, whatever the model's size


@pytest.fixture(scope="module")
def rows() -> dict[str, dict]:
    cases: tuple[Case, ...] = tuple(case for case in CASES if case.name in MEASURED)
    return {row["case"]: row for row in measure_all(cases)}


@pytest.mark.parametrize("name", MEASURED)
def test_the_peak_is_near_the_weights(rows: dict[str, dict], name: str) -> None:
    row = rows[name]
    assert row["weight_bytes"] > 70e6
    assert row["peak_bytes"] <= MAX_PEAK_SHARE * row["weight_bytes"] + FIXED_BYTES, row


def test_files_that_need_no_work_stay_mapped(rows: dict[str, dict]) -> None:
    row = rows["files bfloat16, stored fused"]
    assert row["peak_bytes"] < 0.1 * row["weight_bytes"]
