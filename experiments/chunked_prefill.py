"""Verdicts on a long prompt in the way of others: the rules of `chunked_prefill.yaml`, written before the run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.study.verdict import Rows, Verdict, row_of

STALL, SOME = 3.0, 1.2  # times as long a gap
SPIKE, FINE = 5.0, 2.0  # times the TTFT without a long prompt: of the p99, and of the median that looks fine
UNDISTURBED, WHOLE = "a short one arrives", "whole"
CHUNKED = ("chunks of 256", "chunks of 128")
GAP = "longest_gap_s"


def judge(rows: Rows) -> list[Verdict]:
    return [chunks(rows), queue(rows)]


def chunks(rows: Rows) -> Verdict:
    """The better of the sizes counts; the price of both is told."""
    without, whole = row_of(rows, UNDISTURBED), row_of(rows, WHOLE)
    cut = min((row_of(rows, name) for name in CHUNKED), key=lambda row: row[GAP])
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
        because=(
            f"{_ms(whole, GAP)} against {_ms(cut, GAP)} with {cut['variant']}: {times:.1f} times "
            f"({_ms(without, GAP)} where no long prompt comes); "
            + "; ".join(f"{row['variant']}: {_price(row)}" for row in (whole, *(row_of(rows, n) for n in CHUNKED)))
        ),
        limits=f"the longest gap is {times:.1f} times shorter, not {STALL:g}",
        figures={"times the longest gap, prompt computed whole": times},
    )


def queue(rows: Rows) -> Verdict:
    without, whole = row_of(rows, UNDISTURBED), row_of(rows, WHOLE)
    tail, median = (whole[f"short_ttft_s_{q}"] / without[f"short_ttft_s_{q}"] for q in ("p99", "p50"))
    return Verdict(
        claim="queue-p99",
        says="A short request can wait behind a long prefill; p99 TTFT spikes while the median looks fine",
        rule=(
            f"one short request in five comes right behind a prompt of 2,000 tokens computed whole: against the same "
            f"behind a short one, p99 TTFT of the short ones is at least {SPIKE:g} times and their median at most "
            f"{FINE:g} times: holds; p99 grows {FINE:g} times as much as the median: with limits; else refuted. How "
            "it grows with load is asked by disaggregation.yaml"
        ),
        outcome=(
            "holds" if tail >= SPIKE and median <= FINE else "holds-with-limits" if tail >= FINE * median else "refuted"
        ),
        because=(
            f"p99 {_ms(without, 'short_ttft_s_p99')} and {_ms(whole, 'short_ttft_s_p99')}, {tail:.1f} times; median "
            f"{_ms(without, 'short_ttft_s_p50')} and {_ms(whole, 'short_ttft_s_p50')}, {median:.2f} times"
        ),
        limits=f"the tail grows {tail:.1f} times, the median {median:.1f} times",
        figures={"times p99 TTFT": tail, "times median TTFT": median},
    )


def _price(row: Mapping[str, Any]) -> str:
    return f"TTFT {_ms(row, 'ttft_s')}, of the one behind {_ms(row, 'behind_ttft_s')}, all in {row['seconds']:.2f} s"


def _ms(row: Mapping[str, Any], name: str) -> str:
    return f"{row[name] * 1e3:.0f} ms"
