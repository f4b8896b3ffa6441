"""What the cost model makes of variants before any is run: no step is quicker than computing it, or reading it, is.

Both at the rates that this machine reaches, measured now: a matrix product in the model's type, and a read of as many
bytes as the weights have.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from compiled_kernels import Lane, lane_problems
from workbench.engine.load import CACHE_MEMORY
from workbench.fleet.hardware import Hardware
from workbench.fleet.roofline import Sizes
from workbench.fleet.settings import SimulatedExecutor, UncachedExecutor
from workbench.model.cost import Cost, StepCost
from workbench.study.cache_of import spec_of
from workbench.study.ceilings import ceilings_for
from workbench.study.experiment import Experiment
from workbench.study.lengths_workload import LengthsWorkload
from workbench.study.simulated_machine import cost_of, sizes_of
from workbench.study.variants import every_variant

Predictions = dict[str, Any]
Tell = Callable[[str], None]


def predictions(experiment: Experiment, tell: Tell = lambda line: None) -> Predictions | None:
    """By variant, with the ceilings they rest on; None for workloads of which the cost model says nothing."""
    if not isinstance(experiment.workload, LengthsWorkload):
        return None
    here = Here(tell)
    return {"variants": {name: of_lengths(each, here) for name, each in _variants(experiment).items()}}


class Here:
    """This machine's ceilings, each measured once."""

    def __init__(self, tell: Tell = lambda line: None):
        self._tell = tell
        self._known: dict[tuple[int, str], Hardware] = {}

    def __call__(self, sizes: Sizes, dtype: str) -> Hardware:
        kind = dtype if dtype in ("float32", "bfloat16") else "float32"
        size = round(sizes.weight_bytes)
        if (size, kind) not in self._known:
            self._tell("measuring what this machine reads and multiplies at best")
            compiled = lane_problems()[Lane.INDUCTOR] is None
            with tempfile.TemporaryDirectory() as folder:  # what was measured on another day is no part of this run
                found = ceilings_for(size, dtypes=(kind,), compiled=compiled, cache_dir=Path(folder))
            reads = found.read(size).value
            self._known[size, kind] = Hardware(
                name="here", flops=found.gemm(kind).value, bandwidth=reads, network=reads, link=reads, host=reads,
                memory=(sizes.weight_bytes + CACHE_MEMORY) / SimulatedExecutor().memory, source="measured in this run",
            )  # fmt: skip
        return self._known[size, kind]


def of_lengths(experiment: Experiment, here: Here) -> dict[str, Any]:
    """Each length's prefill, and the decode step in the middle of its output."""
    assert isinstance(experiment.workload, LengthsWorkload)
    sizes, dtype = sizes_of(experiment), spec_of(experiment)[1]
    hardware, cost = here(sizes, dtype), cost_of(sizes)
    uncached = isinstance(experiment.executor, UncachedExecutor)
    found = []
    for prompt, output in experiment.workload.lengths:
        most = prompt if uncached else experiment.schedule.max_num_batched_tokens
        prefill = chunks(cost, prompt, most)
        known = prompt + output // 2
        decode = cost([(0, known)], 1) if uncached else cost([(known - 1, 1)], 1)
        times = {"prefill_s": seconds(prefill, hardware), "decode_step_s": seconds([decode], hardware)}
        times["decode_s"] = (output - 1) * times["decode_step_s"]
        found.append({
            "prompt_tokens": prompt, "output_tokens": output, **times,
            "e2el_s": times["prefill_s"] + times["decode_s"],
            "prefill_flops": sum(each.flops for each in prefill), "prefill_bytes": sum(each.bytes for each in prefill),
            "decode_flops": decode.flops, "decode_bytes": decode.bytes,
        })  # fmt: skip
    return {"flops_per_s": hardware.flops, "bytes_per_s": hardware.bandwidth, "lengths": found}


def chunks(cost: StepCost, prompt: int, most: int) -> list[Cost]:
    """The steps of a prefill, `most` tokens each."""
    starts = range(0, prompt, most)
    return [cost([(at, min(most, prompt - at))], int(at + most >= prompt)) for at in starts]


def seconds(steps: list[Cost], hardware: Hardware) -> float:
    return sum(step.seconds(hardware.flops, hardware.bandwidth) for step in steps)


def _variants(experiment: Experiment) -> dict[str, Experiment]:
    return every_variant(experiment) or {"as given": experiment}
