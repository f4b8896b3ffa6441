"""Claims on prefill and decode against length: flat, linear or quadratic, and up to which length.

Sources contradict each other here on purpose. Each claim has one rule, the experiment's, and three kinds of numbers:
this machine's, and the rooflines of an H100 and an H200 with Llama 3.1 8B and 70B.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from experiments import model_size, no_cache, prefill_decode_length
from workbench.claims.break_even import RooflineMachine, decode_break_even_points, prefill_break_even_points
from workbench.claims.claim import (
    CalculationEvidence,
    Claim,
    ClaimSource,
    ClaimTrial,
    EvidenceNumbers,
    JudgeRule,
    Ruling,
    RunEvidence,
)
from workbench.display import Table
from workbench.experiment.verdict import Outcome
from workbench.model.cost import visible_pairs
from workbench.model.shapes import named_shape
from workbench.simulate.roofline import Hardware, ModelSizes, roofline_step_times
from workbench.simulate.step_times import step_work_of

LENGTHS = (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072)
MACHINES = (("llama-3.1-8b", "h100", 1), ("llama-3.1-8b", "h200", 1),
            ("llama-3.1-70b", "h100", 2), ("llama-3.1-70b", "h200", 2))  # fmt: skip
MEASURED = RunEvidence("prefill_decode_length", quick=("workload.rounds=1",))


def bound(machine: RooflineMachine, prompt: int, output: int) -> dict[str, Any]:
    """Return one request as a row of the experiment, where every step takes its roofline time."""
    shares = {}
    for phase, span in (("prefill", (0, prompt)), ("decode", (prompt + output // 2 - 1, 1))):
        work = step_work_of([span], 1, machine.times.kinds)
        computing, reading = (form(work) / machine.times(work) for form in machine.times.costs)
        shares |= {f"{phase}_flops_share": computing, f"{phase}_bytes_share": reading}
    prefill, step = machine.prefill(prompt), machine.decode(prompt + output // 2)
    times = {"prefill_s": prefill, "decode_step_s": step, "decode_s": (output - 1) * step}
    times["e2el_s"] = times["prefill_s"] + times["decode_s"]
    predicted = {f"predicted_{name}": value for name, value in times.items()}
    return {"prompt_tokens": prompt, "output_tokens": output, **times, **predicted, **shares}


def rows_of(machine: RooflineMachine) -> EvidenceNumbers:
    points = [bound(machine, prompt, 16) for prompt in LENGTHS] + [bound(machine, *prefill_decode_length.REQUEST_SHAPE)]
    return [{"variant": machine.name, "curve": points}]


def _rows(
    prefill: Callable[[int], float], decode: Callable[[int], float], flops: float, reads: float
) -> EvidenceNumbers:
    """Return rows of a made-up machine: seconds by length, and the shares of its ceilings."""
    points = []
    for prompt, output in (*((n, 16) for n in (64, 128, 512, 1024, 2048, 4096)), prefill_decode_length.REQUEST_SHAPE):
        times = {"prefill_s": prefill(prompt), "decode_step_s": decode(prompt)}
        times["decode_s"] = (output - 1) * times["decode_step_s"]
        times["e2el_s"] = times["prefill_s"] + times["decode_s"]
        shares = {"prefill_flops_share": flops, "prefill_bytes_share": 0.1, "decode_flops_share": flops / 100}
        points.append({"prompt_tokens": prompt, "output_tokens": output, "decode_bytes_share": reads, **times, **shares}
                      | {f"predicted_{name}": value for name, value in times.items()})  # fmt: skip
    return [{"variant": "made", "curve": points}]


FLAT = _rows(lambda n: 1.0, lambda n: 0.1, 0.9, 0.9)
LINEAR = _rows(lambda n: n / 1000, lambda n: 0.1, 0.9, 0.9)
SQUARE = _rows(lambda n: n * n / 1e6, lambda n: n / 10, 0.05, 0.01)
ROOT = _rows(lambda n: n**0.4, lambda n: 0.1 if n <= 1024 else 0.2, 0.9, 0.9)
BENT = _rows(lambda n: max(0.5, n / 1000), lambda n: 0.1, 0.9, 0.9)  # flat first, then linear
SLOW_PREFILL = _rows(lambda n: n * 1.0, lambda n: 1e-3 * n, 0.05, 0.01)
EVEN = _rows(lambda n: n * 0.0175, lambda n: 0.1, 0.9, 0.9)
BEGINS = _rows(lambda n: n**1.1, lambda n: 0.1, 0.9, 0.9)
LOW = {"prefill_flops_share": 0.05}
SOMEWHERE = [LINEAR[0] | {"curve": [p | (LOW if p["prompt_tokens"] < 512 else {}) for p in LINEAR[0]["curve"]]}]

# Made-up machines to try the rules on rooflines: with very few products a second, with very many, and between.
LOW_FLOPS = Hardware(name="few products", flops=2e12, bandwidth=2e12, memory=80e9)
MANY = Hardware(name="many products", flops=1e19, bandwidth=2e12, memory=80e9)
SOME = Hardware(name="more products", flops=1e15, bandwidth=2e12, memory=80e9)
NONE = Hardware(name="next to no products", flops=1e11, bandwidth=2e12, memory=80e9)
HALF = Hardware(name="as few as that", flops=1.4e13, bandwidth=2e12, memory=80e9)


def seen_by(
    hardware: Hardware, window: int | None = None, shape: str = "llama-3.1-8b"
) -> Callable[[], EvidenceNumbers]:
    """Return a function for rows of a shape's roofline on `hardware`, with attention windows of `window` tokens."""
    spec = named_shape(shape)
    layers = tuple(
        layer.model_copy(update={"attention": layer.attention.model_copy(update={"sliding_window": window})})
        for layer in spec.layers
    )
    spec = spec.model_copy(update={"layers": layers})
    return lambda: rows_of(RooflineMachine(hardware.name, roofline_step_times(ModelSizes.dense(spec), hardware)))


