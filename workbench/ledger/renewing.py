"""Update the ledger: measure, store, judge, write."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from workbench.ledger.claim import Claim
from workbench.ledger.entry import LEDGER_FILE, Ledger, read_ledger, write_ledger
from workbench.ledger.rebuild import RecordFolder, rebuild_ledger
from workbench.ledger.registry import select_claims, load_claims
from workbench.ledger.running import MeasurementFailures, ProgressCallback, measure_all, evidence_to_measure


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

    Experiments lie beside `folder`. Calculations are always repeated, and claims that share a record with the selected
    ones get their verdict from the new record too.

    Args:
        folder: the claims' folder, with the ledger.
        ids: claims to measure, all where none are named.
        records: folder of stored records.
        out: folder for run folders.
        missing: measure only evidence without a record.
        measure: without it nothing is measured.
        quick: take a first look, which neither stores records nor writes the ledger.
        report_progress: called with a line for each measurement.
    """
    known = load_claims(folder)
    selected, ledger = select_claims(known, ids), read_ledger(folder / LEDGER_FILE)
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
