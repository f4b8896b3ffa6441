"""Bringing the ledger up to date: measure, keep, judge, write."""

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
    """The claims that were asked for, their entries, and what could not be measured."""

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
    """Measure what the claims `ids` (all where none are named) rest on and write the ledger in `folder`.

    Experiments lie beside `folder`. With `missing` only what has no record is measured; without `measure` nothing is;
    a `quick` look neither keeps records nor writes. Calculations are always made anew, and claims that share a record
    with those of `ids` get their verdict from the new one too.
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
    finally:  # who interrupts keeps what was measured until then
        fresh = rebuilt(known, Records(records, folder.parent), ledger)
        write_ledger(fresh, folder / NAME)
    return Renewed(asked, {id: fresh[id] for id in asked}, faults)
