"""Measure the figures of trials: run experiments (each once, in its own process), and call functions."""

from __future__ import annotations

import inspect
import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.claims.claim import CLAIMS_FOLDER, LoadedClaim, Trial, load_claims
from workbench.claims.summary import Figures, Summary, digest, measured_on, store_summaries
from workbench.custom import resolve_path, user_code
from workbench.errors import WorkbenchError
from workbench.experiment.experiment import Experiment
from workbench.experiment.verdict import VariantRows, Verdict
from workbench.files import read_yaml
from workbench.machine.environment import child_environment, environment
from workbench.machine.processor import cpu_times, others_cpu_share
from workbench.progress import ProgressStage
from workbench.runs.record import Record
from workbench.settings import non_default_settings

ProgressCallback = Callable[[str], None]
Measured = list[tuple[LoadedClaim, Summary]]


@dataclass(frozen=True)
class Work:
    """Trials that one measurement serves: an experiment on a model, or one call of a function."""

    name: str
    trials: tuple[tuple[LoadedClaim, Trial], ...]
    model: str = ""


def works(
    claims: Mapping[str, LoadedClaim], selected: Iterable[str], model: str = "", missing: bool = False
) -> list[Work]:
    """Return what has to be measured for the selected claims; a run serves every claim that it puts to the test.

    With `missing`, only what has no summary, or one of other inputs."""
    found: dict[tuple[str, ...], Work] = {}
    for id in selected:
        claim = claims[id]
        for index, trial in enumerate(claim.trials):
            if trial.missing or trial.unbuilt:
                continue
            for on in ("",) if trial.calculation else (model,) if model else claim.settings.models or ("",):
                if missing and any(each.inputs == inputs_of(claim, trial) and on in ("", each.model)
                                   for each in claim.of_trial(trial)):  # fmt: skip
                    continue
                key = (trial.run, on) if trial.run else (id, str(index), on)
                shared = [(c, t) for c in claims.values() for t in c.trials if t.run == trial.run]
                name = trial.run or f"{id}: {trial.label}"
                found.setdefault(key, Work(name, tuple(shared) if trial.run else ((claim, trial),), on))
    return list(found.values())


def measure(work: Work, quick: bool, out: Path) -> Measured:
    """Measure, and return a summary for each trial. Run folders go to `out`. Raises WorkbenchError."""
    claim, trial = work.trials[0]
    if trial.run:
        return _measured_run(work, quick, out)
    function = trial.calculation or trial.measurement
    call = resolve_path(claim.path_of(function))
    arguments, takes = dict(trial.arguments), inspect.signature(call).parameters
    model = work.model or (takes["model"].default if "model" in takes else "")
    if trial.measurement:
        arguments |= {"quick": quick} | ({"model": model} if "model" in takes else {})
    before = cpu_times()
    with user_code(f"claim {claim.name}: {function}"):
        figures = checked(claim, trial, call(**arguments))
    others = others_cpu_share(before) if trial.measurement and trial.timed else None
    now = environment()
    where = measured_on(now, {"model": {"name": model}})
    if trial.calculation:
        where |= {"machine": trial.machine, "level": None, "environment": {}, "date": now["date"][:10]}
    summary = Summary(trial.label, figures, others_cpu_share=others, inputs=inputs_of(claim, trial), **where)
    return [(claim, summary)]


def _measured_run(work: Work, quick: bool, out: Path) -> Measured:
    claim, trial = work.trials[0]
    settings = [*(trial.quick if quick else ()), *([f"model.name={work.model}"] if work.model else [])]
    record = _run(experiment_file(claim, trial), out, settings)
    values = read_yaml(record.experiment_text, f"run {record.path}: experiment.yaml")
    where = measured_on(record.environment, values)
    simulated = where["machine"].startswith("simulated")
    others = None if simulated else record.summary.get("others_cpu_share")
    return [
        (claim, Summary(trial.label, run_figures(claim, trial, record.summary["rows"]), others_cpu_share=others,
                        inputs=inputs_of(claim, trial), record=Path(record.path).name, **where))
        for claim, trial in work.trials
    ]  # fmt: skip


