"""The fixture `lab`: one JupyterLab server and one Chromium for all browser tests of a worker.

`from tests.browser import browser, lab` in a test's conftest, `pytestmark = browser` in its file.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.patience import limit, scale
from tools.notebooks.browser import Browser
from tools.notebooks.page import LabSession, NotebookPage
from workbench.lab.server import LabServer
from workbench.lab.start import missing_browser, missing_lab

ROOT = Path(__file__).resolve().parent.parent
browser = pytest.mark.timeout(limit(90))


@pytest.fixture(scope="session")
def lab() -> Iterator[LabSession]:
    """JupyterLab on the repository's notebooks/ (nothing is saved there) and on a root to write test notebooks into."""
    for lacking in (missing_lab(), missing_browser()):
        if lacking:
            pytest.skip(lacking)
    folders = {"notebooks": ROOT / "notebooks"} if (ROOT / "notebooks").is_dir() else {}
    with LabServer(folders, scale()) as server, Browser() as chromium:
        yield LabSession(server, chromium, scale())


def pressed(page: NotebookPage, handle: Any, key: str, expression: str) -> str:
    """Press a key on a slider's handle until the kernel says something else of `expression`; return what it says.

    Pressed again where nothing came of it: a cell that has just run may take the focus before the key arrives.
    """
    before = after = page.evaluate(expression)
    while after == before:
        handle.press(key)
        page.settle()
        after = page.evaluate(expression)
    return after
