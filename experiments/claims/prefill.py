"""Figures of claims on prefill and decode against length: flat, linear or quadratic, and up to which length.

Sources contradict each other here on purpose. Each claim has one rule, and three kinds of figures: this machine's, and
the rooflines of an H100 and an H200 with Llama 3.1 8B and 70B.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from experiments import no_cache, prefill_decode_length
from workbench.claims.break_even import RooflineMachine, decode_break_even_points, prefill_break_even_points
from workbench.display import Table
from workbench.experiment.verdict import VariantRows
from workbench.model.cost import visible_pairs
from workbench.simulate.step_times import step_work_of

LENGTHS = (16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072)
MACHINES = (("llama-3.1-8b", "h100", 1), ("llama-3.1-8b", "h200", 1),
            ("llama-3.1-70b", "h100", 2), ("llama-3.1-70b", "h200", 2))  # fmt: skip


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


def by_roofline(figures: str, shape: str, hardware: str, gpus: int = 1) -> dict[str, float]:
    """Return the `figures` of `prefill_decode_length` for a shape's roofline, in place of measured rows."""
    return getattr(prefill_decode_length, figures)(rows_of(RooflineMachine.build(shape, hardware, gpus)))


def rows_of(machine: RooflineMachine) -> VariantRows:
    points = [bound(machine, prompt, 16) for prompt in LENGTHS] + [bound(machine, *prefill_decode_length.REQUEST_SHAPE)]
    return [{"variant": machine.name, "curve": points}]


def without_cache(shape: str, hardware: str, longest: int) -> dict[str, float]:
    """Return `no_cache.growth_of_steps` by a roofline: a step that reads the text, and one that computes it."""
    machine = RooflineMachine.build(shape, hardware)
    lengths = [n for n in LENGTHS if no_cache.SHORT <= n <= longest]
    steps = {"cache": machine.decode, "no cache": machine.prefill, "naive": machine.prefill}
    return no_cache.growth_of_steps([
        {"variant": name, "curve": [
            {"prompt_tokens": n, "decode_step_s": step(n), "predicted_decode_step_s": step(n)} for n in lengths]}
        for name, step in steps.items()
    ])  # fmt: skip


def prefill_sizes() -> Sequence[Table]:
    rows, times = [], []
    for machine in (RooflineMachine.build(*each) for each in MACHINES):
        rows.append((machine.name, *(_format_tokens(tokens) for tokens in prefill_break_even_points(machine).values())))
        times.append((machine.name, *(f"{machine.prefill(n) * 1e3:,.1f}" for n in (100, 1000, 10_000, 100_000))))
    headings = ("prefill", "flat up to", "doubles from", "more than doubles from", "triples from")
    note = "Prompt tokens: time within 10% of one token's; doubling the prompt takes 1.9, 2.2 and 3 times as long"
    seconds = Table("Prefill by the roofline, ms", times, ("tokens", "100", "1,000", "10,000", "100,000"))
    return [Table(note, rows, headings), seconds]


def decode_sizes() -> Sequence[Table]:
    rows = []
    for machine in (RooflineMachine.build(*each) for each in MACHINES):
        for batch in (1, 32):
            rows.append(
                (
                    machine.name,
                    str(batch),
                    *(_format_tokens(n) for n in decode_break_even_points(machine, batch).values()),
                )
            )
    headings = ("decode", "requests", "10% longer from", "twice as long from")
    note = "Context of each request, in tokens, against 100 tokens"
    return [Table(note, rows, headings)]


def _format_tokens(tokens: int | None) -> str:
    return "never" if tokens is None else f"{tokens:,}"


def pairs() -> dict[str, float]:
    """Return the growth of query-key pairs of one decode step when the text doubles, with a cache and without: who sees
    what is counted, nothing is run."""
    once, twice = 4096, 8192
    return {
        "cached": visible_pairs(twice - 1, 1, None)[0] / visible_pairs(once - 1, 1, None)[0],
        "uncached": visible_pairs(0, twice, None)[0] / visible_pairs(0, once, None)[0],
    }
