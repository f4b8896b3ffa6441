"""Verdicts on long prefills in the way of others: the rules of `disaggregation.yaml`, written before the run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workbench.study.verdict import Rows, Verdict, row_of

STALL, SOME = 3.0, 1.2  # times as long a gap
SPIKE, FINE = 5.0, 2.0  # times the latency of the lightest load: p99, and the median that looks fine
KEPT = 0.9  # share of requests that get what was promised
GAP = "longest_gap_s_p99"
WHOLE, CHUNKED = "whole prompts", "chunks of 512"
SPLIT = ("4 for prompts and 4", "5 for prompts and 3")


def judge(rows: Rows) -> list[Verdict]:
    return [chunks(rows), separate(rows), queue(rows)]


def chunks(rows: Rows) -> Verdict:
    whole, cut = row_of(rows, WHOLE), row_of(rows, CHUNKED)
    times = whole[GAP] / cut[GAP]
    return Verdict(
        claim="chunked-prefill",
        says="Splitting long prompts and mixing the chunks with decode steps keeps other requests from stalling",
        rule=(
            f"p99 over requests of the longest gap between tokens, prompts computed whole over chunks of 512: at least "
            f"{STALL:g} times: holds; {SOME:g}: with limits; less: refuted"
        ),
        outcome="holds" if times >= STALL else "holds-with-limits" if times >= SOME else "refuted",
        because=(
            f"{_ms(whole, GAP)} against {_ms(cut, GAP)}: {times:.1f} times; TTFT p50 {_ms(whole, 'ttft_s_p50')} "
            f"against {_ms(cut, 'ttft_s_p50')}"
        ),
        limits=f"the longest gap is {times:.1f} times shorter, not {STALL:g}",
        figures={"times the longest gap, prompts computed whole": times},
    )


def separate(rows: Rows) -> Verdict:
    """Interference is what decodes wait for besides their own steps; separate pools are worth it if they serve more."""
    whole, cut = row_of(rows, WHOLE), row_of(rows, CHUNKED)
    split = max((row_of(rows, name) for name in SPLIT), key=served)
    times = whole[GAP] / split[GAP]
    worth = served(split) >= max(served(whole), served(cut))
    return Verdict(
        claim="pd-disaggregation",
        says="Separate pools for prefill and decode remove that interference",
        rule=(
            f"the longest gap as above, one pool with whole prompts over separate pools: at least {STALL:g} times, and "
            f"the load at which {KEPT:.0%} get what was promised no lower than with one pool of as many instances, "
            "chunked or not: holds; the gap alone: with limits; else refuted"
        ),
        outcome="refuted" if times < STALL else "holds" if worth else "holds-with-limits",
        because=(
            f"{_ms(whole, GAP)} against {_ms(split, GAP)} with {split['variant']}: {times:.1f} times; "
            f"{KEPT:.0%} kept up to {served(split):g} requests/s, against {served(whole):g} with whole prompts and "
            f"{served(cut):g} with chunks of 512 in one pool of 8"
        ),
        limits="decodes do not wait, but one pool of as many instances serves a higher load as promised",
        figures={"times the longest gap, one pool": times, "requests/s, separate pools": served(split)},
    )


def queue(rows: Rows) -> Verdict:
    median_of, tail_of = "short_ttft_s_p50", "short_ttft_s_p99"
    curve = row_of(rows, WHOLE)["curve"]
    first = curve[0]
    worst = max((p for p in curve if p[median_of] <= FINE * first[median_of]), key=lambda point: point[tail_of])
    times, median = (worst[name] / first[name] for name in (tail_of, median_of))
    apart = times / median
    return Verdict(
        claim="queue-p99",
        says="A short request can wait behind a long prefill; p99 TTFT spikes while the median looks fine",
        rule=(
            f"prompts of up to 2,048 tokens among others, all computed whole, first come first served: at some load "
            f"their p99 TTFT is at least {SPIKE:g} times that of the lightest load and their median at most {FINE:g} "
            f"times: holds; p99 grows {FINE:g} times as much as the median: with limits; else refuted"
        ),
        outcome="holds" if times >= SPIKE else "holds-with-limits" if apart >= FINE else "refuted",
        because=(
            f"from {first['value']:g} to {worst['value']:g} requests/s p99 grows {times:.1f} times to "
            f"{_ms(worst, tail_of)}, the median {median:.1f} times to {_ms(worst, median_of)}"
        ),
        limits=f"the tail grows {apart:.1f} times as much as the median, not to {SPIKE:g} times",
        figures={"times p99 TTFT": times, "times median TTFT": median},
    )


def served(row: Mapping[str, Any]) -> float:
    """The highest of the loads up to which all are served as promised; 0 where not even the lightest is."""
    most = 0.0
    for point in row["curve"]:
        if point["goodput_share"] < KEPT:
            break
        most = float(point["value"])
    return most


def _ms(row: Mapping[str, Any], name: str) -> str:
    return f"{row[name] * 1e3:.0f} ms"
