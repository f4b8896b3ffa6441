"""Judge prefix-aware routing by the rule of `routing.yaml`; its workload was changed once (`CHANGED`)."""

from __future__ import annotations

from workbench.experiment.verdict import RuleChange, VariantRows, Verdict, variant_row

DRAMATIC, SOME = 2.0, 1.2  # times as long until the first token
CHANGED = (
    RuleChange(
        what="pages of 512 tokens instead of 256, 1,000 requests instead of 2,000; the rule's figures stayed",
        when="2026-11-21",
        after="first runs, which were not kept; whether their figures had been seen is not written down",
        why="Mooncake's blocks have 512 tokens; the run should take less time",
    ),
)


def judge(rows: VariantRows) -> list[Verdict]:
    blind, aware, sticky = (variant_row(rows, name) for name in ("least loaded", "prefix aware", "session sticky"))
    median, tail = (blind[name] / aware[name] for name in ("ttft_s_p50", "ttft_s_p99"))
    least = min(median, tail)
    return [
        Verdict(
            claim="prefix-routing",
            says="Sending a conversation to the instance that holds its prefix changes latency dramatically",
            rule=(
                f"TTFT where the least loaded instance is taken, over that where the prefix decides: at least "
                f"{DRAMATIC:g} times in the median and at p99: holds; in one of them, or {SOME:g} times in both: with "
                "limits; else refuted"
            ),
            outcome=(
                "holds"
                if least >= DRAMATIC
                else "holds-with-limits"
                if max(median, tail) >= DRAMATIC or least >= SOME
                else "refuted"
            ),  # fmt: skip
            reason=(
                f"p50 {blind['ttft_s_p50'] * 1e3:.0f} ms against {aware['ttft_s_p50'] * 1e3:.0f} ({median:.2f} times), "
                f"p99 {blind['ttft_s_p99'] * 1e3:.0f} against {aware['ttft_s_p99'] * 1e3:.0f} ({tail:.2f} times); "
                f"{blind['cache_hit_rate']:.1%} of prompt tokens from the cache against {aware['cache_hit_rate']:.1%}; "
                f"bound to its instance whatever the load: p99 {sticky['ttft_s_p99'] * 1e3:.0f} ms with "
                f"{sticky['cache_hit_rate']:.1%} (Mooncake's conversations)"
            ),
            limits=f"{median:.2f} times in the median, {tail:.2f} times at p99",
            figures={"times TTFT p50, blind": median, "times TTFT p99, blind": tail},
            changed=CHANGED,
        )
    ]
