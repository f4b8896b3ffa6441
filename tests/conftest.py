"""Settings for every test: examples have no deadline and tests the time this machine needs (machines are shared), and
torch stays on one thread."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.browser import lab
from tests.patience import TEST_SECONDS, limit
from tests.thorough import how_to_repeat, left_out, tries
from workbench import progress as patience

__all__ = ["lab"]

# What tests compile and measure is kept for them alone: no state from before, none left behind. Processes of one run
# share it (pytest-xdist's workers are started with the environment of the process that began).
if "PYTEST_XDIST_WORKER" not in os.environ:
    _cache = tempfile.TemporaryDirectory(prefix="workbench-tests-")
    os.environ["WORKBENCH_CACHE_DIR"] = _cache.name
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{_cache.name}/inductor"

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # its helpers each import torch, and the cores are taken

settings.register_profile(
    "workbench", max_examples=tries(100), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("workbench")
patience.SLOW_SECONDS = limit(patience.SLOW_SECONDS)  # messages of long waiting count this machine's seconds
torch.set_num_threads(1)  # tiny tensors: a second thread only waits


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """A test that hangs is ended by a limit in seconds of this machine, unless one is asked for by hand. A run that a
    shell put into the background was begun deaf to SIGINT, which tests send to themselves."""
    config.addinivalue_line("markers", "sampled(most): `make test` tries so many of its cases, others in every run")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("timeout", None) is None and "PYTEST_TIMEOUT" not in os.environ:
        config.option.timeout = limit(TEST_SECONDS)


def pytest_collection_modifyitems(items: list[pytest.Item], config: pytest.Config) -> None:
    """Leave out what `make test` samples. Notebooks and the browser go first, and so to one worker, which has the only
    JupyterLab and Chromium: they wait half of their time, and no worker should wait for them at the end."""
    if out := left_out(items):
        items[:] = [item for item in items if item not in out]
        config.hook.pytest_deselected(items=list(out))
    items.sort(key=lambda item: not _has_browser(item))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """After a failure, say how to choose the same cases again."""
    if terminalreporter.stats.get("failed") or terminalreporter.stats.get("error"):
        processes = config.pluginmanager.get_plugin("dsession")
        testrunuid = None if processes is None else processes.nodemanager.testrunuid
        terminalreporter.write_line(f"cases were chosen by {how_to_repeat(testrunuid)}")


def _has_browser(item: pytest.Item) -> bool:
    return bool({"lab", "browser"} & set(getattr(item, "fixturenames", ()))) or "/notebooks/" in item.nodeid


@pytest.fixture(autouse=True)
def without_browsers_loop(request: pytest.FixtureRequest) -> Iterator[None]:
    """Playwright leaves its event loop as this thread's running one while a browser is open. A test without a browser
    begins loops of its own."""
    if _has_browser(request.node):
        yield
        return
    loop = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    yield
    asyncio._set_running_loop(loop)