def _trials(
    claim: str, gives: Mapping[Outcome, EvidenceNumbers], by_roofline: Mapping[Outcome, EvidenceNumbers],
    never: Mapping[Outcome, str] | None = None,
) -> tuple[ClaimTrial, ...]:  # fmt: skip
    """Return the trial by the experiment here, then those by rooflines, with the same rule and examples of their own
    kind.
    """
    rule = JudgeRule(prefill_decode_length.judge, claim)
    bounds = [
        CalculationEvidence(
            lambda m=machine: rows_of(RooflineMachine.build(*m)), f"roofline: {gpus} x {hardware}, {shape}"
        )
        for machine in MACHINES
        for shape, hardware, gpus in [machine]
    ]
    here = ClaimTrial(MEASURED, rule, gives, never or {})
    return (here, *(ClaimTrial(evidence, rule, by_roofline, never or {}) for evidence in bounds))


def no_cache_rows(shape: str, hardware: str, longest: int) -> EvidenceNumbers:
    """Return the experiment without a cache by a roofline: a step that reads the text, and one that computes it."""
    machine = RooflineMachine.build(shape, hardware)
    lengths = [n for n in LENGTHS if no_cache.SHORT <= n <= longest]
    steps = {"cache": machine.decode, "no cache": machine.prefill, "naive": machine.prefill}
    return [
        {"variant": name, "curve": [
            {"prompt_tokens": n, "decode_step_s": step(n), "predicted_decode_step_s": step(n)} for n in lengths]}
        for name, step in steps.items()
    ]  # fmt: skip


def _machines(records: Any) -> list[tuple[str, RooflineMachine]]:
    """Return the rooflines, and this machine's for the measured model once there is a record of it."""
    found = [(machine.name, machine) for machine in (RooflineMachine.build(*each) for each in MACHINES)]
    if record := records.latest(MEASURED):
        predicted, shape = record.numbers[0]["predicted"], record.experiment["model"]["name"].removeprefix("shape:")
        rates = {"flops": predicted["flops_per_s"], "bandwidth": predicted["bytes_per_s"], "memory": 1e12}
        here = RooflineMachine.build(shape, Hardware(name="here", source=record.name, **rates))
        found.insert(0, (f"{shape}, here (roofline of {record.machine})", here))
    return found


def prefill_sizes(records: Any) -> Sequence[Table]:
    rows, times = [], []
    for name, machine in _machines(records):
        rows.append((name, *(_format_tokens(tokens) for tokens in prefill_break_even_points(machine).values())))
        times.append((name, *(f"{machine.prefill(n) * 1e3:,.1f}" for n in (100, 1000, 10_000, 100_000))))
    headings = ("prefill", "flat up to", "doubles from", "more than doubles from", "triples from")
    note = "Prompt tokens: time within 10% of one token's; doubling the prompt takes 1.9, 2.2 and 3 times as long"
    seconds = Table("Prefill by the roofline, ms", times, ("tokens", "100", "1,000", "10,000", "100,000"))
    return [Table(note, rows, headings), seconds, *_measured(records, "prefill_s")]