def _run(file: Path, out: Path, settings: Sequence[str]) -> Record:
    """Run the experiment in `file` by the command line in a fresh process, so that nothing compiled before influences
    it."""
    if not file.is_file():
        raise WorkbenchError(f"{file}: there is no such experiment")
    words = [word for setting in settings for word in ("--set", setting)]
    command = [sys.executable, "-m", "workbench", "run", str(file), "--out", str(out), "--json", *words]
    done = subprocess.run(command, capture_output=True, text=True, env=child_environment(), check=False)
    try:
        return Record.open(json.loads(done.stdout)["run"])
    except (ValueError, KeyError, TypeError):
        last = (done.stderr.strip().splitlines() or ["no words"])[-1]
        raise WorkbenchError(f"{file.name}: its run ended with {done.returncode}: {last}") from None


def experiment_file(claim: LoadedClaim, trial: Trial) -> Path:
    return claim.file.parent.parent / f"{trial.run}.yaml"


def run_figures(claim: LoadedClaim, trial: Trial, rows: VariantRows) -> Figures:
    """Return the figures of a run's rows: by the trial's function, or VARIANT.MEASURE."""
    if trial.figures:
        with user_code(f"claim {claim.name}: {trial.figures}"):
            return checked(claim, trial, resolve_path(claim.path_of(trial.figures))(rows, **trial.arguments))
    found = {f"{row['variant']}.{name}": value for row in rows for name, value in row.items() if _is_number(value)}
    checked(claim, trial, found)
    return {name: found[name] for name in claim.rules[claim.trials.index(trial)].figures}


def checked(claim: LoadedClaim, trial: Trial, found: Any) -> Figures:
    """Return figures as plain values. Raises WorkbenchError if they are none, or the rule needs others."""
    where = f"claim {claim.name}: {trial.label}"
    if not isinstance(found, Mapping) or any(
        not (value is None or isinstance(value, str) or _is_number(value)) for value in found.values()
    ):
        raise WorkbenchError(f"{where}: must return numbers by name, not {found!r}")
    try:
        claim.rules[claim.trials.index(trial)].check_names(found)
    except WorkbenchError as error:
        raise WorkbenchError(f"{where}: {error}") from None
    return {name: value if value is None or isinstance(value, str) else _plain(value) for name, value in found.items()}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _plain(value: float) -> float | None:
    value = value if isinstance(value, int) else float(value)
    return int(value) if isinstance(value, bool) else value if math.isfinite(value) else None


def inputs_of(claim: LoadedClaim, trial: Trial) -> str:
    """Return the digest of what decides a trial: its function with its arguments, its rule, and its experiment but for
    the question and the judge; settings with their defaults are left out."""
    decides: list[Any] = [trial.calculation or trial.measurement or trial.figures, trial.arguments, trial.rule]
    if trial.run and (file := experiment_file(claim, trial)).is_file():
        decides.append(settings_of(Experiment.from_file(file)))
    return digest(decides)


def settings_of(experiment: Experiment) -> list[tuple[str, object]]:
    left_out = ("question", "judge")
    return [each for each in non_default_settings(experiment) if each[0].partition(".")[0] not in left_out]


def update(
    claims: Mapping[str, LoadedClaim],
    planned: Sequence[Work],
    out: Path,
    *,
    quick: bool = False,
    report_progress: ProgressCallback = lambda line: None,
) -> tuple[Measured, dict[str, str]]:
    """Measure all works, one after another; store each one's summaries unless `quick`.

    Returns the summaries, and the error messages of works that failed, by name."""
    measured: Measured = []
    faults: dict[str, str] = {}
    for number, work in enumerate(planned, 1):
        report_progress(ProgressStage.create(f"{number} of {len(planned)}: {work.name}", number - 1, len(planned)))
        try:
            fresh = measure(work, quick, out)
            for claim, summary in () if quick else fresh:
                store_summaries(claim.file, [summary])
            measured += fresh
        except (WorkbenchError, OSError) as error:
            faults[work.name] = str(error)
    return measured, faults


def judge(rows: VariantRows, run: str, folder: str = "") -> list[Verdict]:
    """Judge the rows of an experiment by the rules of the claims that it puts to the test.

    judge: {path: "workbench.claims.evidence:judge", arguments: {run: kv_groups}}

    Args:
        rows: rows of the experiment.
        run: name of the experiment, as trials have it.
        folder: folder of the claims; the workbench's own unless given.
    """
    claims = load_claims(Path(folder) if folder else CLAIMS_FOLDER).values()
    trials = [(claim, trial) for claim in claims for trial in claim.trials if trial.run == run]
    return [claim.judge(trial, run_figures(claim, trial, rows)) for claim, trial in trials]
