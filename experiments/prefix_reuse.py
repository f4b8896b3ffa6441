"""Verdicts on shared prefixes: the rules of `prefix_reuse.yaml`, written before the run."""

from __future__ import annotations

from workbench.study.verdict import Rows, Verdict, row_of

MOST = 0.8  # the latency that reuse takes away at most, by the claim
SOME = 0.3  # below it nobody would speak of a saving
GAIN, TIMES = 1.5, 6.0  # the throughput: what would be a gain, and what it gives at most, by the claim


def judge(rows: Rows) -> list[Verdict]:
    return [latency(rows), throughput(rows)]


def latency(rows: Rows) -> Verdict:
    computed, reused = row_of(rows, "computed"), row_of(rows, "reused")
    share = reused["ttft_s"] / computed["ttft_s"]
    saved = 1 - share
    same = bool(reused["same_tokens"])
    return Verdict(
        claim="prefix-cache-latency",
        says="Reusing the KV of a shared prefix cuts latency by up to 80%",
        rule=(
            f"TTFT of requests whose first 1,000 of 1,024 tokens stand in the cache, against computing them: at least "
            f"{MOST:.0%} saved: holds (up to); between {SOME:.0%} and {MOST:.0%}: with limits; less: refuted"
        ),
        outcome="holds" if saved >= MOST else "holds-with-limits" if saved >= SOME else "refuted",
        because=(
            f"{computed['ttft_s'] * 1e3:.1f} ms against {reused['ttft_s'] * 1e3:.1f} ms, {share:.2f} of it; "
            f"{reused['cached_tokens']:.0f} tokens from the cache; output {'the same' if same else 'not the same'}"
        ),
        limits=f"{saved:.0%} of the time to the first token, not {MOST:.0%}",
        figures={"share of TTFT saved": saved},
    )


def throughput(rows: Rows) -> Verdict:
    computed, reused = row_of(rows, "computed"), row_of(rows, "reused")
    times = reused["requests_per_s"] / computed["requests_per_s"]
    return Verdict(
        claim="prefix-cache-throughput",
        says="On prefix-heavy traffic a radix tree of prefixes gives up to 6 times the throughput",
        rule=(
            f"requests a second, all at once, none computed before: between {GAIN} and {TIMES:g} times: holds; "
            f"more than {TIMES:g} times: with limits (the bound is too low here); less than {GAIN}: refuted"
        ),
        outcome="refuted" if times < GAIN else "holds" if times <= TIMES else "holds-with-limits",
        because=f"{computed['requests_per_s']:.2f} and {reused['requests_per_s']:.2f} requests/s: {times:.1f} times",
        limits=f"{times:.1f} times: the bound of {TIMES:g} is too low where prompts are nearly all prefix",
        figures={"times the requests a second": times},
    )
