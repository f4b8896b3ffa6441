"""Claims on serving: batches, queues, prefill interference, pools, prefixes, drafts."""

from __future__ import annotations

from typing import Any

from experiments import (
    apart,
    batch_size,
    batching,
    chunked_prefill,
    determinism,
    disaggregation,
    fleet_prediction,
    prefix_reuse,
    queue_tail,
    routing,
    schedule_price,
    speculation,
)
from experiments.claims.streams import crowds
from workbench.claims.claim import (
    Claim,
    ClaimSource,
    ClaimTrial,
    EvidenceNumbers,
    JudgeRule,
    OutcomeExamples,
    RunEvidence,
)
from workbench.experiment.verdict import Outcome


def _batches(*rates: float) -> EvidenceNumbers:
    """Return rows of batches with these tokens a second: static, padded, then one at a time to sixteen."""
    names = ("static", "padded", *batching.SIZES.values())
    return [
        {"variant": name, batching.RATE: rate, batching.SERVICE: 0.01 * (1 + rate / 1000), "ttft_s_p50": 1 / rate,
         "ttft_s_p99": 2 / rate, "e2el_s_p50": 3 / rate}
        for name, rate in zip(names, rates, strict=True)
    ]  # fmt: skip


GROWING = _batches(100, 80, 100, 190, 350, 600, 900)
STANDING = _batches(900, 900, 900, 900, 900, 900, 800)
HALTING = _batches(700, 500, 300, 200, 350, 600, 900)  # one doubling loses, and static batches are nearly as quick
BATCHES: OutcomeExamples = {"holds": GROWING, "holds-with-limits": HALTING, "refuted": STANDING}


def _interference_rows(gap: float) -> EvidenceNumbers:
    """Return rows in which a whole prompt makes the longest gap `gap` times as long."""
    rows: list[dict[str, Any]] = []
    for name in (chunked_prefill.UNDISTURBED, chunked_prefill.WHOLE, *chunked_prefill.CHUNKED):
        longest = 0.1 * (gap if name == chunked_prefill.WHOLE else 1)
        rows.append({"variant": name, "longest_gap_s": longest, "ttft_s": 0.5, "behind_ttft_s": 0.5, "seconds": 2.0})
    return rows


def _pools(gap: float, served: int = 2) -> EvidenceNumbers:
    """Return rows of fleets: whole prompts make the longest gap `gap` times as long.

    Separate pools meet the SLO at `served` of two loads, one pool at both.
    """
    rows = []
    for name in (disaggregation.WHOLE, disaggregation.CHUNKED, *disaggregation.SPLIT):
        loads = served if name in disaggregation.SPLIT else 2
        points = [{"value": rate, "slo_attainment": 1.0 if n <= loads else 0.5} for n, rate in enumerate((4, 8), 1)]
        longest = gap if name == disaggregation.WHOLE else 1.0
        rows.append({"variant": name, disaggregation.GAP: longest, "ttft_s_p50": 0.1, "curve": points})
    return rows


def _engines_apart(gap: float, kept: float, chunks: float = 1.0) -> EvidenceNumbers:
    """Return rows of two engines: whole prompts make the longest gap `gap` times that of two pools, and chunks `chunks`
    times; two pools have `kept` of all requests within the SLO, and one pool 0.9."""
    names = {apart.WHOLE: (gap, 0.9), apart.CHUNKS: (chunks, 0.9), apart.SHARED: (1.0, kept)}
    figures = {name: {apart.GAP: 0.1 * times, "slo_attainment": share} for name, (times, share) in names.items()}
    return [{"variant": name, **row, "prediction": row} for name, row in figures.items()]


def _predicted(*times: float) -> EvidenceNumbers:
    """Return rows of two fleets whose predicted figures are so many times the measured ones."""
    measured = dict.fromkeys(fleet_prediction.JUDGED, 0.1)
    return [{"variant": name, **measured, "prediction": {key: 0.1 * each for key in measured}}
            for name, each in zip(("two replicas", "two pools"), times, strict=True)]  # fmt: skip


def _tails(*tails: float) -> EvidenceNumbers:
    """Return rows of traffics whose p99 TTFT grows so many times while the median grows by half."""
    rows = []
    for name, tail in zip(queue_tail.TRAFFICS, tails, strict=True):
        points = [{"value": load, queue_tail.MEDIAN: 0.1 * median, queue_tail.TAIL: 0.5 * times}
                  for load, median, times in ((1, 1.0, 1.0), (8, 1.5, tail), (16, 9.0, 50.0))]  # fmt: skip
        rows.append({"variant": name, "curve": points})
    return rows


