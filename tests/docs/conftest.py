"""The site, built once for all tests of a run."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.patience import limit
from tools.notebooks.browser import Browser
from tools.site.build import build
from workbench.lab.start import missing_browser

BUILD_SECONDS = limit(300)


@dataclass(frozen=True)
class Site:
    """A built site: its folder of HTML, and what was wrong with it."""

    html: Path
    problems: tuple[str, ...]


@pytest.fixture(scope="session")
def site() -> Site:
    """Build the site, or take what another process of this run has built."""
    folder = Path(os.environ["WORKBENCH_CACHE_DIR"]) / "site"
    folder.mkdir(parents=True, exist_ok=True)
    done = folder / "problems.json"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            problems = build(folder)
            done.write_text(json.dumps(problems))
    return Site(folder / "html", tuple(json.loads(done.read_text())))


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    if lacking := missing_browser():
        pytest.skip(lacking)
    with Browser() as chromium:
        yield chromium
