"""Figures of `weight_formats.yaml`: the quality of quantized weights.

"95% of full quality" is measured as bits per byte of held-out text: those of full quality divided by those of the
format.
"""

from __future__ import annotations

from workbench.experiment.verdict import VariantRows, variant_row

FORMATS = {"bfloat16": "bfloat16", "int8": "int8", "int4": "int4, groups of 64"}
SPEED = "128"  # tokens of context


def quality(rows: VariantRows) -> dict[str, float]:
    """Return, by format, the bits per byte of held-out text above float32's as a share, float32's over the format's,
    and the tokens a second of decode for a larger shape over those of 16 bits."""
    full, figures = variant_row(rows, "float32")["bits_per_byte"], {}
    dense = variant_row(rows, "bfloat16")["decode_tokens_per_s"][SPEED]
    for name, variant in FORMATS.items():
        row = variant_row(rows, variant)
        figures |= {
            f"{name}_lost": row["bits_per_byte"] / full - 1,
            f"{name}_kept": full / row["bits_per_byte"],
            f"{name}_kl": row["kl_mean"],
            f"{name}_decode_times": row["decode_tokens_per_s"][SPEED] / dense,
        }
    return figures
