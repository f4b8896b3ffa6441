"""Claims of papers on the tokens that a small cache should keep; not in the introductory texts, but tested here."""

from __future__ import annotations

from experiments import kv_evict
from workbench.claims.claim import (
    Claim,
    ClaimSource,
    ClaimTrial,
    EvidenceNumbers,
    ImpossibleOutcomes,
    JudgeRule,
    OutcomeExamples,
    RunEvidence,
)


def _eviction_rows(bits: dict[str, tuple[float, float]], left: float, pages: float) -> EvidenceNumbers:
    """Return rows of policies with the given bits a byte under both budgets.

    SnapKV keeps `left` of the gain, and `pages` budgets are held.
    """
    seen = {"0.0": {"gain": 5.0, "distance": 900.0}}
    full = {"variant": kv_evict.FULL, "stored_bytes_per_token": 1.0, "kv_tokens": 1000, "bits_per_byte": 0.5}
    rows = [full | {"copying": seen}]
    for place, budget in enumerate(kv_evict.BUDGETS):
        for policy in (*kv_evict.ALWAYS, "SnapKV"):
            kept = {"0.0": {"gain": 5.0 * left, "distance": 900.0}}
            rows.append({"variant": f"{policy} {budget}", "kv_bytes": pages * budget, "copying": kept,
                         "bits_per_byte": bits.get(policy, (1.0, 1.0))[place]})  # fmt: skip
    return rows


BETTER = _eviction_rows({"heavy hitters": (0.6, 0.6), "sinks + recent": (0.8, 0.8)}, 0.9, 1.0)
SOMETIMES = _eviction_rows({"heavy hitters": (0.6, 0.9), "sinks + recent": (0.8, 1.0)}, 0.3, 1.0)
SOMETIMES_HEAVY = _eviction_rows({"heavy hitters": (0.6, 1.0)}, 0.3, 1.0)
NO_BETTER = _eviction_rows({}, 0.0, 3.0)


def _claim(id: str, says: str, *sources: ClaimSource, limits: EvidenceNumbers = SOMETIMES) -> Claim:
    gives: OutcomeExamples = {"holds": BETTER, "holds-with-limits": limits, "refuted": NO_BETTER}
    never: ImpossibleOutcomes = {}
    if id == "kv-evict-bounded":
        gives, never = {"holds": BETTER, "refuted": NO_BETTER}, {"holds-with-limits": "bytes are within it or not"}
    return Claim(id, says, sources, (ClaimTrial(RunEvidence("kv_evict"), JudgeRule(kv_evict.judge, id), gives, never),))


CLAIMS = (
    _claim(
        "kv-evict-bounded",
        "A policy of eviction bounds the cache, whatever the length of the text",
        ClaimSource("H2O, Zhang et al., 2023", "a budget"),
    ),
    _claim(
        "kv-heavy-hitters",
        "At an equal budget, tokens that received most attention are worth more than the newest (H2O)",
        ClaimSource("H2O, Zhang et al., 2023", "without figures"),
        limits=SOMETIMES_HEAVY,
    ),
    _claim(
        "kv-sinks",
        "Keeping a text's first tokens makes a window usable (StreamingLLM)",
        ClaimSource("StreamingLLM, Xiao et al., 2024", "four tokens"),
    ),
    _claim(
        "kv-snapkv",
        "What the prompt's last queries look at is what its answer will need (SnapKV)",
        ClaimSource("SnapKV, Li et al., 2024", "without figures"),
    ),
)