def _prefixes(ttft: float, rate: float) -> EvidenceNumbers:
    reused = {"variant": "reused", "ttft_s": ttft, "requests_per_s": rate, "cached_tokens": 960.0, "same_tokens": True}
    return [{"variant": "computed", "ttft_s": 1.0, "requests_per_s": 1.0}, reused]


def _routes(times: float) -> EvidenceNumbers:
    names = ("least loaded", "prefix aware", "session sticky")
    slow = {"least loaded": times}
    return [{"variant": n, "ttft_s_p50": slow.get(n, 1.0), "ttft_s_p99": slow.get(n, 1.0), "cache_hit_rate": 0.5}
            for n in names]  # fmt: skip


def _goes(holds: EvidenceNumbers, limits: EvidenceNumbers, refuted: EvidenceNumbers) -> dict[Outcome, EvidenceNumbers]:
    return {"holds": holds, "holds-with-limits": limits, "refuted": refuted}


def _drafts(times: float, plain: float, odd: float) -> EvidenceNumbers:
    halves = {name: {"chance": chance, "bits_a_token": 1.0} for name, chance in
              (("predictable", plain), ("unusual", odd))}  # fmt: skip
    row = {"speed_up_alone": times, "predicted_speed_up": times, "same_tokens_share": 1.0, "chance": 0.7,
           "num_speculative_tokens": 3, "loses_from": 4, "by_text": halves}  # fmt: skip
    return [{"variant": name, **row} for name in ("draft of 2", "draft of 3", "draft of 3, sampled")]


def _options(kept: float) -> EvidenceNumbers:
    rows = [{"variant": name, schedule_price.RATE: 100.0 * kept} for name in schedule_price.ON]
    return [{"variant": "nothing", schedule_price.RATE: 100.0}, *rows]


