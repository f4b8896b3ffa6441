"""Run tests on a copy of the tree with one bug in it, up to the first test that fails."""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import pytest

from tools.planted_bugs.bugs import BUGS, PlantedBug
from tools.planted_bugs.nearest import NearestTests

ROOT = Path(__file__).resolve().parents[2]
FILES = (4, 6)  # nearest test files for a bug, and how many more where they catch nothing
PRELOADED = ("torch", "transformers.generation.logits_process", "hypothesis", "pydantic", "openai", "fastapi", "typer")
REPORT = "first_failure.json"
# Hypothesis would take minutes to make an example that fails a small one. A failure is noted with its exception, as
# a limit that is reached is no assertion.
CONFTEST = """

import json as _json
from pathlib import Path as _Path
from hypothesis import Phase

settings.register_profile("unshrunk", settings.get_profile("workbench"), phases=[Phase.explicit, Phase.generate])
settings.load_profile("unshrunk")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    place = _Path(__file__).parents[1] / "first_failure.json"
    if report.failed and not place.exists():
        error = call.excinfo
        place.write_text(_json.dumps([report.nodeid, error.typename, str(error.value)[:500]]))
    return report
"""
LIMITS = re.compile(r"Timeout|it has not come in|TimeoutError|TimeoutExpired|what was to bring it about")
How = Literal["assertion", "limit", "crash", "not caught"]


@dataclass(frozen=True)
class Outcome:
    """The outcome of one bug: the test that caught it, that test's exception, and the CPU seconds until then."""

    breaks: str
    how: How
    test: str = ""
    error: str = ""
    seconds: float = 0.0


def problems(root: Path = ROOT, bugs: Sequence[PlantedBug] = BUGS) -> list[str]:
    """Return a line for each bug that does not apply to the tree, and for each missing test file."""
    found = []
    with tempfile.TemporaryDirectory() as place:
        for bug in bugs:
            copy = Path(place) / bug.file
            copy.parent.mkdir(parents=True, exist_ok=True)
            if (root / bug.file).is_file():
                shutil.copy(root / bug.file, copy)
            try:
                bug.apply(Path(place))
            except (ValueError, SyntaxError) as error:
                found.append(f"{bug.breaks}: {error}")
            found += [f"{bug.breaks}: there is no {test}" for test in bug.tests if not (root / test).exists()]
    return found


class BuggyTree:
    """A copy of the tree `root` in `folder`, in which one bug at a time is planted.

    Tests run in forks of this process, which has already imported slow third-party packages.
    """

    def __init__(self, root: Path, folder: Path, environment: dict[str, str]):
        self.folder, self.log = folder, folder / "pytest.log"
        self._environment = {"PYTHONPATH": str(folder), **environment}
        names = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, check=True).stdout
        command = ["tar", "--null", "-T", "-", "-c"]
        packed = subprocess.run(command, cwd=root, input=names, capture_output=True, check=True)
        subprocess.run(["tar", "-x"], cwd=folder, input=packed.stdout, check=True)
        with (folder / "tests" / "conftest.py").open("a", encoding="utf-8") as conftest:
            conftest.write(CONFTEST)
        os.environ |= {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}  # read by what is imported now
        for package in PRELOADED:
            importlib.import_module(package)
        assert not {"workbench", "compiled_kernels", "tests"} & sys.modules.keys(), "they are to be the copy's"
        gc.freeze()

    @contextmanager
    def planted(self, bug: PlantedBug) -> Iterator[None]:
        text = (self.folder / bug.file).read_bytes()
        bug.apply(self.folder)
        try:
            yield
        finally:
            (self.folder / bug.file).write_bytes(text)

    def pytest(self, words: Sequence[str]) -> tuple[int, float]:
        """Run pytest with the arguments `words` and its output in `log`; return its exit status, and the CPU seconds of
        it and its children."""
        (self.folder / REPORT).unlink(missing_ok=True)
        child = os.fork()
        if not child:
            try:
                self._in_fork(["--tb=no", "-q", "-p", "no:cacheprovider", *words])
            finally:
                os._exit(70)
        _, status, used = os.wait4(child, 0)
        return os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime

    def _in_fork(self, words: list[str]) -> None:
        with self.log.open("wb") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        os.environ.update(self._environment)
        os.chdir(self.folder)
        sys.path.insert(0, str(self.folder))
        for name in [name for name in sys.modules if name.partition(".")[0] == "tools"]:
            del sys.modules[name]
        status = pytest.main(words)
        sys.stdout.flush()
        os._exit(status)

    def first_failure(self, bug: PlantedBug, words: Sequence[str]) -> Outcome:
        """Run the tests chosen by `words` with a bug planted, up to the first that fails; return the outcome."""
        with self.planted(bug):
            status, seconds = self.pytest(["-x", *words])
        seconds = round(seconds, 1)
        if status in (0, 5):
            return Outcome(bug.breaks, "not caught", seconds=seconds)
        if (self.folder / REPORT).exists():
            test, kind, message = json.loads((self.folder / REPORT).read_text())
            how: How = "limit" if LIMITS.search(f"{kind} {message}") else "assertion"
            return Outcome(bug.breaks, how, test, f"{kind}: {message}".partition("\n")[0][:200], seconds)
        return Outcome(bug.breaks, "crash", error=self.log.read_text(errors="replace")[-300:].strip(), seconds=seconds)

    def fails_without_bug(self, tests: Sequence[str]) -> list[str]:
        """Return the tests that fail on the tree without a bug; these catch nothing."""
        if not tests:
            return []
        self.pytest(["-rfE", *tests])
        return re.findall(r"^(?:FAILED|ERROR) (\S+)", self.log.read_text(errors="replace"), re.MULTILINE)


