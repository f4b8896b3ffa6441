"""Write an experiment on a pair of settings to a file before it runs, run it in a process, and read its verdict."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from itertools import count
from pathlib import Path
from typing import Any

from workbench.errors import WorkbenchError, cannot_write
from workbench.widgets.command_process import CommandProcess
from workbench.widgets.playground.data import SIDES
from workbench.widgets.playground.history import setting_changes
from workbench.widgets.playground.settings import non_default

RUNS = "runs"  # folder next to the experiments' files, with a subfolder for each run
MAX_NAME_CHARACTERS = 40
INTERRUPTED = (-2, 130)  # exit codes after Ctrl-C


@dataclass(frozen=True)
class PairQuestion:
    """The question of an experiment on a pair of settings, the rule for its verdict, and its sizes."""

    question: str
    rule: str
    prompts: int = 8
    prompt_tokens: int = 192
    output_tokens: int = 64
    rounds: int = 5


def pair_experiment(left: Any, right: Any, question: PairQuestion) -> Any:
    """Return the experiment with the variants `left` (the left side's settings) and `right` (with its changes).

    Raises:
        WorkbenchError: the question is empty, the rule is unreadable or uses unknown figures, or a size is below 1.
    """
    from workbench.experiment.agreement import JUDGE, parse_rule
    from workbench.experiment.experiment import Experiment

    rule = parse_rule(question.rule)
    if not question.question.strip():
        raise WorkbenchError("question: is empty; write what the experiment is to answer")
    plain, other = _engine_values(left), _engine_values(right)
    changes = {path: value for path, (_, value) in setting_changes(plain, other).items()}
    return Experiment.from_values({
        "question": question.question, **plain,
        "workload": {
            "kind": "text_agreement", "prompts": question.prompts, "prompt_tokens": question.prompt_tokens,
            "output_tokens": question.output_tokens, "rounds": question.rounds,
        },
        "variants": {SIDES[0]: {}, SIDES[1]: changes},
        "judge": {"path": JUDGE, "arguments": {"rule": rule.text}},
    })  # fmt: skip


def _engine_values(side: Any) -> dict[str, Any]:
    return side.model_dump(mode="json", exclude={"question", "workload", "measure", "variants", "sweep", "judge"})


def experiment_text(experiment: Any) -> str:
    """Return the experiment as YAML without default settings, under a comment with the date and the rule's origin."""
    from workbench.experiment.yaml import write_yaml

    values = experiment.model_dump(mode="json")
    plain = type(experiment).model_construct().model_dump(mode="json", exclude={"question", "workload"})
    short = {"question": values["question"], **non_default({k: v for k, v in values.items() if k != "question"}, plain)}
    return f"# Written by Playground on {date.today()}, with its rule, before any run of it.\n{write_yaml(short)}"


def write_experiment(experiment: Any, folder: Path, name: str) -> Path:
    """Write the experiment to a new numbered file in `folder`, named after `name`; return its path.

    Raises:
        WorkbenchError: the file cannot be written.
    """
    short = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:MAX_NAME_CHARACTERS].strip("-") or "pair"
    text = experiment_text(experiment)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for number in count(1):
            file = folder / f"{short}-{number:03d}.yaml"
            try:
                with file.open("x", encoding="utf-8") as out:
                    out.write(text)
            except FileExistsError:
                continue
            return file
    except OSError as error:
        raise cannot_write(str(folder), error) from None
    raise AssertionError("unreachable")


def run_arguments(file: Path) -> list[str]:
    return ["run", str(file), "--out", str(file.parent / RUNS)]


def terminal_command(file: Path) -> str:
    """Return the command that runs the experiment in a terminal."""
    return shlex.join(["workbench", *run_arguments(file)])


class ExperimentRun:
    """A run of an experiment's file in a separate process; at its end it has `verdicts` or a `problem`.

    Args:
        file: the experiment's file; the run's folder is created in `runs` next to it.
        on_change: called in another thread with each line of progress, and at the end.
    """

    def __init__(self, file: Path, on_change: Callable[[], None]):
        self.file = file
        self.record: Path | None = None
        self.verdicts: list[dict[str, Any]] = []
        self.problem = ""  # why the ended run has no verdict
        self.remark = ""  # warning of contention, shown with the verdict
        self._stop_asked, self._read = False, False
        self._on_change = on_change
        self._job = CommandProcess(run_arguments(file), self._changed)

    @property
    def running(self) -> bool:
        return not self._read

    @property
    def progress(self) -> str:
        """Return the latest line of progress, for a tqdm bar its latest state."""
        lines = [line for each in self._job.progress_lines[-3:] for line in re.split(r"[\r\n]", each) if line.strip()]
        return lines[-1].strip() if lines else "loading"

    def stop(self) -> None:
        self._stop_asked = True
        self._job.stop()

    def wait(self) -> None:
        self._job.wait()

    def _changed(self) -> None:
        code = self._job.returncode
        if code is not None and not self._read:
            if code in INTERRUPTED or (code and self._stop_asked):
                self.problem = "stopped before its end: no verdict"
            elif code:
                said = " ".join(self._job.progress_lines[-3:]).strip() or self._job.stdout.strip()[-300:]
                self.problem = f"failed (exit code {code}): {said}"
            else:
                self._read_record()
            self._read = True
        self._on_change()

    def _read_record(self) -> None:
        from workbench.machine.processor import contention_remark
        from workbench.runs.record import Record

        try:
            (self.record,) = (self.file.parent / RUNS).glob(f"{self.file.stem}-*")
            summary = Record.open(self.record).summary
            self.verdicts = list(summary["verdicts"])
        except (ValueError, LookupError, WorkbenchError) as error:
            self.problem = f"its record cannot be read: {error}"
            return
        self.remark = contention_remark(summary.get("others_cpu_share"))
