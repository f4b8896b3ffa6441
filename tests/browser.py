"""The fixture `lab`, which makes a test one of the tier `browser`: one JupyterLab and one Chromium for a worker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.patience import limit, scale, until
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
    """Press a key on a slider's handle, once; return what the kernel then says of `expression`."""
    before = page.evaluate(expression)
    handle.press(key)
    until(lambda: page.evaluate(expression) != before)
    page.settle()
    return page.evaluate(expression)


def assert_no_errors(page: NotebookPage) -> None:
    """Nothing failed in the kernel, the page or its console, and nothing was asked of another machine."""
    assert (page.errors(), page.console_errors, page.outside_requests) == ([], [], [])