def selection(root: Path) -> list[str]:
    """Return the pytest arguments by which `make test` selects its tests, read from the Makefile."""
    tiers = re.search(r"^TIERS := (.+)$", (root / "Makefile").read_text(), re.MULTILINE)
    return ["-m", f"smoke or not ({tiers[1]})"] if tiers else []


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.planted_bugs")
    parser.add_argument("word", nargs="?", default="", help="only bugs with this word in their description or file")
    parser.add_argument("--whole", action="store_true", help="all of `make test` where the nearest files catch nothing")
    parser.add_argument("--thorough", action="store_true", help="as `make test-thorough`: all tiers, more examples")
    parser.add_argument("--every", type=int, default=1, help="each so many-th bug")
    parser.add_argument("--tree", type=Path, default=ROOT, help="a checkout whose tests are measured")
    parser.add_argument("--out", type=Path, help="write a line of JSON for each bug to this file")
    asked = parser.parse_args(words)
    bugs = [bug for bug in BUGS if asked.word in f"{bug.breaks} {bug.file}"][:: asked.every]
    for problem in (wrong := problems(asked.tree, bugs)):
        print(problem)
    if wrong or not bugs:
        return 1
    chosen = [] if asked.thorough else selection(asked.tree)
    environment = {"WORKBENCH_TESTS_THOROUGH": "1"} if asked.thorough else {}
    test_files, outcomes = NearestTests(asked.tree), list[Outcome]()
    with tempfile.TemporaryDirectory(prefix="workbench-bugs-") as folder:
        tree = BuggyTree(asked.tree, Path(folder), environment)
        for bug in bugs:
            near = test_files.nearest(bug.file, bug.breaks, sum(FILES), bug.tests)
            first = len(bug.tests) + FILES[0]
            stages = [near[:first], near[first:]] + [["-n", "logical", "tests"]] * asked.whole
            seconds, outcome = 0.0, Outcome(bug.breaks, "not caught")
            for tests in stages:
                if tests and outcome.how == "not caught":
                    outcome = tree.first_failure(bug, [*chosen, *tests])
                    seconds += outcome.seconds
            outcome = replace(outcome, seconds=seconds)
            outcomes.append(outcome)
            row = (outcome.breaks, outcome.how, outcome.test, f"{outcome.seconds:.0f}", outcome.error)
            print("| " + " | ".join(each.replace("|", "/") for each in row) + " |", flush=True)
            if asked.out is not None:
                with asked.out.open("a", encoding="utf-8") as out:
                    out.write(json.dumps(asdict(outcome)) + "\n")
        wrong = tree.fails_without_bug([outcome.test for outcome in outcomes if outcome.test])
    for test in wrong:
        print(f"fails without a bug, so it catches none: {test}")
    caught = sum(outcome.how == "assertion" and outcome.test not in wrong for outcome in outcomes)
    limits = sum(outcome.how in ("limit", "crash") for outcome in outcomes)
    print(f"{caught} of {len(outcomes)} bugs are caught by an assertion, {limits} by a limit or a crash")
    return int(caught < len(outcomes))
