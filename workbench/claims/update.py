"""Update the ledger: measure evidence (each experiment once, in its own process), then store, judge and write."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from workbench.claims.claim import Claim, MeasurementEvidence, RunEvidence
from workbench.claims.ledger import LEDGER_FILE, Ledger, RecordFolder, read_ledger, rebuild_ledger, write_ledger
from workbench.claims.registry import claim_errors, load_claims, select_claims
from workbench.claims.stored_record import record_name, run_measurement, store_run
from workbench.errors import WorkbenchError
from workbench.machine.environment import child_environment
from workbench.progress import ProgressStage
from workbench.runs.folder import write_dated_record
from workbench.runs.record import Record

ProgressCallback = Callable[[str], None]
MeasurementFailures = dict[str, str]  # error messages by the evidence's name


def evidence_to_measure(
    claims: Iterable[Claim], records: RecordFolder, missing: bool
) -> dict[str, RunEvidence | MeasurementEvidence]:
    """Return the evidence to measure for `claims`, without duplicates.

    With `missing`, only evidence without a record, or with a record of an experiment that has changed since.
    """
    found: dict[str, RunEvidence | MeasurementEvidence] = {}
    for claim in claims:
        for trial in claim.trials:
            evidence = trial.evidence
            if not isinstance(evidence, RunEvidence | MeasurementEvidence) or (
                missing and not _needs_measuring(evidence, records)
            ):
                continue
            found.setdefault(record_name(evidence), evidence)
    return found


def _needs_measuring(evidence: RunEvidence | MeasurementEvidence, records: RecordFolder) -> bool:
    record = records.latest(evidence)
    if record is None or isinstance(evidence, MeasurementEvidence):
        return record is None
    return record.experiment_changed(records.experiment_file(evidence))


def measure_all(
    evidence: Mapping[str, RunEvidence | MeasurementEvidence],
    records: RecordFolder,
    out: Path,
    quick: bool,
    report_progress: ProgressCallback,
    folder: Path,
) -> MeasurementFailures:
    """Measure each evidence, and store its record in `folder`; run folders go to `out`.

    Failures are returned by evidence name; measuring continues after them.
    """
    faults: MeasurementFailures = {}
    for number, (name, each) in enumerate(evidence.items(), 1):
        report_progress(ProgressStage.create(f"{number} of {len(evidence)}: {name}", number - 1, len(evidence)))
        try:
            if isinstance(each, RunEvidence):
                store_run(_run(records.experiment_file(each), out, each.quick if quick else ()), name, folder)
            else:
                write_dated_record(run_measurement(each, quick), folder, name)
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
    done = subprocess.run(command, capture_output=True, text=True, env=child_environment(), check=False)
    try:
        return Record.open(json.loads(done.stdout)["run"])
    except (ValueError, KeyError, TypeError):
        last = (done.stderr.strip().splitlines() or ["no words"])[-1]
        raise WorkbenchError(f"{file.name}: its run ended with {done.returncode}: {last}") from None


@dataclass(frozen=True)
class LedgerUpdate:
    """The selected claims, their entries, and evidence that could not be measured."""

    claims: dict[str, Claim]
    ledger: Ledger
    failures: MeasurementFailures


def update_ledger(
    folder: Path,
    ids: Sequence[str],
    records: Path,
    out: Path,
    *,
    missing: bool = False,
    measure: bool = True,
    quick: bool = False,
    report_progress: ProgressCallback = lambda line: None,
) -> LedgerUpdate:
    """Measure the evidence of claims, and write the ledger.

    Experiments are in the parent of `folder`. Calculations are always repeated, and claims that share a record with
    selected claims get a new verdict from it too.

    Args:
        folder: the claims' folder, with the ledger.
        ids: claims to measure; empty for all.
        records: folder of stored records.
        out: folder for run folders.
        missing: measure only evidence without a record.
        measure: measure evidence; False only judges stored records.
        quick: take a first look, which neither stores records nor writes the ledger.
        report_progress: called with a line for each measurement.

    Raises:
        WorkbenchError: `claim_errors` of a selected claim; nothing is measured then.
    """
    known = load_claims(folder)
    selected, ledger = select_claims(known, ids), read_ledger(folder / LEDGER_FILE)
    if wrong := [f"claim {id}: {error}" for id, claim in selected.items() for error in claim_errors(claim)]:
        raise WorkbenchError("; ".join(wrong))
    here = RecordFolder(records, folder.parent)
    work = evidence_to_measure(selected.values(), here, missing) if measure else {}
    if quick:
        with tempfile.TemporaryDirectory(prefix="workbench-claims-") as place:
            faults = measure_all(work, here, Path(place), True, report_progress, Path(place))
            found = rebuild_ledger(selected, RecordFolder(Path(place), folder.parent), {})
        return LedgerUpdate(selected, found, faults)
    faults, fresh = {}, ledger
    try:
        faults = measure_all(work, here, out, False, report_progress, records)
    finally:  # an interrupt loses no finished measurement
        fresh = rebuild_ledger(known, RecordFolder(records, folder.parent), ledger)
        write_ledger(fresh, folder / LEDGER_FILE)
    return LedgerUpdate(selected, {id: fresh[id] for id in selected}, faults)