def decode_sizes(records: Any) -> Sequence[Table]:
    rows = []
    for name, machine in _machines(records):
        for batch in (1, 32):
            rows.append(
                (name, str(batch), *(_format_tokens(n) for n in decode_break_even_points(machine, batch).values()))
            )
    headings = ("decode", "requests", "10% longer from", "twice as long from")
    note = "Context of each request, in tokens, against 100 tokens"
    return [Table(note, rows, headings), *_measured(records, "decode_step_s")]


def _measured(records: Any, key: str) -> list[Table]:
    """Return the record's curve: times, and the local exponent up to each length."""
    if (record := records.latest(MEASURED)) is None:
        return []
    curve = [p for p in record.numbers[0]["curve"]
             if (p["prompt_tokens"], p["output_tokens"]) != prefill_decode_length.REQUEST_SHAPE]  # fmt: skip
    powers = ["", *(f"{power:.2f}" for *_, power in prefill_decode_length.exponents(curve, key))]
    rows = [
        (f"{p['prompt_tokens']:,}", f"{p[key] * 1e3:,.2f}", f"{p[f'predicted_{key}'] * 1e3:,.2f}", power)
        for p, power in zip(curve, powers, strict=True)
    ]
    return [Table(f"Measured here ({record.name})", rows, ("tokens", "ms", "at least, ms", "exponent"))]


def _format_tokens(tokens: int | None) -> str:
    return "never" if tokens is None else f"{tokens:,}"


def pairs() -> EvidenceNumbers:
    """Return the growth of query-key pairs of one decode step when the text doubles, with a cache and without."""
    once, twice = 4096, 8192
    return {
        "cached": visible_pairs(twice - 1, 1, None)[0] / visible_pairs(once - 1, 1, None)[0],
        "uncached": visible_pairs(0, twice, None)[0] / visible_pairs(0, once, None)[0],
    }


def linear_step(found: EvidenceNumbers) -> Ruling:
    """At twice the text attention has twice the pairs with a cache and four times without (within 5%): holds. It cannot
    be otherwise: who sees what is counted, nothing is run."""
    cached, uncached = found["cached"], found["uncached"]
    exact = abs(cached / 2 - 1) <= 0.05 and abs(uncached / 4 - 1) <= 0.05
    return Ruling(
        "holds" if exact else "refuted",
        f"attention of a step at twice the text: {cached:.2f} times the pairs with a cache, {uncached:.2f} times "
        "without",
        figures={"times the pairs, cache": cached, "times the pairs, no cache": uncached},
    )


NO_CACHE = JudgeRule(no_cache.judge, "kv-linear-step")


def _steps(*powers: float) -> EvidenceNumbers:
    """Return rows of steps whose time goes with these powers of the length."""
    lengths = (256, 1024)
    return [
        {"variant": name, "curve": [
            {"prompt_tokens": n, "decode_step_s": n**power, "predicted_decode_step_s": n**power} for n in lengths]}
        for name, power in zip(("cache", "no cache", "naive"), powers, strict=True)
    ]  # fmt: skip


SOURCES_BOUND = tuple(ClaimSource(name, "without figures") for name in "ACDE")
COUNTED = "the pairs of a step follow from what attention sees, and are 2 and 4 times whatever is run"

