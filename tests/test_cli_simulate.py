"""`workbench simulate`: what it prints."""

from __future__ import annotations

from pathlib import Path

from tests.helpers.command_line import answer, cli


def test_it_prints_one_object() -> None:
    found = answer("simulate azure --set workload.requests=60 --set executor.instances=8 --set executor.hardware=h100")
    asked = found["requests"]
    assert (asked["submitted"], asked["finished"], asked["failed"], asked["in_flight"]) == (60, 60, 0, 0)
    assert len(found["instances"]) == 8 and found["goodput"]["share"] == 1.0
    for name in ("ttft_s", "tpot_s", "e2el_s"):
        assert 0 < found[name]["p50"] <= found[name]["p90"] <= found[name]["p99"]


def test_it_is_read_by_people(tmp_path: Path) -> None:
    line = '{"timestamp": 0, "input_length": 600, "output_length": 4, "hash_ids": [0, %d]}'
    (tmp_path / "mine.jsonl").write_text("\n".join(line % number for number in range(1, 5)))
    routed = "--set executor.router=prefix_aware --set cache.prefix=radix --set executor.decode.instances=1 --load 2"
    out = cli(f"simulate {routed}", tmp_path / "mine.jsonl").out
    assert "4 submitted, 4 finished" in out and "TTFT" in out and "goodput" in out and "16 output tokens" in out
