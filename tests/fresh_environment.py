"""Run a user's commands in a user's environment: documented commands, conformity kits, some notebooks.

    python -m tests.fresh_environment                  # builds sdist and wheel, and runs everything
    python -m tests.fresh_environment --environment F  # in this empty environment, into which all is installed
    python -m tests.fresh_environment --only commands  # or notebooks
    WORKBENCH_TESTS_THOROUGH=1 python -m tests.fresh_environment  # every notebook, which takes a quarter of an hour

One fresh environment in three layers. The sdist is installed first, and runs the first command; then the wheel alone,
as `make demo` installs it, runs the others, and a notebook without the extra `serve`, which notebook 11 names; then
the wheel's extra `lab`, as `make lab`, runs notebooks. Everything runs outside of the checkout, finding nothing of it.
It is a step of .ci/run after the suite, not a test of the suite: it needs the package index and some minutes, and the
suite's own environment must stand before.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import jupytext

from tests.thorough import some

ROOT = Path(__file__).resolve().parents[1]
COMMAND_SECONDS = 1800  # far more than any takes: two threads that wait for each other on a busy machine take long
FIRST = "workbench run experiments/first_light.yaml"  # other commands name its run
NEEDS_SERVE = "11_serving.py"
AT_ONCE = 2  # commands, as most of each is one thread's work
PROJECT = "workbench init project && cd project && workbench run first.yaml && pytest && workbench runs"
# Beginnings of documented commands that are not run here, and why: as a rule they take minutes and have tests.
LEFT_OUT = {
    "workbench bench": "minutes of measuring",
    "python -m benchmarks.peers": "minutes of measuring, of tools that are not installed there",
    "workbench kernels bench": "minutes of measuring",
    "workbench kernels check": "runs in the suite, case by case",
    "workbench kernels show paged_attention --backend triton": "wants the extra lab",
    "workbench kernels show add_rms_norm --backend inductor": "half a minute of Inductor",
    "workbench quality": "minutes of measuring",
    "workbench run experiments/kv_precision.yaml": "minutes of measuring",
    "workbench run experiments/kv_evict.yaml": "minutes of measuring",
    "workbench run experiments/determinism.yaml": "minutes of measuring",
    "workbench run experiments/speculation.yaml": "minutes of measuring",
    "workbench run experiments/disaggregation.yaml": "minutes of simulation",
    "workbench run experiments/apart.yaml": "minutes of measuring",
    "workbench run experiments/fleet_prediction.yaml": "minutes of measuring",
    "workbench run experiments/zoo_pareto.yaml": "minutes of measuring",
    "workbench zoo run": "minutes of measuring",
    "workbench run experiments/together.yaml": "minutes, on a model of 135 million parameters",
    "workbench simulate azure": "minutes of simulation",
    "workbench sweep --resume": "wants a sweep that was killed",
    "workbench sweep experiments/kv_precision.yaml --set cache.format=dense,int8 --executor ray": "wants a cluster",
    "workbench compare runs/a --baseline runs/a:dense": "wants a run of variants, which takes minutes",
    "workbench compare runs/a runs/b": "wants two runs of these names",
    "workbench reproduce runs/together-": "the run it names was not made here",
    "workbench cost": "a minute of simulation",
    "workbench model get": "fetches megabytes; .ci/run does before the suite",
    "workbench model remove": "wants a model that was fetched",
    "workbench chat --model smollm2": "wants a model that was fetched",
    "workbench chat --tool my_module:my_function": "wants the reader's own module, and a reader who types",
    "workbench serve": "runs until it is stopped; tests/serve/test_server.py starts and stops it",
    "workbench replay": "wants an answer of a server; tests/serve/test_replays.py runs it",
    "workbench top": "wants a server that runs meanwhile",
    "workbench sweep experiments/agent.yaml": "minutes of measuring",
    "workbench model new-family my_model MY_FOLDER": "tests/check/test_guide.py runs it on a folder",
    "workbench model check MY_FOLDER": "tests/check/test_guide.py runs it on a folder",
    'workbench generate "once upon" --model MY_FOLDER': "tests/check/test_guide.py runs it on a folder",
}


@dataclass(frozen=True)
class Step:
    """A documented command, and the files (name, text) that its page shows above it."""

    command: str
    files: tuple[tuple[str, str], ...] = ()


def steps(page: str) -> Iterator[Step]:
    """Commands of a page in order: lines of its fenced blocks that begin with `workbench` or `python -`."""
    files: dict[str, str] = {}
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", page, re.M | re.S):
        if language == "python":
            files |= {name: block for name in re.findall(r"\A# ([\w/]+\.py)\n", block)}
            continue
        for line in block.splitlines() if not language else ():
            command = re.split(r"\s+# ", line)[0].strip()
            if command.startswith(("workbench ", "python -")):
                yield Step(command, tuple(files.items()))


def documented_pages() -> list[Path]:
    """README and the pages of docs/ written by hand, but scale.md: tests/docs/test_pages.py runs its commands."""
    pages = sorted((ROOT / "docs").rglob("*.md"))
    return [ROOT / "README.md", *(page for page in pages if page.name != "scale.md")]


def left_out(command: str) -> str | None:
    """Return the reason why a documented command is not run here; None where it is."""
    return next((why for start, why in LEFT_OUT.items() if command.startswith(start)), None)


def put_in_place(command: str, runs: Path) -> str:
    """`command` with the runs that were made here in place of those that the pages name."""
    made = sorted(path.name for path in runs.glob("first_light-*")) or ["first_light-none"]
    command = re.sub(r"runs/first_light-\.\.\.", f"runs/{made[0]}", command)
    command = re.sub(r"runs/first_light-\d[\w-]*", f"runs/{made[0]}", command)
    return re.sub(r"runs/b\b", f"runs/{made[-1]}", re.sub(r"runs/a(:\w+)?\b", f"runs/{made[0]}", command))


class Environment:
    """A virtual environment, and a folder of its own to work in."""

    def __init__(self, place: Path, work: Path):
        self.place, self.work = place, work
        self.python = place / "bin" / "python"
        ours = ("PYTHONPATH", "VIRTUAL_ENV")
        self.variables = {name: value for name, value in os.environ.items() if name not in ours}
        self.variables["PATH"] = f"{place / 'bin'}{os.pathsep}{os.environ['PATH']}"
        self.variables["WORKBENCH_CACHE_DIR"] = str(work / "cache")
        self.variables["WORKBENCH_DEFAULT_MODEL"] = "demo-chat"  # whether or not a real model is at hand
        self.variables["TORCHINDUCTOR_CACHE_DIR"] = str(work / "inductor")

    def run(self, command: str, seconds: float = COMMAND_SECONDS) -> str | None:
        """Run a command; return the last lines of its output if it failed, otherwise None."""
        try:
            done = subprocess.run(
                ["bash", "-c", command], cwd=self.work, env=self.variables, capture_output=True, text=True,
                timeout=seconds, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"not over after {seconds:.0f} s"
        lines = (done.stdout + done.stderr).strip().splitlines()
        if "Traceback (most recent call last)" in done.stderr or done.returncode:
            return f"exit {done.returncode}: " + " | ".join(lines[-6:])
        lines = (line for line in done.stderr.splitlines() if "[IPKernelApp]" not in line)  # a log that Lab hides
        noise = [line for line in lines if re.search(r"Warning|WARNING|Failed to load", line)]
        return f"noise on stderr: {noise[0]}" if noise else None

    def copy(self, name: str) -> Environment:
        """Return the same environment with a copy of the folder to work in, beside it."""
        copied = copy.copy(self)
        copied.work = self.work.with_name(name)
        shutil.copytree(self.work, copied.work, ignore=shutil.ignore_patterns("cache", "inductor"))
        return copied

    def faults_of(self, *todo: Step) -> list[str]:
        """Run these commands in order; return what failed, and print how long each took."""
        faults = []
        for step in todo:
            for name, text in step.files:
                (self.work / name).parent.mkdir(exist_ok=True)
                (self.work / name).write_text(text)
            began = time.monotonic()
            fault = self.run(put_in_place(step.command, self.work / "runs"))
            print(f"{'failed' if fault else 'ok':6} {time.monotonic() - began:6.1f} s  {step.command}", flush=True)
            if fault:
                print(f"       {fault}", flush=True)
                faults.append(f"{step.command}: {fault}")
        return faults

    def install(self, *what: str) -> None:
        line = [self.python, "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
        subprocess.run([*line, "--constraint", ROOT / "constraints.txt", *what], check=True)


def build_release(folder: Path) -> tuple[Path, Path]:
    """Return the sdist of the checkout's tracked files, and the wheel made from it, as `python -m build` makes them.

    Without the network, by this interpreter's setuptools."""
    source = folder / "source"
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name)
    line = [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist", source]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"python -m build: exit {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    (sdist,), (wheel,) = (folder / "dist").glob("*.tar.gz"), (folder / "dist").glob("inference_workbench-*.whl")
    return sdist, wheel


def make_unknown_family(folder: Path) -> None:
    """Copy the demo model as one of a family that is not known, for the guide on loading."""
    shutil.copytree(ROOT / "workbench" / "demo" / "target", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "my_model", "architectures": ["MyModel"]}))


