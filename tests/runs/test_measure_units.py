"""A figure is written in the unit that its name says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from workbench.runs.measures import format_measure, unit

RECORDS = Path(__file__).resolve().parents[2] / "experiments" / "records"


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("decode_bytes_share", 0.5, "0.5"), ("kv_bytes_ratio", 0.25, "0.25"), ("bytes_per_token", 2048, "2 KiB/token"),
        ("seconds_per_question", 0.5, "500 ms/question"), ("ttft_ms", 0.5, "0.5 ms"), ("ttft_s_p50", 0.0574, "57.4 ms"),
        ("output_tokens_per_s", 24.8, "24.8 /s"), ("kv_bytes_peak", 384 * 1024, "384 KiB"),
    ],
)  # fmt: skip
def test_figures_of_each_unit(name: str, value: float, text: str) -> None:
    assert format_measure(name, value) == text


def names_in(value: object) -> set[str]:
    if isinstance(value, dict):
        own = {name for name, inner in value.items() if isinstance(inner, int | float)}
        return own.union(*map(names_in, value.values()))
    return set().union(*map(names_in, value)) if isinstance(value, list) else set()


def test_no_figure_of_the_records_has_one_unit_written_and_another_said() -> None:
    ends = {"s": (" s", "ms", "µs", "ns"), "bytes": ("B",), "ms": (" ms",), "of 1": (), "": ()}
    found = set[str]()
    for path in sorted(RECORDS.glob("*.json"))[::4]:
        found |= names_in(json.loads(path.read_text()).get("summary", {}))
    assert found
    for name in found:
        written, said = format_measure(name, 0.5), unit(name)
        if said in ends:
            expected = ends[said]
            assert written.endswith(expected) if expected else written == "0.5", (name, written, said)
