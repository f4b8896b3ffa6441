"""Judge chunked prefill by the rule of `chunked_prefill.yaml`, written before the run.

Until 2026-11-22 it also judged p99 TTFT of the short requests. One of five arrives right behind the long prompt, by
construction: p99 is that one's and the median another's whatever the engine does, so that was no test.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.experiment.verdict import VariantRows, Verdict, variant_row

STALL, SOME = 3.0, 1.2  # times as long a gap
UNDISTURBED, WHOLE = "a short one arrives", "whole"
CHUNKED = ("chunks of 256", "chunks of 128")
GAP = "longest_gap_s"


def judge(rows: VariantRows) -> list[Verdict]:
    return [chunks(rows)]


def chunks(rows: VariantRows) -> Verdict:
    """Judge the chunk size with the shorter gap between tokens, and state the cost of both sizes."""
    without, whole = variant_row(rows, UNDISTURBED), variant_row(rows, WHOLE)
    cut = min((variant_row(rows, name) for name in CHUNKED), key=lambda row: row[GAP])
    times = whole[GAP] / cut[GAP]
    return Verdict(
        claim="chunked-prefill",
        says="Splitting long prompts and mixing the chunks with decode steps keeps other requests from stalling",
        rule=(
            f"4 requests decode, a prompt of 2,000 tokens arrives: their longest gap between tokens, prompt computed "
            f"whole over the better of chunks of 256 and 128, at least {STALL:g} times: holds; {SOME:g}: with limits; "
            "less: refuted"
        ),
        outcome="holds" if times >= STALL else "holds-with-limits" if times >= SOME else "refuted",
        reason=(
            f"{ms(whole, GAP)} against {ms(cut, GAP)} with {cut['variant']}: {times:.1f} times "
            f"({ms(without, GAP)} where no long prompt comes); "
            + "; ".join(f"{row['variant']}: {_price(row)}" for row in (whole, *(variant_row(rows, n) for n in CHUNKED)))
        ),
        limits=f"the longest gap is {times:.1f} times shorter, not {STALL:g}",
        figures={"times the longest gap, prompt computed whole": times},
    )


def _price(row: Mapping[str, Any]) -> str:
    return f"TTFT {ms(row, 'ttft_s')}, of the one behind {ms(row, 'behind_ttft_s')}, all in {row['seconds']:.2f} s"


def ms(row: Mapping[str, Any], name: str) -> str:
    return f"{row[name] * 1e3:.0f} ms"
