"""Figures of a claim on the latency of one request by the roofline."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.model_size import powers_between
from workbench.claims.break_even import RooflineMachine
from workbench.model.shapes import named_shape

SHAPES = ("smollm2-135m", "tinyllama-1.1b", "llama-3.1-8b", "llama-3.1-70b")


def latencies(shapes: Sequence[str] = SHAPES, hardware: str = "h200") -> dict[str, float]:
    """Return the powers of the parameters with which the latency of one request goes: 128 tokens in and 32 out, alone
    on eight H200 by the roofline, where a step takes what it reads and sends, and nothing else."""
    machines = {shape: RooflineMachine.build(shape, hardware, 8) for shape in shapes}
    seconds = [machine.prefill(128) + 31 * machine.decode(144) for machine in machines.values()]
    return powers_between([named_shape(shape).num_parameters for shape in shapes], seconds)
