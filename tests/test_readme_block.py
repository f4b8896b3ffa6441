"""The block of docs/first_run.md is what a record says, letter by letter."""

from __future__ import annotations

import json
import re

from tools import readme


def test_the_block_is_made_of_the_record_it_names() -> None:
    text = readme.PAGE.read_text()
    block = readme.block_of(text)
    (name,) = re.findall(r"record: `experiments/records/(first_light-[\d-]+\.json)`", block)
    record = json.loads((readme.RECORDS / name).read_text())
    assert block == readme.block(record, name)
    assert readme.with_block(text, block) == text


def test_what_was_printed_is_what_was_measured() -> None:
    name = re.findall(r"records/(first_light-[\d-]+\.json)", readme.block_of(readme.PAGE.read_text()))[0]
    record = json.loads((readme.RECORDS / name).read_text())
    summary, printed = record["summary"], " ".join(record["demo"]["printed"].split())
    for figure in ("decode_tokens_per_s", "prefill_tokens_per_s", "output_tokens_per_s"):
        assert f"{summary[figure]:,.0f}" in printed, figure
    assert record["environment"]["cpu"]["model"] in readme.block_of(readme.PAGE.read_text())
    assert summary["backend"]["name"].startswith("mlir") and f"backend {summary['backend']['name']}" in printed
    assert "/tmp" not in record["demo"]["printed"] and ".venv/bin/workbench reproduce runs/" in printed
