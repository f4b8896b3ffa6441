"""`workbench lab` as its user meets it: a home without settings, a double click, a cell, a save."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from tests.browser import ROOT, browser
from tests.lab.notebooks import PICTURED
from tests.patience import limit
from tools.notebooks.page import LabSession
from workbench.lab.execute import widget_outputs
from workbench.lab.server import free_port

pytestmark = browser


@pytest.fixture
def started(lab: LabSession, tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """The address and the folder of a JupyterLab that a user with an empty home has opened."""
    folder, port = tmp_path / "notebooks", free_port()
    folder.mkdir()
    shutil.copy(ROOT / "notebooks" / "jupytext.toml", folder)
    (folder / "01_square.py").write_text(PICTURED)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("JUPYTER", "IPYTHON", "XDG"))}
    environment = kept | {"HOME": str(tmp_path), "JUPYTER_TOKEN": "t", "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-m", "workbench", "lab", "--no-browser", "--port", str(port)]
    process = subprocess.Popen(words, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        for line in process.stderr:  # the server says where it is
            if f":{port}/lab" in line:
                break
        yield f"http://127.0.0.1:{port}", folder
    finally:
        process.terminate()
        process.wait()
        with pytest.raises(URLError):  # the server ends with the command
            urlopen(f"http://127.0.0.1:{port}/api", timeout=limit(5))


def test_a_double_click_opens_a_percent_file_and_a_save_keeps_its_picture(
    lab: LabSession, started: tuple[str, Path], tmp_path: Path
) -> None:
    origin, folder = started
    tab = lab.browser.tab(origin)
    page = tab.page
    page.set_default_timeout(limit(120) * 1000)
    page.goto(f"{origin}/lab?token=t")
    page.locator(".jp-DirListing-item", has_text="01_square.py").dblclick()
    page.get_by_text("Python 3 (ipykernel) | Idle").wait_for()
    assert page.locator(".jp-Dialog, .Toastify__toast, .jp-toast").count() == 0
    page.locator(".jp-CodeCell .cm-content").first.click()
    page.keyboard.press("Control+Enter")
    page.locator(".wb-square svg").wait_for()
    page.keyboard.press("Control+s")
    percent, saved = folder / "01_square.py", folder / "01_square.ipynb"
    page.locator(".lm-TabBar-tab.jp-mod-dirty").wait_for(state="detached")
    assert percent.read_text() == PICTURED
    assert tab.outside_requests == [] and tab.console_errors == []
    tab.close()
    document = json.loads(saved.read_text())
    assert "widgets" not in document["metadata"] and len(widget_outputs(document)) == 1
    words = ["-m", "jupyter", "nbconvert", "--to", "html", str(saved)]
    subprocess.run([sys.executable, *words], check=True, capture_output=True)
    shown, _ = lab.shown_offline(saved.with_suffix(".html"), widget_outputs(document))
    assert shown == [True]
