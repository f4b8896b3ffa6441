"""Claims on a single request: the model's size, its batch, and streaming."""

from __future__ import annotations

import math
from itertools import pairwise

from experiments import batch_size, model_size, naive_loop, streaming
from workbench.claims.break_even import RooflineMachine
from workbench.claims.claim import (
    OUTCOMES,
    CalculationEvidence,
    Claim,
    ClaimSource,
    ClaimTrial,
    EvidenceNumbers,
    JudgeRule,
    Ruling,
    RunEvidence,
)
from workbench.experiment.verdict import Outcome
from workbench.model.shapes import named_shape
from workbench.simulate.roofline import Hardware

SHAPES = ("smollm2-135m", "tinyllama-1.1b", "llama-3.1-8b", "llama-3.1-70b")
FEWER = ("measure.rounds=1",)


def latencies(*shapes: str, hardware: str | Hardware = "h200") -> EvidenceNumbers:
    """Return parameters, and seconds of 128 tokens in and 32 out, alone on eight H200 by the roofline."""
    found = {}
    for shape in shapes or SHAPES:
        machine = RooflineMachine.build(shape, hardware, 8)
        seconds = machine.prefill(128) + 31 * machine.decode(144)
        found[shape] = {"parameters": named_shape(shape).num_parameters, "seconds": seconds}
    return found


def by_bytes(found: EvidenceNumbers) -> Ruling:
    """The latency of one request goes with at most the power 0.8 of the parameters between all neighbours in size:
    holds; between some: with limits; between none: refuted."""
    sizes = sorted(found.values(), key=lambda one: one["parameters"])
    powers = [
        math.log(b["seconds"] / a["seconds"]) / math.log(b["parameters"] / a["parameters"]) for a, b in pairwise(sizes)
    ]
    below = [power for power in powers if power <= model_size.BELOW]
    return Ruling(
        "refuted" if not below else "holds" if len(below) == len(powers) else "holds-with-limits",
        f"powers {', '.join(f'{power:.2f}' for power in powers)} between {', '.join(found)}, where a step takes "
        "what it reads and sends, and nothing else",
        "small models, whose layers pass on between GPUs for longer than they read; large ones grow as their bytes do",
        {"power between the largest": powers[-1]},
    )


# The link between GPUs is so slow that sending takes longer than reading: only sizes and layer counts matter.
SLOW_LINK = Hardware(name="slow link", flops=989.5e12, bandwidth=4.8e12, memory=141e9, link=1e6)
SOME_LINK = SLOW_LINK.model_copy(update={"name": "slower link", "link": 5e9})


def crowds(gain: float, wait: float) -> EvidenceNumbers:
    """Return rows of batches in which each doubling multiplies tokens a second by `gain` and latency by `wait`."""
    found = []
    for number, name in enumerate((*batch_size.SIZES, batch_size.LIMITED)):
        number = min(number, 6) if name != batch_size.LIMITED else 4
        row = {
            batch_size.RATE: 100 * gain**number,
            batch_size.TTFT: 0.1 * wait**number,
            batch_size.TPOT: 0.01 * wait**number,
        }
        found.append({"variant": name, **row, "predicted": row})
    return found


def _steeper(rows: EvidenceNumbers) -> EvidenceNumbers:
    """Return the same rows, with the largest model a hundred times as slow."""
    (point,) = rows[-1]["curve"]
    slow = point | {name: 100 * point[name] for name in ("e2el_s", "predicted_e2el_s", "decode_step_s")}
    return [*rows[:-1], rows[-1] | {"curve": [slow]}]


def _streams(gain: float, wait: float) -> EvidenceNumbers:
    """Return rows of both deliveries of a text.

    Without streaming there are `gain` times the tokens a second; streaming shows text after `wait`.
    """
    rows = []
    for name, rate, seen in (("whole", gain, 1.0), ("stream", 1.0, wait)):
        rates = {streaming.RATE: rate, f"predicted_{streaming.RATE}": rate, "rates": [rate] * 3}
        rows.append({"variant": name, **rates, "handling_s_per_token": 1e-5, "e2el_s_p50": 1.0, "visible_s_p50": seen})
    return rows


