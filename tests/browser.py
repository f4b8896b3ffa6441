"""The fixture `lab`: one JupyterLab server and one Chromium for all browser tests of a worker.

`from tests.browser import browser, lab` in a test's conftest, `pytestmark = browser` in its file.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.patience import limit, scale
from workbench.lab.browser import Browser
from workbench.lab.needs import lacks_browser, lacks_lab
from workbench.lab.page import Lab
from workbench.lab.server import LabServer

ROOT = Path(__file__).resolve().parent.parent
browser = pytest.mark.timeout(limit(240))


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    """JupyterLab on the repository's notebooks/ (nothing is saved there) and on a root to write test notebooks into."""
    for lacking in (lacks_lab(), lacks_browser()):
        if lacking:
            pytest.skip(lacking)
    folders = {"notebooks": ROOT / "notebooks"} if (ROOT / "notebooks").is_dir() else {}
    with LabServer(folders, scale()) as server, Browser() as chromium:
        yield Lab(server, chromium, scale())