def check_commands(environment: Environment) -> list[str]:
    """Run the documented commands, `AT_ONCE` pages at once, each page's in order; return what failed."""
    work = environment.work
    (work / "questions.jsonl").write_text(
        '{"custom_id": "1", "method": "POST", "url": "/v1/completions", '
        '"body": {"model": "demo", "prompt": "def f(n):", "max_tokens": 8}}\n'
    )
    make_unknown_family(work / "MY_FOLDER")
    rest = "workbench doctor", "workbench --version", PROJECT, *(
        f'python -c "{imports}; import workbench as w; assert {str(environment.place)!r} in w.__file__, w.__file__"'
        for imports in ("import workbench.testing", "import compiled_kernels, workbench, experiments")
    )  # fmt: skip
    lists = [[Step(command) for command in rest]]
    for page in documented_pages():
        found = dict.fromkeys(steps(page.read_text()))
        lists += [[step for step in found if step.command != FIRST and left_out(step.command) is None]]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        lists = sorted(filter(None, lists), key=len, reverse=True)
        pages = [environment.copy(f"page{number}") for number, _ in enumerate(lists)]
        return list(itertools.chain(*pool.map(lambda page, todo: page.faults_of(*todo), pages, lists)))


def execution(notebook: Path) -> str:
    """Return the command that runs a notebook from the first cell to the last, and prints the errors of its cells."""
    code = "import sys; from pathlib import Path; from workbench.lab.execute import execute"
    return f'python -c "{code}; wrong = execute(Path({str(notebook)!r})); print(*wrong); sys.exit(bool(wrong))"'


