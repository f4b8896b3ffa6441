"""What became of drafted tokens, under the names that vLLM has for it, and what that should have bought."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

Rows = Sequence[Mapping]


def acceptance(checks: Rows, steps: Rows) -> dict:
    """`checks` have one row a check (`drafted`, `accepted`), `steps` one a step.

    `draft_acceptance_rate`: accepted of drafted tokens. `mean_acceptance_length`: tokens a check gives, the one after
    the accepted ones included. `acceptance_by_position`: the share of all checks in which the first, second, ...
    drafted token stands, as vLLM has it (num_accepted_tokens_per_pos / num_drafts): in a check that had no such token
    it does not stand, and the shares sum up to mean_acceptance_length - 1. `acceptance_histogram`: checks in which 0,
    1, 2, ... stand. `chance`: that a token stands where all before it do, of all that were tried; `draft_share`: of the
    time of steps that check, what proposing took.
    """
    drafted, accepted = sum(row["drafted"] for row in checks), sum(row["accepted"] for row in checks)
    most = max((row["drafted"] for row in checks), default=0)
    stood = [sum(row["accepted"] > place for row in checks) for place in range(most)]
    counts = Counter(row["accepted"] for row in checks)
    tried = accepted + sum(row["accepted"] < row["drafted"] for row in checks)
    checking = [step for step in steps if step["drafted_tokens"]]
    wall, drafting = (math.fsum(step[name] for step in checking) for name in ("wall_seconds", "draft_seconds"))
    return {
        "checks": len(checks),
        "drafted_tokens": drafted,
        "accepted_tokens": accepted,
        "draft_acceptance_rate": accepted / drafted if drafted else None,
        "mean_acceptance_length": 1 + accepted / len(checks) if checks else None,
        "acceptance_by_position": [stands / len(checks) for stands in stood],
        "acceptance_histogram": [counts[count] for count in range(most + 1)],
        "chance": accepted / tried if tried else None,
        "draft_share": drafting / wall if wall else None,
    }


def tokens_a_check(chance: float, drafted: int) -> float:
    """(1 - a^(k + 1)) / (1 - a): the tokens that a check of k gives on average where each stands with chance a, all
    before it standing (Leviathan et al., 2023, equation 1)."""
    return drafted + 1 if chance == 1 else (1 - chance ** (drafted + 1)) / (1 - chance)


def speed_up(given: float, checked_share: float, cost: float) -> float:
    """What speculation should bring: a check gives `given` tokens, that is the `checked_share` of the steps, the others
    give one, and a step takes `cost` times as long as it does without."""
    return (checked_share * given + 1 - checked_share) / cost


def timed_steps(steps: Rows, requests: int) -> list[Mapping]:
    """Steps that decode for so many requests and do nothing else, without the first of every stretch of them: that one
    catches up with its prompts where a draft model has not seen them."""
    decodes = [step for step in steps if step["phase"] == "decode" and step["requests"] == requests]
    return [after for before, after in zip(decodes, decodes[1:], strict=False) if after["step"] == before["step"] + 1]
