"""Figures of `speculation.yaml`: speculative decoding of the demo pair, and the errors of two common sketches."""

from __future__ import annotations

from functools import cache

from torch import Tensor

from workbench.experiment.verdict import VariantRows, variant_row
from workbench.runs.metrics import expected_tokens_per_verification
from workbench.sampling.enumeration import (
    NextTokenTable,
    TargetRow,
    speculative_distribution,
    target_distribution,
    total_variation,
)
from workbench.sampling.verify import Draft
from workbench.sampling.verify import rejection_sample as engine_rule

# A target over four tokens that knows the last one, and a draft that knows none; in quarters, so that sums are exact.
TARGET: NextTokenTable = {
    (): (0.5, 0.25, 0.25, 0.0), (0,): (0.25, 0.25, 0.25, 0.25), (1,): (0.0, 0.25, 0.75, 0.0),
    (2,): (0.25, 0.0, 0.25, 0.5), (3,): (0.5, 0.5, 0.0, 0.0),
}  # fmt: skip
DRAFT: NextTokenTable = {(): (0.75, 0.25, 0.0, 0.0)}


def faster(rows: VariantRows) -> dict[str, float | str]:
    """Return tokens a second of the better draft length over those without a draft (held-out code, one sequence),
    the least share of greedy outputs that are the same, and how far the engine's acceptance rule, summed over all
    drafts and all ways to judge them, is off the target's distribution (total variation of two tokens). Also the
    prediction, the gain when sampled, the load from which it loses, and the errors of two common sketches."""
    drafts = [variant_row(rows, name) for name in ("draft of 2", "draft of 3")]
    best = max(drafts, key=lambda row: row["speed_up_alone"])
    whole = expected_tokens_per_verification(best["chance"], best["num_speculative_tokens"])
    return {
        "times": best["speed_up_alone"],
        "same_greedy_share": min(row["same_tokens_share"] for row in drafts),
        "rule_is_off_by": off_by("engine"),
        "predicted_times": best["predicted_speed_up"],
        "drafted_tokens": best["num_speculative_tokens"],
        "times_sampled": variant_row(rows, "draft of 3, sampled")["speed_up_alone"],
        "loses_from_load": best["loses_from"] or "none tried",
        "tokens a check": whole,
        "tokens a check, without the bonus token": whole - best["chance"] ** best["num_speculative_tokens"],
        "off by, if the draft's probabilities are ignored": off_by("ignores the draft"),
        "off by, if an index is one off": off_by("one off"),
    }


def accepted(rows: VariantRows) -> dict[str, float]:
    """Return the chance that a drafted token stands, sampled, on the half of the texts that take the target fewer bits
    a token and on the other; their difference; and the bits. The level is the pair's, not the text's alone."""
    halves = variant_row(rows, "draft of 3, sampled")["by_text"]
    plain, odd = (halves[half]["chance"] for half in ("predictable", "unusual"))
    bits = {f"bits a token, {half}": halves[half]["bits_a_token"] for half in ("predictable", "unusual")}
    return {"accepted_predictable": plain, "accepted_unusual": odd, "difference": plain - odd, **bits}


def ignores_draft(draft: Draft, target: TargetRow, uniforms: list[float]) -> tuple[int, Tensor]:
    """Apply a common sketch of verification without draft probabilities: accept a token with the target's own
    probability, else sample from the target.
    """
    standing, left = engine_rule(Draft(draft.token_ids), target, uniforms)
    return standing, left if standing == len(draft) else target(standing)


def one_off(draft: Draft, target: TargetRow, uniforms: list[float]) -> tuple[int, Tensor]:
    """Apply a sketch of verification with an index that is off by one: judge each token by the target's row after
    it."""
    return engine_rule(draft, lambda place: target(min(place + 1, len(draft))), uniforms)


RULES = {"engine": engine_rule, "ignores the draft": ignores_draft, "one off": one_off}


@cache
def off_by(name: str) -> float:
    """Return the total variation between the target's distribution of two tokens and that of a verification rule that
    drafts one of them."""
    return total_variation(speculative_distribution(TARGET, DRAFT, 1, RULES[name]), target_distribution(TARGET, 2))