def _ladder(gain: float) -> EvidenceNumbers:
    rates = {name: gain**number for number, name in enumerate(naive_loop.LADDER)}
    return [{"variant": name, naive_loop.RATE: r, "predicted": {naive_loop.RATE: r}} for name, r in rates.items()]


def _stalled(rows: EvidenceNumbers) -> EvidenceNumbers:
    """Return the same ladder, whose last rung gives nothing."""
    return [*rows[:-1], rows[-2] | {"variant": rows[-1]["variant"]}]


def _unlimited(rows: EvidenceNumbers) -> EvidenceNumbers:
    """Return the same batches, with a lower limit for the same clients that changes nothing."""
    same = next(row for row in rows if row["variant"] == batch_size.CROWD)
    return [row if row["variant"] != batch_size.LIMITED else same | {"variant": batch_size.LIMITED} for row in rows]


def _judged_claim(
    id: str,
    says: str,
    run: RunEvidence,
    judge,
    tried: tuple[EvidenceNumbers, EvidenceNumbers, EvidenceNumbers],
    *sources: ClaimSource,
) -> Claim:
    """Make a claim from rows under which it holds, holds with limits, and is refuted."""
    gives: dict[Outcome, EvidenceNumbers] = dict(zip(OUTCOMES, tried, strict=True))
    return Claim(id, says, sources, (ClaimTrial(run, JudgeRule(judge, id), gives),))


CLAIMS = (
    Claim(
        id="model-size-not-linear",
        says="At small batch latency does not grow linearly with model size",
        sources=(ClaimSource("A", "without figures"),),
        trials=(
            ClaimTrial(
                RunEvidence("model_size", ("workload.rounds=1",)),
                JudgeRule(model_size.judge, "model-size-not-linear"),
                {
                    "holds": model_size.example_rows(0.5),
                    "holds-with-limits": _steeper(model_size.example_rows(0.5)),
                    "refuted": model_size.example_rows(1.0),
                },
            ),
            ClaimTrial(
                CalculationEvidence(latencies, "roofline: 8 x h200"),
                by_bytes,
                {
                    "holds": lambda: latencies(hardware=SLOW_LINK),
                    "holds-with-limits": lambda: latencies(hardware=SOME_LINK),
                    "refuted": latencies,
                },
            ),
        ),
    ),
    _judged_claim(
        "ttft-vs-throughput",
        "What helps TTFT hurts throughput, and the other way round",
        RunEvidence("batch_size", FEWER),
        batch_size.judge,
        (crowds(1.8, 1.5), _unlimited(crowds(1.8, 1.5)), crowds(1.0, 1.0)),
        ClaimSource("A", "without figures"),
        ClaimSource("E", "without figures"),
    ),
    _judged_claim(
        "batch-no-stream",
        "Streaming adds overhead in batch pipelines",
        RunEvidence("streaming", ("workload.rounds=1",)),
        streaming.judge,
        (_streams(1.3, 0.1), _streams(1.02, 0.1), _streams(0.99, 0.1)),
        ClaimSource("A", "without figures"),
    ),
    _judged_claim(
        "stream-perceived",
        "Streaming does not change total time, but moves the first visible token from the end to TTFT",
        RunEvidence("streaming", ("workload.rounds=1",)),
        streaming.judge,
        (_streams(1.0, 0.1), _streams(1.0, 0.4), _streams(1.0, 0.9)),
        ClaimSource("A to E", "from the end to TTFT"),
    ),
    _judged_claim(
        "naive-against-everything",
        "Cache, compiled step, fewer bits, batch and drafts each speed the naive loop up, a lot together",
        RunEvidence("naive_loop", FEWER),
        naive_loop.judge,
        (_ladder(2.0), _stalled(_ladder(3.0)), _ladder(1.0)),
        ClaimSource("this project", "what it was built to find out"),
    ),
)
