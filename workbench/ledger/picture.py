"""Draw a claim's evidence again from its stored record."""

from __future__ import annotations

from pathlib import Path

from workbench.errors import WorkbenchError
from workbench.ledger.claim import Claim, RunEvidence
from workbench.ledger.kept import StoredRecord
from workbench.ledger.rebuild import RecordFolder
from workbench.study.run_folder import write_atomically


def latest_run_record(claim: Claim, records: RecordFolder) -> StoredRecord | None:
    """Return the record of the first of the claim's runs that has one."""
    runs = [trial.evidence for trial in claim.trials if isinstance(trial.evidence, RunEvidence)]
    return next((record for run in runs if (record := records.latest(run)) is not None), None)


def draw_claim(claim: Claim, records: RecordFolder, file: Path) -> None:
    """Draw the run's chart as `file`, .svg or .png. WorkbenchError where there is no run, or drawing is impossible."""
    from workbench.study import pareto
    from workbench.study.comparison import chart_of
    from workbench.study.experiment import Experiment

    record = latest_run_record(claim, records)
    if record is None or record.experiment is None:
        raise WorkbenchError(f"claim {claim.id}: has no record of a run, so no picture; see `workbench claims show`")
    if file.suffix not in (".svg", ".png"):
        raise WorkbenchError(f"{file}: name a file that ends in .svg or .png")
    if problem := pareto.plotting_problem():
        raise WorkbenchError(problem)
    experiment = Experiment.from_values(record.experiment, record.name)
    _, picture = chart_of(experiment, record.numbers)
    drawn = picture.svg if file.suffix == ".svg" else picture.png
    made = drawn(record.numbers, experiment.question)
    content = made.encode() if isinstance(made, str) else made
    try:
        write_atomically(file, lambda out: out.write(content))
    except OSError as error:
        raise WorkbenchError(f"{file}: cannot be written ({error})") from error
