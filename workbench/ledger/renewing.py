"""Update the ledger: measure, store, judge, write."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from workbench.ledger.claim import Claim
from workbench.ledger.entry import NAME, Ledger, read_ledger, write_ledger
from workbench.ledger.rebuild import Records, rebuilt
from workbench.ledger.registry import chosen, claims_in
from workbench.ledger.running import Faults, Tell, run_all, wanted


@dataclass(frozen=True)
class Renewed:
    """The selected claims, their entries, and evidence that could not be measured."""

    claims: dict[str, Claim]
    ledger: Ledger
    faults: Faults


def renew(
    folder: Path,
    ids: Sequence[str],
    records: Path,
    out: Path,
    *,
    missing: bool = False,
    measure: bool = True,
    quick: bool = False,
    tell: Tell = lambda line: None,
) -> Renewed:
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
    known = claims_in(folder)
    asked, ledger = chosen(known, ids), read_ledger(folder / NAME)
    here = Records(records, folder.parent)
    work = wanted(asked.values(), here, missing) if measure else {}
    if quick:
        with tempfile.TemporaryDirectory(prefix="workbench-claims-") as place:
            faults = run_all(work, here, Path(place), True, tell, Path(place))
            found = rebuilt(asked, Records(Path(place), folder.parent), {})
        return Renewed(asked, found, faults)
    faults, fresh = {}, ledger
    try:
        faults = run_all(work, here, out, False, tell, records)
    finally:  # an interrupt loses no finished measurement
        fresh = rebuilt(known, Records(records, folder.parent), ledger)
        write_ledger(fresh, folder / NAME)
    return Renewed(asked, {id: fresh[id] for id in asked}, faults)