CLAIMS = (
    Claim(
        id="prefill-compute-bound",
        says="Prefill is limited by arithmetic",
        sources=(
            ClaimSource("C", "without figures"),
            ClaimSource("D", "without figures"),
            ClaimSource("E", "without figures"),
        ),
        trials=_trials(
            "prefill-compute-bound",
            {"holds": LINEAR, "holds-with-limits": SOMEWHERE, "refuted": SQUARE},
            {"holds": seen_by(LOW_FLOPS), "holds-with-limits": seen_by(SOME), "refuted": seen_by(MANY)},
        ),
        condition_tables=prefill_sizes,
    ),
    Claim(
        id="prefill-flat",
        says="A 1,000-token prompt takes about as long as a 100-token one, not 10 times as long",
        sources=(ClaimSource("A", "1,000 tokens about as long as 100"),),
        trials=_trials(
            "prefill-flat",
            {"holds": FLAT, "holds-with-limits": ROOT, "refuted": LINEAR},
            {"holds": seen_by(MANY), "holds-with-limits": seen_by(SOME), "refuted": seen_by(LOW_FLOPS)},
        ),
        condition_tables=prefill_sizes,
    ),
    Claim(
        id="prefill-linear",
        says="Doubling the prompt doubles prefill time",
        sources=(ClaimSource("D", "1,000 tokens about 50 ms, 100,000 about 5 s"),),
        trials=_trials(
            "prefill-linear",
            {"holds": LINEAR, "holds-with-limits": BENT, "refuted": SQUARE},
            {"holds": seen_by(LOW_FLOPS, 1024), "holds-with-limits": seen_by(LOW_FLOPS), "refuted": seen_by(MANY)},
        ),
        condition_tables=prefill_sizes,
    ),
    Claim(
        id="prefill-quadratic",
        says="Attention inside prefill is O(n^2), so at very long prompts time grows faster than linear",
        sources=(ClaimSource("B", "without figures"), ClaimSource("C", "without figures")),
        trials=_trials(
            "prefill-quadratic",
            {"holds": SQUARE, "holds-with-limits": BEGINS, "refuted": LINEAR},
            {
                "holds": seen_by(LOW_FLOPS),
                "holds-with-limits": seen_by(LOW_FLOPS, 32_768),
                "refuted": seen_by(LOW_FLOPS, 1024),
            },
        ),
        condition_tables=prefill_sizes,
    ),
    Claim(
        id="decode-flat-in-context",
        says="Tokens per second do not depend on the prompt's length (100 or 100,000)",
        sources=(ClaimSource("D", "the same at 100 and 100,000 tokens"),),
        trials=_trials(
            "decode-flat-in-context",
            {"holds-with-limits": ROOT, "refuted": SQUARE},
            {"holds-with-limits": seen_by(LOW_FLOPS, 1024), "refuted": seen_by(NONE, shape="smollm2-135m")},
            {
                "holds": "the rule asks of Llama 3.1 8B and 70B at 100,000 tokens too, where the roofline says 1.9 and "
                "1.2 times as long: nothing measured at shorter contexts changes that"
            },
        ),
        condition_tables=decode_sizes,
    ),
    Claim(
        id="decode-bandwidth-bound",
        says="At small batch a decode step costs the time to read the weights once; the arithmetic is trivial",
        sources=SOURCES_BOUND,
        trials=(
            ClaimTrial(
                RunEvidence("model_size", ("workload.rounds=1",)),
                JudgeRule(model_size.judge, "decode-bandwidth-bound"),
                {
                    "holds": model_size.example_rows(0.5, (0.9, 0.9, 0.9, 0.9)),
                    "holds-with-limits": model_size.example_rows(0.5, (0.2, 0.3, 0.9, 0.9)),
                    "refuted": model_size.example_rows(0.5, (0.2, 0.3, 0.3, 0.3)),
                },
            ),
            *_trials(
                "decode-bandwidth-bound",
                {"holds-with-limits": FLAT, "refuted": SQUARE},
                {"holds-with-limits": seen_by(MANY), "refuted": seen_by(LOW_FLOPS)},
                {"holds": "one shape at one length is a limit in itself; the run over four shapes decides"},
            ),
        ),
    ),
    Claim(
        id="decode-dominates",
        says="1,000 tokens in and 200 out: most of the time is decode",
        sources=(ClaimSource("A", "without figures"),),
        trials=_trials(
            "decode-dominates",
            {"holds": FLAT, "holds-with-limits": EVEN, "refuted": SLOW_PREFILL},
            {"holds": seen_by(MANY), "holds-with-limits": seen_by(HALF), "refuted": seen_by(LOW_FLOPS)},
        ),
    ),
    Claim(
        id="kv-linear-step",
        says="With the cache a decode step is O(n); without it each re-runs the whole text, in attention O(n^2)",
        sources=(ClaimSource("A to E", "O(n) against O(n^2)"),),
        trials=(
            ClaimTrial(
                RunEvidence("no_cache", quick=("workload.rounds=1",)),
                NO_CACHE,
                {
                    "holds": _steps(0.1, 1.5, 1.5),
                    "holds-with-limits": _steps(0.1, 1.0, 1.2),
                    "refuted": _steps(1.5, 1.5, 1.5),
                },
            ),
            ClaimTrial(
                CalculationEvidence(
                    lambda: no_cache_rows("llama-3.1-8b", "h100", 131_072), "roofline: 1 x h100, llama-3.1-8b"
                ),
                NO_CACHE,
                {
                    "holds": lambda: no_cache_rows("llama-3.1-8b", "h100", 131_072),
                    "holds-with-limits": lambda: no_cache_rows("llama-3.1-8b", "h100", 4096),
                    "refuted": lambda: no_cache_rows("llama-3.1-8b", "h100", 512),
                },
            ),
            ClaimTrial(
                CalculationEvidence(pairs),
                linear_step,
                {"holds": pairs},
                {"holds-with-limits": COUNTED, "refuted": COUNTED},
            ),
        ),
    ),
)
