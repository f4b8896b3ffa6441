"""A notebook is executed in its own folder, wherever the command runs: its files are found beside it."""

from __future__ import annotations

from pathlib import Path

import pytest

from workbench.lab.execute import execute

pytest.importorskip("nbclient", reason="nbclient is not installed: pip install -e '.[lab]'")


def test_a_cell_finds_the_file_beside_its_notebook(tmp_path: Path) -> None:
    (tmp_path / "beside.txt").write_text("here")
    path = tmp_path / "reads.py"
    path.write_text("# %%\nassert open('beside.txt').read() == 'here'\n")
    assert execute(path) == []
