"""The bugs of `python -m tools.planted_bugs` still apply to the tree. That each is caught is a command of minutes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tools.planted_bugs import BUGS, ROOT, PlantedBug


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.breaks)
def test_a_bug_applies(bug: PlantedBug, tmp_path: Path) -> None:
    (tmp_path / bug.file).parent.mkdir(parents=True)
    shutil.copy(ROOT / bug.file, tmp_path / bug.file)
    bug.apply(tmp_path)
    compile((tmp_path / bug.file).read_text(), bug.file, "exec")
    assert all((ROOT / test).is_file() for test in bug.tests)
    with pytest.raises(ValueError, match="occurs 0 times"):
        bug.apply(tmp_path)
