"""Find the claims of a folder: each file lists claims in `CLAIMS`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from workbench.claims.claim import OUTCOMES, Claim, ClaimTrial, apply_rule
from workbench.custom import resolve_path
from workbench.errors import WorkbenchError, nearest
from workbench.experiment.verdict import Outcome
from workbench.own_folder import OWN_EXPERIMENTS

CLAIMS_FOLDER = OWN_EXPERIMENTS / "claims"


def load_claims(folder: Path = CLAIMS_FOLDER) -> dict[str, Claim]:
    """Return every claim by its id, in the order of files and of their `CLAIMS`.

    Raises:
        WorkbenchError: a file without `CLAIMS`, an id that occurs twice, or a folder without claims.
    """
    found: dict[str, Claim] = {}
    places: dict[str, str] = {}
    for file in sorted(folder.glob("[!_]*.py")):
        claims = resolve_path(f"{file}:CLAIMS")
        if not isinstance(claims, Sequence) or not all(isinstance(claim, Claim) for claim in claims):
            raise WorkbenchError(f"{file}: CLAIMS must be a sequence of Claim values; one alone is written (CLAIM,)")
        for claim in claims:
            if claim.id in found:
                first = places[claim.id]
                where = f"in {first} and in {file.name}" if first != file.name else f"twice in {file}"
                raise WorkbenchError(f"claim {claim.id!r} is {where}; rename one")
            found[claim.id], places[claim.id] = claim, file.name
    if not found:
        raise WorkbenchError(f"{folder}: no claims there; give a folder of files with CLAIMS")
    return found


def select_claims(claims: dict[str, Claim], ids: Sequence[str]) -> dict[str, Claim]:
    """Select the claims `ids`; an empty `ids` selects all. WorkbenchError for an unknown id."""
    for wrong in (id for id in ids if id not in claims):
        raise WorkbenchError(f"no claim {wrong!r}{nearest(wrong, claims)}; `workbench claims` lists them")
    return {id: claims[id] for id in ids} if ids else claims


def claim_errors(claim: Claim) -> list[str]:
    """List errors of a claim: rules that do not give their declared outcomes, or judge another claim."""
    wrong = [] if claim.trials else ["has no trial"]
    for number, trial in enumerate(claim.trials, 1):
        wrong += [f"trial {number}: {fault}" for fault in _trial_errors(claim, trial)]
    return wrong


def _trial_errors(claim: Claim, trial: ClaimTrial) -> list[str]:
    wrong = []
    for outcome in OUTCOMES:
        if (outcome in trial.examples) == (outcome in trial.impossible):
            wrong.append(f"{outcome!r} must be in `examples`, with evidence, or in `impossible`, with the reason")
        elif outcome in trial.impossible:
            wrong += [] if trial.impossible[outcome] else [f"{outcome!r} is impossible without a reason"]
        else:
            wrong += _example_errors(claim, trial, outcome)
    if not trial.examples.keys() <= set(OUTCOMES) or not trial.impossible.keys() <= set(OUTCOMES):
        wrong.append(f"`examples` and `impossible` may name {', '.join(OUTCOMES)}")
    wrong += [f"a change without {name}" for change in trial.changed for name, words in vars(change).items()
              if not words]  # fmt: skip
    return wrong


def _example_errors(claim: Claim, trial: ClaimTrial, wanted: Outcome) -> list[str]:
    """List errors of the example that should give the outcome `wanted`."""
    try:
        verdict = apply_rule(claim, trial, trial.example(wanted))
    except WorkbenchError as error:
        return [f"the example of {wanted!r}: {error}"]
    wrong = []
    if verdict.claim != claim.id:
        wrong.append(f"its rule speaks of {verdict.claim!r}")
    elif verdict.says != claim.says:
        wrong.append(f"its rule says {verdict.says!r}, the claim {claim.says!r}")
    if verdict.outcome != wanted:
        wrong.append(f"{verdict.outcome} by numbers that should give {wanted!r} ({verdict.reason})")
    if verdict.outcome == "holds-with-limits" and not verdict.limits:
        wrong.append("holds with limits but states no limits")
    if not verdict.rule or not verdict.reason:
        wrong.append("its rule has no words, or gives no reason")
    return wrong
