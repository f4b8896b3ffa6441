"""Judge `agent.yaml`: whether a later round of an agent computes only its new tokens, and has a lower TTFT for it."""

from __future__ import annotations

from workbench.experiment.verdict import Outcome, VariantRows, Verdict, variant_row

SHARE, SOME = 0.5, 0.8  # of the prompt tokens that are computed without the cache; of the cold start's TTFT


def judge(rows: VariantRows) -> list[Verdict]:
    kept, computed = variant_row(rows, "kept"), variant_row(rows, "computed")
    share = kept["computed_tokens_per_question"] / computed["computed_tokens_per_question"]
    wait = kept["later_ttft_s"] / kept["later_cold_ttft_s"]
    without = computed["later_ttft_s"] / computed["later_cold_ttft_s"]
    outcome: Outcome = "refuted"
    if share <= SOME and wait <= SOME:
        outcome = "holds" if share <= SHARE and wait <= SHARE else "holds-with-limits"
    return [
        Verdict(
            claim="agent-rounds-warm",
            says="A later round of an agent computes only what is new of its prompt, and its first token comes sooner",
            rule=(
                f"prompt tokens computed in all rounds with the prefix cache against without, and TTFT of later rounds "
                f"against a cold start of the same requests: both at most {SHARE:.0%}: holds; both at most {SOME:.0%}: "
                "with limits; else refuted"
            ),
            outcome=outcome,
            reason=(
                f"{kept['computed_tokens_per_question']:.0f} of {computed['computed_tokens_per_question']:.0f} prompt "
                f"tokens a question ({share:.0%}); TTFT of later rounds {kept['later_ttft_s'] * 1e3:.1f} ms against "
                f"{kept['later_cold_ttft_s'] * 1e3:.1f} ms ({wait:.0%}); without the cache {without:.0%}"
            ),
            limits=f"{share:.0%} of the tokens and {wait:.0%} of the wait, on prompts of demo-chat's length",
            figures={"share of tokens computed": share, "share of TTFT": wait},
        )
    ]
