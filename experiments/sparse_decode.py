"""Figures of `sparse_decode.yaml`: a decode step with a sparse mask, on every backend that runs here.

The rule said "on every backend"; what it means, every backend that runs here, was written into it on 2026-11-28, after
the runs. No outcome changed by it. Backend triton decodes in its interpreter here, where a time says nothing; it is
measured where there is a GPU.
"""

from __future__ import annotations

from workbench.experiment.verdict import VariantRows, variant_row

BACKENDS = ("eager", "inductor", "mlir")


def sparse_over_full(rows: VariantRows) -> dict[str, float]:
    """Return a decode step's time with the mask over that with full attention, by backend."""
    return {name: _step_seconds(rows, f"{name}, sparse") / _step_seconds(rows, f"{name}, full") for name in BACKENDS}


def _step_seconds(rows: VariantRows, name: str) -> float:
    (point,) = variant_row(rows, name)["curve"]
    return point["decode_step_s"]
