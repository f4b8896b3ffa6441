"""Judge the tail of queueing time by the rule of `queue_tail.yaml`, written before the run.

Traffic is as recorded (lengths fitted to Azure's and Mooncake's hours, Poisson arrivals): no request is put behind a
long prompt by hand. Azure's prompts end at 7,437 tokens, Mooncake's at about 128,000, so that only Mooncake's traffic
has many long prompts, the cause that the claim names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from workbench.experiment.verdict import RuleChange, VariantRows, Verdict, variant_row

TRAFFICS = ("Azure", "Mooncake")
SPIKE, FINE = 5.0, 2.0  # times the lightest load's: of p99, and of a median that looks fine
MEDIAN, TAIL = "short_ttft_s_p50", "short_ttft_s_p99"
CHANGED = (
    RuleChange(
        what=(
            "two other runs were withdrawn as tests of this claim: chunked_prefill.yaml, which puts one short request "
            "of five right behind a long prompt, and disaggregation.yaml, whose rule took the best of all loads, had "
            "been changed after a first run and hung on the number of requests"
        ),
        when="2026-11-22",
        after="chunked_prefill-20261121-161521.json and disaggregation-20261121-170220.json, both 'holds'",
        why="the first workload forces the outcome; this rule and its traffic were written down before they were run",
    ),
)


def judge(rows: VariantRows) -> list[Verdict]:
    """Judge p99 TTFT at the highest load at which the median is still fine."""
    found = {name: _spread(variant_row(rows, name)["curve"]) for name in TRAFFICS}
    so = [name for name, (_, tail, _) in found.items() if tail >= SPIKE]
    others = [name for name in TRAFFICS if name not in so]
    return [
        Verdict(
            claim="queue-p99",
            says="A short request can wait behind a long prefill; p99 TTFT spikes while the median looks fine",
            rule=(
                f"prompts of up to 2,048 tokens among all, computed whole, first come first served: at the highest "
                f"load up to which their median TTFT stays within {FINE:g} times the lightest load's, their p99 is at "
                f"least {SPIKE:g} times the lightest load's: in Azure's and in Mooncake's traffic: holds; in one of "
                "them: with limits; in neither: refuted"
            ),
            outcome="refuted" if not so else "holds-with-limits" if others else "holds",
            reason="; ".join(
                f"{name}: up to {load:g} requests/s{_highest(rows, name, load)} the median grows {median:.1f} times, "
                f"p99 {tail:.1f} times"
                for name, (load, tail, median) in found.items()
            ),
            limits=f"in {', '.join(so)}'s traffic, not in {', '.join(others)}'s",
            figures={f"times p99 TTFT, {name}": tail for name, (_, tail, _) in found.items()},
            changed=CHANGED,
        )
    ]


def _highest(rows: VariantRows, name: str, load: float) -> str:
    return ", the most that was tried," if load == variant_row(rows, name)["curve"][-1]["value"] else ""


def _spread(curve: Sequence[Mapping[str, Any]]) -> tuple[float, float, float]:
    """Return the highest load with a fine median, and the growth of p99 and median there."""
    first = last = curve[0]
    for point in curve:
        if point[MEDIAN] > FINE * first[MEDIAN]:
            break
        last = point
    return float(last["value"]), last[TAIL] / first[TAIL], last[MEDIAN] / first[MEDIAN]
