"""Measure the evidence of claims: each experiment once, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from workbench.errors import WorkbenchError
from workbench.ledger.claim import Claim, Measurement, Run
from workbench.ledger.kept import keep_run, measured, name_of
from workbench.ledger.rebuild import Records
from workbench.stages import Stage
from workbench.study.dated_record import write_dated
from workbench.study.record import Record

ROOT = Path(__file__).resolve().parents[2]
Tell = Callable[[str], None]
Faults = dict[str, str]  # error messages by the evidence's name


def wanted(claims: Iterable[Claim], records: Records, missing: bool) -> dict[str, Run | Measurement]:
    """Return the evidence to be measured for `claims`, each once.

    With `missing` this is evidence without a record, or with a record of an experiment that has changed since.
    """
    found: dict[str, Run | Measurement] = {}
    for claim in claims:
        for trial in claim.trials:
            evidence = trial.evidence
            if not isinstance(evidence, Run | Measurement) or (missing and not _due(evidence, records)):
                continue
            found.setdefault(name_of(evidence), evidence)
    return found


def _due(evidence: Run | Measurement, records: Records) -> bool:
    record = records.of(evidence)
    if record is None or isinstance(evidence, Measurement):
        return record is None
    return record.changed(records.file(evidence))


def run_all(
    evidence: Mapping[str, Run | Measurement], records: Records, out: Path, quick: bool, tell: Tell, folder: Path
) -> Faults:
    """Measure each evidence, and store its record in `folder`; run folders go to `out`.

    A failure is returned by name, and the rest goes on.
    """
    faults: Faults = {}
    for number, (name, each) in enumerate(evidence.items(), 1):
        tell(Stage.of(f"{number} of {len(evidence)}: {name}", number - 1, len(evidence)))
        try:
            if isinstance(each, Run):
                keep_run(_run(records.file(each), out, each.quick if quick else ()), name, folder)
            else:
                write_dated(measured(each, quick), folder, name)
        except (WorkbenchError, OSError) as error:
            faults[name] = str(error)
    return faults


def _run(file: Path, out: Path, settings: tuple[str, ...]) -> Record:
    """Run the experiment in `file` by the command line in a fresh process, so that nothing compiled before influences
    it.
    """
    if not file.is_file():
        raise WorkbenchError(f"{file}: there is no such experiment")
    words = [word for setting in settings for word in ("--set", setting)]
    command = [sys.executable, "-m", "workbench", "run", str(file), "--out", str(out), "--json", *words]
    place = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    surroundings = {**os.environ, "PYTHONPATH": place}
    done = subprocess.run(command, capture_output=True, text=True, env=surroundings, check=False)
    try:
        return Record.open(json.loads(done.stdout)["run"])
    except (ValueError, KeyError, TypeError):
        last = (done.stderr.strip().splitlines() or ["no words"])[-1]
        raise WorkbenchError(f"{file.name}: its run ended with {done.returncode}: {last}") from None
