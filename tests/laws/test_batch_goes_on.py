"""A batch that was stopped after any line ends as one that was not, also where lines share a name."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.offline.batches import line, run, written

LINES = [line(name, prompt="ab", max_tokens=2) for name in ("one", "two", "one", "three", "two", "one")]


@pytest.mark.parametrize("stop", range(len(LINES)))
def test_a_name_is_taken_by_its_first_line(stop: int, tmp_path: Path) -> None:
    source, out = written(LINES, tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    assert (tally := run(source, out)).answered == 3 and tally.failed == 3
    whole = out.read_bytes()
    out.write_bytes(b"".join(whole.splitlines(keepends=True)[:stop]))
    run(source, out)
    assert out.read_bytes() == whole
