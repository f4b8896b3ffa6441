"""Figures of `chunked_prefill.yaml`: how long decodes wait for a long prompt, computed whole or in chunks.

Until 2026-11-22 p99 TTFT of the short requests was judged too. One of five arrives right behind the long prompt, by
construction: p99 is that one's and the median another's whatever the engine does, so that was no test.
"""

from __future__ import annotations

from workbench.experiment.verdict import VariantRows, variant_row

UNDISTURBED, WHOLE = "a short one arrives", "whole"
CHUNKED = ("chunks of 256", "chunks of 128")
GAP = "longest_gap_s"


def chunks(rows: VariantRows) -> dict[str, float]:
    """Return the longest gap between tokens of 4 decoding requests when a prompt of 2,000 tokens arrives: computed
    whole over the better of chunks of 256 and 128. Also the gaps, TTFT and total times in seconds."""
    whole = variant_row(rows, WHOLE)
    cut = min((variant_row(rows, name) for name in CHUNKED), key=lambda row: row[GAP])
    return {
        "gap_times": whole[GAP] / cut[GAP],
        "gap_s_whole": whole[GAP],
        "gap_s_chunks": cut[GAP],
        "gap_s_no_long_prompt": variant_row(rows, UNDISTURBED)[GAP],
        "ttft_times_chunks": cut["ttft_s"] / whole["ttft_s"],
        "total_times_chunks": cut["seconds"] / whole["seconds"],
    }
