"""Settings for every test: caches, limits, the random seed, tiers, and what a run reports of itself."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterator
from importlib import import_module

import pytest
from hypothesis import HealthCheck, settings

from tests.browser import lab
from tests.helpers.ray_cluster import ray_cluster
from tests.kept_cache import ROOT, begin_run
from tests.patience import TEST_SECONDS, limit
from tests.thorough import SEED, left_out, run_seed, tries
from workbench import progress

__all__ = ["lab", "ray_cluster"]

TIERS = {  # what `make test` leaves out, but for one test of each that is marked `smoke`, and `.ci/run` does
    "browser": "wants JupyterLab and a Chromium",
    "ray": "wants a Ray cluster",
    "processes": "several Python processes work together: fleets, ranks, kills",
    "interpreter": "runs Triton's kernels in its interpreter",
    "site": "builds the site",
    "levels": "runs code for a level below the machine's highest, or for another processor",
}
FIXTURES = {"lab": "browser", "browser": "browser", "site": "site", "ray_cluster": "ray"}  # whose tests are a tier's
SLOWEST = 40

if "PYTEST_XDIST_WORKER" not in os.environ:  # processes of one run share its caches, by their environment
    _run = begin_run()

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # its helpers each import torch, and the cores are taken

settings.register_profile(
    "workbench", max_examples=tries(100), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("workbench")
progress.SLOW_SECONDS = limit(progress.SLOW_SECONDS)  # messages of long waiting count this machine's seconds


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Choose the run's random seed, before hypothesis looks for one; limit every test. A run that a shell put into the
    background was begun deaf to SIGINT, which tests send to themselves."""
    for tier, reason in TIERS.items():
        config.addinivalue_line("markers", f"{tier}: {reason}")
    config.addinivalue_line("markers", "smoke: the one test of its tier that `make test` has")
    config.addinivalue_line("markers", "sampled(most): `make test` tries so many of its cases")
    if given := config.getoption("hypothesis_seed", None):
        os.environ[SEED] = str(given)
    config.option.hypothesis_seed = str(run_seed())
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("timeout", None) is None and "PYTEST_TIMEOUT" not in os.environ:
        config.option.timeout = limit(TEST_SECONDS)


def pytest_report_header() -> str:
    return f"random seed: --hypothesis-seed={run_seed()} repeats this run's draws"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item], config: pytest.Config) -> None:
    """Mark what has a tier's fixture, and leave out what `make test` samples. Notebooks and the browser go first, and
    so to one worker, which has the only JupyterLab and Chromium: they wait half of their time, and no worker should
    wait for them at the end."""
    for item in items:
        for fixture in set(getattr(item, "fixturenames", ())) & set(FIXTURES):
            item.add_marker(FIXTURES[fixture])
    if out := left_out(items):
        items[:] = [item for item in items if item not in out]
        config.hook.pytest_deselected(items=list(out))
    items.sort(key=lambda item: not _has_browser(item))


def pytest_collection() -> None:
    """Set the threads of torch, in processes that run tests: the one that hands tests out has no need of it."""
    import torch

    torch.set_num_threads(1)  # tiny tensors: a second thread only waits


def pytest_collection_finish() -> None:
    """The thousands of modules that stay are not looked through at every collection of garbage."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def pytest_sessionstart(session: pytest.Session) -> None:
    if not hasattr(session.config, "workerinput"):
        session.config.stash[_FILES] = _files()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A run leaves no file in the checkout. Beside a run by hand an editor may write one; in CI none does."""
    before = session.config.stash.get(_FILES, None)
    if before is not None and (left := _files() - before):
        session.config.stash[_LEFT] = sorted(left)
        if "CI" in os.environ:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Tell the seconds of each tier and the slowest files; after a failure, how to choose the same cases again."""
    tiers: dict[str, float] = defaultdict(float)
    files: dict[str, float] = defaultdict(float)
    tests = Counter[str]()
    for reports in list(terminalreporter.stats.values()):
        for report in reports:
            if isinstance(report, pytest.TestReport):
                tier = next((tier for tier in TIERS if tier in report.keywords), "laws and examples")
                tiers[tier] += report.duration
                files[report.nodeid.partition("::")[0]] += report.duration
                tests[tier] += report.when == "call"
    if len(files) > 1:
        line = "; ".join(f"{tier} {seconds:.0f} s ({tests[tier]})" for tier, seconds in _longest(tiers))
        terminalreporter.write_line(f"seconds in tests, by tier (tests): {line}")
        line = ", ".join(f"{file} {seconds:.0f}" for file, seconds in _longest(files)[:SLOWEST])
        terminalreporter.write_line(f"slowest files, seconds: {line}")
    if terminalreporter.stats.get("failed") or terminalreporter.stats.get("error"):
        terminalreporter.write_line(f"cases were drawn by --hypothesis-seed={run_seed()}")
    for file in config.stash.get(_LEFT, ()):
        terminalreporter.write_line(f"the run left a file in the checkout: {file}", red=True)


_FILES: pytest.StashKey[set[str]] = pytest.StashKey()
_LEFT: pytest.StashKey[list[str]] = pytest.StashKey()


def _files() -> set[str]:
    """The checkout's files that git does not track, ignored ones too, but the environment's."""
    command = ["git", "-c", "core.quotePath=false", "ls-files", "--others"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.splitlines()
    return {name for name in names if not name.startswith(".venv/")}


def _longest(seconds: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(seconds.items(), key=lambda item: -item[1])


def _has_browser(item: pytest.Item) -> bool:
    return item.get_closest_marker("browser") is not None or "/notebooks/" in item.nodeid


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


@pytest.fixture
def as_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run as the Python that it is what Inductor compiles."""
    for module in ("compiled_kernels.paged_attention.inductor", "workbench.executors.programs.inductor"):
        monkeypatch.setattr(import_module(module), "compile_once", lambda function, **_: function)
