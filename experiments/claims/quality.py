"""Claims on long texts and on comparing outputs."""

from __future__ import annotations

from experiments import window_span
from workbench.claims.claim import Claim, ClaimSource, ClaimTrial, EvidenceNumbers, MissingEvidence, Ruling, RunEvidence


def _depths(*gains: float) -> EvidenceNumbers:
    """Return the full model's row, with a gain at each depth from the text's beginning to its end."""
    last = len(gains) - 1
    copying = {str(i / last): {"gain": gain, "distance": 100.0 * (last - i)} for i, gain in enumerate(gains)}
    return [{"variant": window_span.FULL, "copying": copying}]


def by_meaning(found: EvidenceNumbers) -> Ruling:
    """After a change of the model at least 30% of exact comparisons fail, and at most 5% of those by meaning: holds;
    fewer fail by meaning than exactly: with limits; else refuted."""
    exact, meaning = found["failed_exact"], found["failed_by_meaning"]
    good = exact >= 0.3 and meaning <= 0.05
    return Ruling(
        "holds" if good else "holds-with-limits" if meaning < exact else "refuted",
        f"{exact:.0%} fail as strings, {meaning:.0%} by meaning",
        "by less than claimed",
        {"fail as strings": exact, "fail by meaning": meaning},
    )


CLAIMS = (
    Claim(
        id="lost-in-the-middle",
        says="More context is not better: what stands in the middle is used less",
        sources=(ClaimSource("C", "without figures"),),
        trials=(
            ClaimTrial(
                RunEvidence("window_span"),
                window_span.middle,
                examples={
                    "holds": _depths(7.0, 3.0, 7.1),
                    "holds-with-limits": _depths(7.0, 6.8, 7.1),
                    "refuted": _depths(2.0, 5.0, 7.1),
                },
            ),
        ),
    ),
    Claim(
        id="compare-by-meaning",
        says="Test outputs by meaning, not as strings: 30% of a team's snapshot tests broke when a model was updated",
        sources=(ClaimSource("A", "30% of the snapshot tests"),),
        trials=(
            ClaimTrial(
                MissingEvidence(
                    "two versions of one instruction model, and an embedding or judging model to compare by meaning"
                ),
                by_meaning,
                examples={
                    "holds": {"failed_exact": 0.4, "failed_by_meaning": 0.02},
                    "holds-with-limits": {"failed_exact": 0.2, "failed_by_meaning": 0.02},
                    "refuted": {"failed_exact": 0.1, "failed_by_meaning": 0.2},
                },
            ),
        ),
    ),
)
