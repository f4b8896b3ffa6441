"""`workbench simulate`: what it prints."""

from __future__ import annotations

from pathlib import Path

from tests.helpers.command_line import answer, cli

MODEL = "--model shape:llama-3.1-8b --hardware h100"


def test_it_prints_one_object() -> None:
    found = answer(f"simulate azure --requests 60 --instances 8 {MODEL}")
    asked = found["requests"]
    assert (asked["submitted"], asked["finished"], asked["failed"], asked["in_flight"]) == (60, 60, 0, 0)
    assert len(found["instances"]) == 8 and found["goodput"]["share"] == 1.0
    for name in ("ttft_s", "tpot_s", "e2el_s"):
        assert 0 < found[name]["p50"] <= found[name]["p90"] <= found[name]["p99"]


def test_it_is_read_by_people(tmp_path: Path) -> None:
    line = '{"timestamp": 0, "input_length": 600, "output_length": 4, "hash_ids": [0, %d]}'
    (tmp_path / "mine.jsonl").write_text("\n".join(line % number for number in range(1, 5)))
    routed = f"simulate {MODEL} --router prefix_aware --prefix --decode-instances 1 --load 2"
    out = cli(routed, tmp_path / "mine.jsonl").out
    assert "4 submitted, 4 finished" in out and "TTFT" in out and "goodput" in out and "16 output tokens" in out
