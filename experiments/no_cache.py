"""Judge decoding without a cache by the rule of `no_cache.yaml`, written before the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.prefill_decode_length import exponents
from workbench.experiment.verdict import Outcome, RuleChange, VariantRows, Verdict, variant_row

AT_MOST, AT_LEAST = 1.1, 0.8  # exponents of the length, of a step with the cache and of one without
APART = 0.5  # by how much the second must be larger
SHORT = 256  # tokens from which on a step without the cache is more than its own overhead
MANY = 10.0  # times as long, at the longest
CHANGED = (
    RuleChange(
        what="the claim reads 'in attention O(n^2)'; before, 'O(n^2) a step'. The rule's figures stayed",
        when="2026-11-21",
        after="no_cache-20261121-170022.json, by which it is refuted under either wording",
        why="the ledger's row says so of attention",
    ),
    RuleChange(
        what=(
            "this run decides; before, a count of query-key pairs stood first, which is 2 and 4 times whatever is "
            "run, and the claim was shown as 'holds' beside a run that refuted it"
        ),
        when="2026-11-22",
        after="the same record",
        why="a count that follows from the definition cannot fail, so it is an illustration",
    ),
)


def judge(rows: VariantRows) -> list[Verdict]:
    """Judge how a decode step's time grows with the text: with a cache slower than in proportion to the text, without a
    cache at least in proportion.
    """
    cached, anew, naive = (variant_row(rows, name)["curve"] for name in ("cache", "no cache", "naive"))
    with_cache, without = _slope(cached, "decode_step_s"), _slope(anew, "decode_step_s")
    times = anew[-1]["decode_step_s"] / cached[-1]["decode_step_s"]
    apart = without - with_cache >= APART and times > 1
    outcome: Outcome = "refuted"
    if with_cache <= AT_MOST and without >= AT_LEAST and apart:
        outcome = "holds" if without > AT_MOST and times >= MANY else "holds-with-limits"
    return [
        Verdict(
            claim="kv-linear-step",
            says="With the cache a decode step is O(n); without it each re-runs the whole text, in attention O(n^2)",
            rule=(
                f"from {SHORT} tokens on a step's time goes with at most the power {AT_MOST} of the length with the "
                f"cache, and without it with a power larger by {APART}, of at least {AT_LEAST}: with limits; it holds "
                f"where that is above {AT_MOST} (the square shows) and the step {MANY:g} times as long at the end; "
                "else refuted"
            ),
            outcome=outcome,
            reason=(
                f"powers {with_cache:.2f} with the cache (predicted {_slope(cached, 'predicted_decode_step_s'):.2f}), "
                f"{without:.2f} without (predicted {_slope(anew, 'predicted_decode_step_s'):.2f}), "
                f"{_slope(naive, 'decode_step_s'):.2f} of the naive loop; at {cached[-1]['prompt_tokens']:,} tokens "
                f"{times:.0f} times as long without, {naive[-1]['decode_step_s'] / cached[-1]['decode_step_s']:.0f} "
                "times as the naive loop; the products of every token, linear, hide the square of attention until "
                "texts are long"
            ),
            limits="up to lengths at which the products of every token hide the square of attention",
            figures={"power of the length, cache": with_cache, "power of the length, no cache": without},
            changed=CHANGED,
        )
    ]


def _slope(points: Sequence[Mapping[str, Any]], key: str) -> float:
    """Return the exponent from `SHORT` tokens to the longest."""
    ends = [next(p for p in points if p["prompt_tokens"] == SHORT), points[-1]]
    return exponents(ends, key)[0][2]
