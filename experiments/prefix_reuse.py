"""Judge shared prefixes by the rules of `prefix_reuse.yaml`; since 2026-11-22 both use the same measure (`CHANGED`)."""

from __future__ import annotations

from workbench.experiment.verdict import Outcome, RuleChange, VariantRows, Verdict, variant_row

LATENCY, THROUGHPUT = 5.0, 6.0  # times: "up to 80%" less time is 5 times as quick
GAIN, NEAR = 1.5, 0.5  # times that would be a gain; share of the bound from which on "up to" is fair
CHANGED = (
    RuleChange(
        what=(
            "latency and throughput are judged alike, in times and against the stated bound: with limits where "
            "the bound is passed or not half reached. Before, 85% of the latency saved counted as 'up to 80%', and "
            "more than 6 times the throughput did not count as 'up to 6 times'"
        ),
        when="2026-11-22",
        after="prefix_reuse-20261121-135414.json",
        why="two sentences of one form were judged by two rules; the latency's verdict changes by it",
    ),
)


def judge(rows: VariantRows) -> list[Verdict]:
    return [latency(rows), throughput(rows)]


def latency(rows: VariantRows) -> Verdict:
    computed, reused = variant_row(rows, "computed"), variant_row(rows, "reused")
    times = computed["ttft_s"] / reused["ttft_s"]
    same = bool(reused["same_tokens"])
    return Verdict(
        claim="prefix-cache-latency",
        says="Reusing the KV of a shared prefix cuts latency by up to 80%",
        rule=(
            "TTFT of requests whose first 1,000 of 1,024 tokens stand in the cache, against computing them; 80% less "
            f"is {LATENCY:g} times as quick. {_words(LATENCY)}"
        ),
        outcome=_outcome(times, LATENCY),
        reason=(
            f"{computed['ttft_s'] * 1e3:.1f} ms against {reused['ttft_s'] * 1e3:.1f} ms, {times:.1f} times as quick "
            f"({1 - 1 / times:.0%} saved); {reused['cached_tokens']:.0f} tokens from the cache; output "
            f"{'the same' if same else 'not the same'}"
        ),
        limits=_limits(times, LATENCY),
        figures={"share of TTFT saved": 1 - 1 / times, "times as quick": times},
        changed=CHANGED,
    )


def throughput(rows: VariantRows) -> Verdict:
    computed, reused = variant_row(rows, "computed"), variant_row(rows, "reused")
    times = reused["requests_per_s"] / computed["requests_per_s"]
    return Verdict(
        claim="prefix-cache-throughput",
        says="On prefix-heavy traffic a radix tree of prefixes gives up to 6 times the throughput",
        rule=f"requests a second, all at once, none computed before. {_words(THROUGHPUT)}",
        outcome=_outcome(times, THROUGHPUT),
        reason=f"{computed['requests_per_s']:.2f} and {reused['requests_per_s']:.2f} requests/s: {times:.1f} times",
        limits=_limits(times, THROUGHPUT),
        figures={"times the requests a second": times},
        changed=CHANGED,
    )


def _words(bound: float) -> str:
    return (
        f"From half of the bound to the bound ({NEAR * bound:g} to {bound:g} times): holds; more (the bound is too "
        f"low), or {GAIN:g} times at least: with limits; less: refuted"
    )


def _outcome(times: float, bound: float) -> Outcome:
    if times < GAIN:
        return "refuted"
    return "holds" if NEAR * bound <= times <= bound else "holds-with-limits"


def _limits(times: float, bound: float) -> str:
    if times > bound:
        return f"{times:.1f} times: the bound of {bound:g} is too low where prompts are nearly all prefix"
    return f"{times:.1f} times here, far below {bound:g}"
