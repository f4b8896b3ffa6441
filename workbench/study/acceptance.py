"""Acceptance of drafted tokens under vLLM's names, and the speed-up that it should bring."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

StepRecords = Sequence[Mapping]


def acceptance_metrics(verifications: StepRecords, steps: StepRecords) -> dict:
    """Summarize how many drafted tokens were accepted, and where.

    Args:
        verifications: One row a verification of drafts: `drafted` and `accepted` tokens.
        steps: One row a step: `drafted_tokens`, `wall_seconds`, `draft_seconds`.

    Returns:
        `draft_acceptance_rate`: accepted over drafted tokens.
        `mean_acceptance_length`: tokens a verification yields, the token after the accepted ones included.
        `acceptance_by_position`: the fraction of all verifications that accept the first, second, ... drafted token
        (vLLM: num_accepted_tokens_per_pos / num_drafts). A verification without such a token counts as not accepting
        it, so the fractions sum to `mean_acceptance_length` - 1.
        `acceptance_histogram`: verifications that accept 0, 1, 2, ... tokens.
        `chance`: the probability that a token is accepted once all before it are.
        `draft_share`: the fraction of the time of verifying steps spent proposing.
        A value is None where nothing was drafted.
    """
    drafted, accepted = sum(row["drafted"] for row in verifications), sum(row["accepted"] for row in verifications)
    most = max((row["drafted"] for row in verifications), default=0)
    stood = [sum(row["accepted"] > place for row in verifications) for place in range(most)]
    counts = Counter(row["accepted"] for row in verifications)
    tried = accepted + sum(row["accepted"] < row["drafted"] for row in verifications)
    checking = [step for step in steps if step["drafted_tokens"]]
    wall, drafting = (math.fsum(step[name] for step in checking) for name in ("wall_seconds", "draft_seconds"))
    return {
        "checks": len(verifications),
        "drafted_tokens": drafted,
        "accepted_tokens": accepted,
        "draft_acceptance_rate": accepted / drafted if drafted else None,
        "mean_acceptance_length": 1 + accepted / len(verifications) if verifications else None,
        "acceptance_by_position": [stands / len(verifications) for stands in stood],
        "acceptance_histogram": [counts[count] for count in range(most + 1)],
        "chance": accepted / tried if tried else None,
        "draft_share": drafting / wall if wall else None,
    }


def expected_tokens_per_verification(acceptance_probability: float, num_speculative_tokens: int) -> float:
    """Return the mean number of tokens that a verification of `num_speculative_tokens` drafts yields.

    This is (1 - a^(k + 1)) / (1 - a), where each token is accepted with probability a once all before it are (Leviathan
    et al., 2023, equation 1)."""
    return num_speculative_tokens + 1 if acceptance_probability == 1 else (1 - acceptance_probability ** (num_speculative_tokens + 1)) / (1 - acceptance_probability)


def expected_speedup(tokens_per_verification: float, verified_fraction: float, step_cost_ratio: float) -> float:
    """Return the speed-up that speculation should bring.

    Args:
        tokens_per_verification: Mean tokens that a verifying step yields.
        verified_fraction: Fraction of the steps that verify drafts; the others yield one token.
        step_cost_ratio: Time of a step with speculation over its time without.
    """
    return (verified_fraction * tokens_per_verification + 1 - verified_fraction) / step_cost_ratio


def steady_decode_steps(steps: StepRecords, num_requests: int) -> list[Mapping]:
    """Return the steps that only decode for exactly `num_requests` requests, without the first of every uninterrupted
    series.

    The first one is left out because a draft model catches up with the prompts in it."""
    decodes = [step for step in steps if step["phase"] == "decode" and step["requests"] == num_requests]
    return [after for before, after in zip(decodes, decodes[1:], strict=False) if after["step"] == before["step"] + 1]
