"""The claims that stand in a folder: each file is a few of them, and says so in `CLAIMS`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from workbench.errors import WorkbenchError, nearest
from workbench.ledger.claim import Claim, judged
from workbench.user_parts import find

CLAIMS = Path(__file__).resolve().parents[2] / "experiments" / "claims"


def claims_in(folder: Path = CLAIMS) -> dict[str, Claim]:
    """Every claim by its id, in the order of files and of their `CLAIMS`. Raises WorkbenchError for a file without
    them, for an id that two have, and for a folder without any."""
    found: dict[str, Claim] = {}
    places: dict[str, str] = {}
    for file in sorted(folder.glob("[!_]*.py")):
        claims = find(f"{file}:CLAIMS")
        if not isinstance(claims, Sequence) or not all(isinstance(claim, Claim) for claim in claims):
            raise WorkbenchError(f"{file}: CLAIMS must be a sequence of Claim values")
        for claim in claims:
            if claim.id in found:
                raise WorkbenchError(f"claim {claim.id!r} stands in {places[claim.id]} and in {file.name}; rename one")
            found[claim.id], places[claim.id] = claim, file.name
    if not found:
        raise WorkbenchError(f"{folder}: no claims there; name a folder of files with CLAIMS")
    return found


def chosen(claims: dict[str, Claim], ids: Sequence[str]) -> dict[str, Claim]:
    """Those of `ids`, all where none are named. Raises WorkbenchError for an id that is unknown."""
    for wrong in (id for id in ids if id not in claims):
        raise WorkbenchError(f"no claim {wrong!r}{nearest(wrong, claims)}; `workbench claims` lists them")
    return {id: claims[id] for id in ids} if ids else claims


def check(claim: Claim) -> list[str]:
    """What keeps a claim from being one: rules that cannot go either way, or speak of another claim."""
    wrong = [] if claim.trials else ["has no trial"]
    for number, trial in enumerate(claim.trials, 1):
        for numbers, wanted in ((trial.refuted_by, ("refuted",)), (trial.met_by, ("holds", "holds-with-limits"))):
            verdict = judged(claim, trial, numbers)
            if verdict.claim != claim.id:
                wrong.append(f"trial {number}: its rule speaks of {verdict.claim!r}")
            elif verdict.says != claim.says:
                wrong.append(f"trial {number}: its rule says {verdict.says!r}, the claim {claim.says!r}")
            if verdict.outcome not in wanted:
                wrong.append(f"trial {number}: {verdict.outcome} by numbers that should give {wanted[0]!r}")
            if verdict.outcome == "holds-with-limits" and not verdict.limits:
                wrong.append(f"trial {number}: holds with limits and does not say which")
            if not verdict.rule or not verdict.because:
                wrong.append(f"trial {number}: its rule has no words, or gives no reason")
    return wrong
