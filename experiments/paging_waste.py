"""Judge pages against reserved memory by the rule of `paging_waste.yaml`, written before the run."""

from __future__ import annotations

from workbench.experiment.verdict import VariantRows, Verdict, variant_row

WASTE, SOME_WASTE = 0.04, 0.15  # of the pages in use; the first is the figure of vLLM's paper (2023)
TIMES, SOME_TIMES = 2.0, 1.2  # as many sequences in the same memory


def judge(rows: VariantRows) -> list[Verdict]:
    whole, pages = variant_row(rows, "the longest text reserved"), variant_row(rows, "pages of 16")
    times = pages["sequences_mean"] / whole["sequences_mean"]
    waste, before = pages["cache_waste"], whole["cache_waste"]
    faster = pages["output_tokens_per_s"] / whole["output_tokens_per_s"]
    holds = waste <= WASTE and times >= TIMES
    some = waste <= SOME_WASTE and times >= SOME_TIMES
    return [
        Verdict(
            claim="kv-paged",
            says="Fixed-size pages behind a page table end fragmentation and pack more requests into the same memory",
            rule=(
                f"at most {WASTE:.0%} of the pages of 16 in use lies empty and at least {TIMES:g} times as many "
                f"sequences run as where each reserves the longest text: holds; {SOME_WASTE:.0%} and {SOME_TIMES:g} "
                "times: with limits; else refuted"
            ),
            outcome="holds" if holds else "holds-with-limits" if some else "refuted",
            reason=(
                f"{before:.1%} empty against {waste:.1%}; {whole['sequences_mean']:.0f} against "
                f"{pages['sequences_mean']:.0f} sequences at once ({times:.1f} times); {faster:.1f} times the tokens "
                "a second (Azure's lengths, Llama 3.1 8B on a simulated H100)"
            ),
            limits=f"{waste:.1%} of the pages in use lies empty, {times:.1f} times as many sequences run",
            figures={"empty share, pages of 16": waste, "empty share, reserved": before, "times the sequences": times},
        )
    ]
