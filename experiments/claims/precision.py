"""Figures of a claim on the size of quantized weights."""

from __future__ import annotations

from workbench.memory.report import report_for

STATED_GB = {"FP32": 280.0, "FP16": 140.0, "INT8": 70.0, "INT4": 35.0}  # GB
FORMATS = {"FP32": ("float32", "dense"), "FP16": ("float16", "dense"), "INT8": ("float16", "int8"),
           "INT4": ("float16", "int4")}  # fmt: skip


def sizes(shape: str = "shape:llama-3-70b") -> dict[str, float]:
    """Return how far the weights of Llama 3 70B are off the stated GB, at most, and their GB by format, with scales;
    embedding and norms stay in 16 bits where matrices are quantized."""
    found = {
        name: report_for(shape, dtype=dtype, weights=weights)["weight_bytes"] / 1e9
        for name, (dtype, weights) in FORMATS.items()
    }
    off = max(abs(found[name] / stated - 1) for name, stated in STATED_GB.items())
    return {"largest_deviation": off} | {f"GB in {name}": size for name, size in found.items()}
