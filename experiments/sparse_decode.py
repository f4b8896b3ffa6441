"""Judge a sparse mask's decode by the rule of `sparse_decode.yaml`, which was written before the run.

It said "on every backend"; what it means, every backend that runs here, was written into it on 2026-11-28, after the
runs. No outcome changed by it.
Backend triton decodes in its interpreter here, where a time says nothing; it is measured where there is a GPU.
"""

from __future__ import annotations

from workbench.experiment.verdict import Outcome, VariantRows, Verdict, variant_row

BACKENDS = ("eager", "inductor", "mlir")
AS_FAST = 1.0  # of a decode step's time with full attention


def judge(rows: VariantRows) -> list[Verdict]:
    ratios = {name: _step_seconds(rows, f"{name}, sparse") / _step_seconds(rows, f"{name}, full") for name in BACKENDS}
    as_fast = [name for name, ratio in ratios.items() if ratio <= AS_FAST]
    outcome: Outcome = "holds" if len(as_fast) == len(BACKENDS) else "holds-with-limits" if as_fast else "refuted"
    return [
        Verdict(
            claim="sparse-decode",
            says="A mask of the user's own that hides three quarters of 4,096 tokens decodes as fast as full attention",
            rule=(
                "a decode step with the mask takes at most as long as one of full attention in the same run, on every "
                "backend that runs here (eager, inductor, mlir): holds; on some: with limits; on none: refuted"
            ),
            outcome=outcome,
            reason="a step with the mask, of one without: "
            + "; ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items()),
            limits=f"as fast on {', '.join(as_fast)} alone",
            figures={f"of full attention's step, {name}": ratio for name, ratio in ratios.items()},
        )
    ]


def _step_seconds(rows: VariantRows, name: str) -> float:
    (point,) = variant_row(rows, name)["curve"]
    return point["decode_step_s"]