CLAIMS = (
    Claim(
        id="batch-amortises",
        says="Each weight is read once for all in the batch: throughput grows with it, each request's latency too",
        sources=(
            ClaimSource("A", "without figures"),
            ClaimSource("D", "without figures"),
            ClaimSource("E", "without figures"),
        ),
        trials=(
            ClaimTrial(RunEvidence("batching", ("measure.rounds=1",)), batching.amortised, BATCHES),
            ClaimTrial(
                RunEvidence("batch_size", ("measure.rounds=1",)), batch_size.amortised,
                _goes(crowds(1.8, 1.5), crowds(1.1, 1.0), crowds(1.0, 1.0)),
            ),
        ),
    ),
    Claim(
        id="continuous-vs-static",
        says="Letting requests join and leave mid-flight beats waiting for the whole batch",
        sources=(ClaimSource("A, C, D, E", "without figures"),),
        trials=(ClaimTrial(RunEvidence("batching", ("measure.rounds=1",)), batching.joining, BATCHES),),
    ),
    Claim(
        id="queue-p99",
        says="A short request can wait behind a long prefill; p99 TTFT spikes while the median looks fine",
        sources=(ClaimSource("A", "without figures"),),
        trials=(
            ClaimTrial(
                RunEvidence("queue_tail"), JudgeRule(queue_tail.judge, "queue-p99"),
                _goes(_tails(9.0, 9.0), _tails(1.5, 9.0), _tails(1.5, 2.0)),
            ),
        ),
    ),
    Claim(
        id="chunked-prefill",
        says="Splitting long prompts and mixing the chunks with decode steps keeps other requests from stalling",
        sources=(ClaimSource("A", "without figures"),),
        trials=(
            ClaimTrial(
                RunEvidence("chunked_prefill", ("workload.rounds=1",)), chunked_prefill.chunks,
                _goes(_interference_rows(9), _interference_rows(2), _interference_rows(1.0)),
            ),
            ClaimTrial(RunEvidence("disaggregation"), disaggregation.chunks, _goes(_pools(9), _pools(2), _pools(1.0))),
        ),
    ),
    Claim(
        id="pd-disaggregation",
        says="Separate pools for prefill and decode remove that interference",
        sources=(ClaimSource("A", "without figures"),),
        trials=(
            ClaimTrial(
                RunEvidence("disaggregation"), disaggregation.separate,
                _goes(_pools(9), _pools(9, served=1), _pools(1.0)),
            ),
            ClaimTrial(
                RunEvidence("apart", ("measure.rounds=1",)), apart.interference,
                _goes(_engines_apart(9, 1.0), _engines_apart(9, 0.8), _engines_apart(1, 1.0)),
            ),
        ),
    ),
    Claim(
        id="pools-pay-here",
        says="Separate pools pay on this machine: decodes wait less, and as many requests are within the SLO",
        sources=(ClaimSource("this project", "half the longest gap, goodput no lower"),),
        trials=(
            ClaimTrial(
                RunEvidence("apart", ("measure.rounds=1",)),
                apart.pays,
                {"holds": _engines_apart(9, 1.0, 3.0), "refuted": _engines_apart(9, 0.8, 3.0)},
                impossible={"holds-with-limits": "they pay, or they do not"},
            ),
        ),
    ),
    Claim(
        id="simulated-fleets",
        says="A simulator that was fitted to engines of a machine predicts fleets of them",
        sources=(ClaimSource("this project", "TTFT and TPOT, p50 and p90, within 20% of the measured"),),
        trials=(
            ClaimTrial(
                RunEvidence("fleet_prediction", ("measure.rounds=1",)),
                JudgeRule(fleet_prediction.judge, "simulated-fleets"),
                _goes(_predicted(1.0, 1.1), _predicted(1.1, 1.3), _predicted(1.3, 1.4)),
            ),
        ),
    ),
    Claim(
        id="prefix-cache-latency",
        says="Reusing the KV of a shared prefix cuts latency by up to 80%",
        sources=(ClaimSource("B", "up to 80%"),),
        trials=(
            ClaimTrial(
                RunEvidence("prefix_reuse", ("workload.rounds=1",)), prefix_reuse.latency,
                _goes(_prefixes(0.25, 5.0), _prefixes(0.1, 5.0), _prefixes(0.95, 1.0)),
            ),
        ),
    ),
    Claim(
        id="prefix-cache-throughput",
        says="On prefix-heavy traffic a radix tree of prefixes gives up to 6 times the throughput",
        sources=(ClaimSource("A", "up to 6 times"),),
        trials=(
            ClaimTrial(
                RunEvidence("prefix_reuse", ("workload.rounds=1",)), prefix_reuse.throughput,
                _goes(_prefixes(0.1, 5.0), _prefixes(0.1, 9.0), _prefixes(0.95, 1.0)),
            ),
        ),
    ),
    Claim(
        id="prefix-routing",
        says="Sending a conversation to the instance that holds its prefix changes latency dramatically",
        sources=(ClaimSource("D", "dramatically"),),
        trials=(
            ClaimTrial(
                RunEvidence("routing"), JudgeRule(routing.judge, "prefix-routing"),
                _goes(_routes(4.0), _routes(1.5), _routes(1.0)),
            ),
        ),
    ),
    Claim(
        id="spec-decode",
        says="A small draft proposes, the target verifies in one pass: 2 to 3 times faster, the same distribution",
        sources=(ClaimSource("A", "2 to 3 times"), ClaimSource("D", "2 to 3 times"),
                 ClaimSource("E", "a sketch without bonus token and draft probabilities, one index off")),
        trials=(
            ClaimTrial(
                RunEvidence("speculation", ("workload.rounds=1",)), speculation.faster,
                _goes(_drafts(2.4, 0.75, 0.5), _drafts(1.4, 0.75, 0.5), _drafts(0.8, 0.5, 0.7)),
            ),
        ),
    ),
    Claim(
        id="spec-acceptance",
        says="Acceptance is 70 to 80% on predictable text and 40 to 60% on unusual text",
        sources=(ClaimSource("A", "70 to 80%, 40 to 60%"),),
        trials=(
            ClaimTrial(
                RunEvidence("speculation", ("workload.rounds=1",)), speculation.accepted,
                _goes(_drafts(2.4, 0.75, 0.5), _drafts(2.4, 0.65, 0.5), _drafts(0.8, 0.5, 0.7)),
            ),
        ),
    ),
    Claim(
        id="greedy-not-deterministic",
        says="Temperature 0 reproduces within one deployment; batch composition, hardware and ties can change it",
        sources=(ClaimSource("A", "without figures"),),
        trials=(
            ClaimTrial(
                RunEvidence("determinism", ("workload.runs=2",)),
                JudgeRule(determinism.judge, "greedy-not-deterministic"),
                _goes(determinism.example_rows(3, 3), determinism.example_rows(1, 3), determinism.example_rows(1, 1)),
            ),
        ),
    ),
    Claim(
        id="schedule-options-free",
        says="Policies, chunks, a prefix index and a CPU pool cost no throughput where no request needs them",
        sources=(ClaimSource("this project", "what it promises"),),
        trials=(
            ClaimTrial(
                RunEvidence("schedule_price", ("measure.rounds=1",)),
                JudgeRule(schedule_price.judge, "schedule-options-free"),
                _goes(_options(1.0), _options(0.9), _options(0.5)),
            ),
        ),
    ),
)  # fmt: skip