def check_core_notebooks(environment: Environment, course: Path) -> list[str]:
    """Run one notebook without the extra `serve`, and the one that needs it; return what failed.

    The core has no jupytext, which reads the course's files: they are converted here."""
    drawn, serving = some(sorted({*course.glob("*.py")} - {course / NEEDS_SERVE}), 1), course / NEEDS_SERVE
    for path in (*drawn, serving):
        jupytext.write(jupytext.read(path), path.with_suffix(".ipynb"))
    faults = environment.faults_of(*(Step(execution(path.with_suffix(".ipynb"))) for path in drawn))
    found = environment.run(execution(serving.with_suffix(".ipynb"))) or "ran"
    named = "inference-workbench[serve]" in found
    return faults if named else [*faults, f"{NEEDS_SERVE} without the extra serve does not name it: {found}"]


def check_notebooks(environment: Environment, course: Path) -> list[str]:
    """Run some of the notebooks that the wheel brings; return what failed."""
    lines = map(execution, some([course.parent / "notebook.ipynb", *sorted(course.glob("*.py"))], 3))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(itertools.chain(*pool.map(lambda line: environment.faults_of(Step(line)), lines)))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--environment", type=Path, help="an empty one; else a fresh one is made and deleted")
    parser.add_argument("--only", choices=("commands", "notebooks"))
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="workbench-fresh-") as folder:
        work = Path(folder) / "work"
        work.mkdir()
        began = time.monotonic()
        sdist, wheel = build_release(Path(folder))
        environment = Environment((given.environment or Path(folder) / "venv").resolve(), work)
        if given.environment is None:
            subprocess.run([sys.executable, "-m", "venv", environment.place], check=True)
        environment.install(str(sdist))
        print(f"installed {sdist.name} in {time.monotonic() - began:.0f} s", flush=True)
        faults = environment.faults_of(Step(FIRST))
        environment.install("--force-reinstall", "--no-deps", str(wheel))
        faults += check_commands(environment) if given.only != "notebooks" else []
        if given.only != "commands":
            course = environment.work / "course" / "notebooks"
            faults += environment.faults_of(Step(f"workbench init {course.parent} --course"))
            faults += check_core_notebooks(environment, course)
            environment.install(f"{wheel}[lab]")
            faults += check_notebooks(environment, course)
    print(f"{len(faults)} failed, {time.monotonic() - began:.0f} s" if faults else "all ran")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
