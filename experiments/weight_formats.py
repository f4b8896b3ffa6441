"""Judge quantized weights by the rule of `weight_formats.yaml`, written before the run.

"95% of full quality" is measured as bits per byte of held-out text: those of full quality divided by those of the
format.
"""

from __future__ import annotations

from typing import Any

from workbench.experiment.verdict import Outcome, VariantRows, Verdict, variant_row

FULL, INT8, INT4 = "bfloat16", "int8", "int4, groups of 64"
W8A8 = "int8, activations int8"  # shown beside INT8; the rule does not ask for it
REFERENCE = "float32"
CLAIMED = 0.95  # of full quality
NEGLIGIBLE, VERY_SMALL = 1e-3, 1e-2  # of the bits a byte
SPEED = "128"  # tokens of context


def judge(rows: VariantRows) -> list[Verdict]:
    bits = {name: variant_row(rows, name)["bits_per_byte"] for name in (REFERENCE, FULL, INT8, INT4)}
    lost = {name: bits[name] / bits[REFERENCE] - 1 for name in bits}
    kept = {name: bits[REFERENCE] / bits[name] for name in (INT8, INT4)}
    levels = lost[FULL] <= NEGLIGIBLE and lost[INT8] <= VERY_SMALL
    outcome: Outcome = "refuted"
    if kept[INT8] >= CLAIMED and levels:
        outcome = "holds" if kept[INT4] >= CLAIMED else "holds-with-limits"
    return [
        Verdict(
            claim="weights-quality",
            says="FP16 negligible loss, INT8 very small, INT4 small: 95% or more of full quality",
            rule=(
                f"bits a byte of held-out text above float32's by at most {NEGLIGIBLE:.1%} (16 bits) and "
                f"{VERY_SMALL:.0%} (INT8), and float32's at least {CLAIMED:.0%} of INT8's and INT4's: holds; all but "
                "the last: with limits; else refuted"
            ),
            outcome=outcome,
            reason=(
                f"bits a byte more: 16 bits {lost[FULL]:+.2%}, INT8 {lost[INT8]:+.2%}, INT4 {lost[INT4]:+.2%}; "
                f"quality kept {kept[INT8]:.1%} and {kept[INT4]:.1%}; others: {_others(rows, bits[REFERENCE])}; KL "
                + ", ".join(f"{name} {variant_row(rows, name)['kl_mean']:.1e}" for name in _shown(rows))
                + f"; decode of a larger shape: {_speeds(rows)}"
            ),
            limits=f"INT4 keeps {kept[INT4]:.1%} of the quality of this small model",
            figures={"quality kept, INT8": kept[INT8], "quality kept, INT4": kept[INT4]},
        )
    ]


def _shown(rows: VariantRows) -> tuple[str, ...]:
    """Return the formats whose KL is reported; records from before INT8 activations have no such variant."""
    there = any(row["variant"] == W8A8 for row in rows)
    return (FULL, INT8, W8A8, INT4) if there else (FULL, INT8, INT4)


def _others(rows: VariantRows, full: float) -> str:
    shares = [f"{row['variant']} {full / row['bits_per_byte']:.1%}" for row in rows
            if row["variant"] not in (REFERENCE, FULL, INT8, INT4)]  # fmt: skip
    return ", ".join(shares) or "none"


def _speeds(rows: VariantRows) -> str:
    """Format the tokens a second as multiples of 16 bits, measured and predicted from the bytes alone."""
    base = variant_row(rows, FULL)

    def rates(row: Any) -> tuple[float, float]:
        return row["decode_tokens_per_s"][SPEED], row["predicted"]["decode_tokens_per_s"][SPEED]

    found = {name: rates(variant_row(rows, name)) for name in (INT8, INT4)}
    measured, predicted = rates(base)
    return ", ".join(f"{name} {rate / measured:.2f} times (predicted {bound / predicted:.2f})"
                     for name, (rate, bound) in found.items())  # fmt: skip
