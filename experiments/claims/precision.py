"""Claims on quantized weights: their size and their quality."""

from __future__ import annotations

from experiments import weight_formats
from workbench.claims.claim import (
    CalculationEvidence,
    Claim,
    ClaimSource,
    ClaimTrial,
    EvidenceNumbers,
    JudgeRule,
    Ruling,
    RunEvidence,
)
from workbench.memory.report import report_for

STATED_GB = {"FP32": 280.0, "FP16": 140.0, "INT8": 70.0, "INT4": 35.0}  # GB
NEAR, SOME = 0.05, 0.2


def sizes(shape: str = "shape:llama-3-70b") -> EvidenceNumbers:
    """Return GB of Llama 3 70B's weights, with scales; embedding and norms stay in 16 bits where matrices are
    quantized.
    """
    formats = {"FP32": ("float32", "dense"), "FP16": ("float16", "dense"), "INT8": ("float16", "int8"),
               "INT4": ("float16", "int4")}  # fmt: skip
    return {
        name: report_for(shape, dtype=dtype, weights=weights)["weight_bytes"] / 1e9
        for name, (dtype, weights) in formats.items()
    }


def weights(found: EvidenceNumbers) -> Ruling:
    """Every format within 5% of the claim: holds; within 20%: with limits; else refuted."""
    off = {name: found[name] / stated - 1 for name, stated in STATED_GB.items()}
    wide = [name for name, each in off.items() if abs(each) > NEAR]
    worst = max(abs(each) for each in off.values())
    return Ruling(
        "holds" if not wide else "holds-with-limits" if worst <= SOME else "refuted",
        ", ".join(f"{name} {size:.1f} GB ({off[name]:+.1%})" for name, size in found.items()),
        f"{' and '.join(wide)}: scales, and an embedding in 16 bits, come on top",
        {f"GB in {name}": size for name, size in found.items()},
    )


def _quality_rows(int8: float, int4: float) -> EvidenceNumbers:
    """Return rows of formats with these shares of float32's quality."""
    shares = {weight_formats.REFERENCE: 1.0, weight_formats.FULL: 1.0, weight_formats.INT8: int8,
              weight_formats.INT4: int4}  # fmt: skip
    speed = {"decode_tokens_per_s": {weight_formats.SPEED: 100.0}}
    rows = []
    for name, kept in shares.items():
        timed = {} if name == weight_formats.REFERENCE else speed | {"predicted": speed}
        rows.append({"variant": name, "bits_per_byte": 1 / kept, "kl_mean": 0.0, **timed})
    return rows


CLAIMS = (
    Claim(
        id="weights-70b",
        says="70B parameters: FP32 280 GB, FP16 140, INT8 70, INT4 35",
        sources=(ClaimSource("B", "280, 140, 70, 35 GB"), ClaimSource("C", "140 GB in FP16")),
        trials=(
            ClaimTrial(
                CalculationEvidence(sizes),
                weights,
                examples={
                    "holds": {"FP32": 281.0, "FP16": 141.0, "INT8": 71.0, "INT4": 36.0},
                    "holds-with-limits": sizes,
                    "refuted": lambda: sizes("shape:llama-2-13b"),
                },
            ),
        ),
    ),
    Claim(
        id="weights-quality",
        says="FP16 negligible loss, INT8 very small, INT4 small: 95% or more of full quality",
        sources=(ClaimSource("B", "95% or more"),),
        trials=(
            ClaimTrial(
                RunEvidence("weight_formats"),
                JudgeRule(weight_formats.judge, "weights-quality"),
                {
                    "holds": _quality_rows(0.999, 0.97),
                    "holds-with-limits": _quality_rows(0.999, 0.8),
                    "refuted": _quality_rows(0.9, 0.5),
                },
            ),
        ),
    ),
)
