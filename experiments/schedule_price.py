"""Figures of `schedule_price.yaml`: the cost of schedule options where no request needs them."""

from __future__ import annotations

from workbench.experiment.verdict import VariantRows, variant_row

RATE = "output_tokens_per_s"
ON = ("fair", "priority", "chunks of 128", "prefix index and host", "everything")


def kept_throughput(rows: VariantRows) -> dict[str, float]:
    """Return the least share of the output tokens a second that an option keeps, and each option's: 32 requests, none
    sharing a prefix, 16 at most at once."""
    nothing = variant_row(rows, "nothing")[RATE]
    kept = {name: variant_row(rows, name)[RATE] / nothing for name in ON}
    return {"least_kept": min(kept.values()), **kept}
