"""Judge the cost of schedule options by the rule of `schedule_price.yaml`, written before the run."""

from __future__ import annotations

from workbench.experiment.verdict import VariantRows, Verdict, variant_row

KEEPS, KEEPS_WITH_LIMITS = 0.95, 0.85  # of the tokens a second
RATE = "output_tokens_per_s"
ON = ("fair", "priority", "chunks of 128", "prefix index and host", "everything")


def judge(rows: VariantRows) -> list[Verdict]:
    nothing = variant_row(rows, "nothing")[RATE]
    kept = {name: variant_row(rows, name)[RATE] / nothing for name in ON}
    least = min(kept.values())
    return [
        Verdict(
            claim="schedule-options-free",
            says="Policies, chunks, a prefix index and a CPU pool cost no throughput where no request needs them",
            rule=(
                f"32 requests, none sharing a prefix, 16 at most at once: each option, and all together, keep "
                f"{KEEPS:.0%} of the output tokens a second: holds; {KEEPS_WITH_LIMITS:.0%}: with limits; less: refuted"
            ),
            outcome="holds" if least >= KEEPS else "holds-with-limits" if least >= KEEPS_WITH_LIMITS else "refuted",
            reason=(
                f"{nothing:,.0f} tokens/s with nothing; "
                + ", ".join(f"{name} {share:.2f}" for name, share in kept.items())
            ),
            limits=f"{min(kept, key=lambda name: kept[name])} keeps {least:.0%} of the throughput",
            figures={f"share kept, {name}": share for name, share in kept.items()},
        )
    ]
