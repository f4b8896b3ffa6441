"""Predictions of the cost model before variants run: a step takes at least its computing and its reading time.

Both rates are ceilings of this machine, measured now: a matrix product in the model's dtype, and a read of as many
bytes as the weights have."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from compiled_kernels import Lane, lane_problems
from workbench.engine.load import CACHE_MEMORY
from workbench.engine.speculation import DraftModel, NoSpeculation
from workbench.errors import WorkbenchError
from workbench.fleet.hardware import Hardware
from workbench.fleet.roofline import Sizes
from workbench.fleet.settings import SimulatedExecutor, UncachedExecutor
from workbench.model.cost import Cost, StepCost
from workbench.study.cache_of import spec_of
from workbench.study.ceilings import ceilings_for
from workbench.study.experiment import Experiment, ModelPart, PromptsWorkload, RandomWorkload
from workbench.study.lengths_workload import LengthsWorkload
from workbench.study.quality_costs import with_model
from workbench.study.quality_workload import QualityWorkload
from workbench.study.simulated import fleet_for, results
from workbench.study.simulated_machine import cost_of, sizes_of
from workbench.study.simulated_run import tokenizer_of
from workbench.study.texts import foretold
from workbench.study.texts_workload import TextsWorkload
from workbench.study.variants import every_variant
from workbench.study.workload import requests_of
from workbench.traffic.settings import TrafficWorkload

Predictions = dict[str, Any]
Tell = Callable[[str], None]


def predictions(experiment: Experiment, tell: Tell = lambda line: None) -> Predictions | None:
    """Predict every variant, with the ceilings used; None where the experiment asks for no prediction.

    For sampled texts the prediction is of the drawn distributions, not of time, since all variants cost the same."""
    work, here = experiment.workload, Here(tell)
    if isinstance(work, TextsWorkload):
        return foretold(experiment, tell)
    if isinstance(work, LengthsWorkload):
        of: Callable[[Experiment, Here], dict[str, Any]] = of_lengths
    elif not experiment.measure.predict or isinstance(experiment.executor, SimulatedExecutor):
        return None
    elif isinstance(work, PromptsWorkload | RandomWorkload | TrafficWorkload):
        of = of_requests
    elif isinstance(work, QualityWorkload) and work.speed is not None:
        of = of_speed
    else:
        raise WorkbenchError(f"measure.predict: the cost model says nothing of a workload of kind {work.kind!r}")
    return {"variants": {name: of(each, here) for name, each in _variants(experiment).items()}}


class Here:
    """Ceilings of this machine, each measured once, as a `Hardware` value."""

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
    """Predict each length's prefill, and the decode step in the middle of its output."""
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


def of_speed(experiment: Experiment, here: Here) -> dict[str, Any]:
    """Predict the tokens a second of one decoding sequence, by context length."""
    assert isinstance(experiment.workload, QualityWorkload) and experiment.workload.speed is not None
    part = experiment.workload.speed
    timed = with_model(experiment, part.model, part.dtype)
    sizes = sizes_of(timed)
    hardware, cost = here(sizes, spec_of(timed)[1]), cost_of(sizes)
    steps = {str(context): seconds([cost([(context, 1)], 1)], hardware) for context in part.contexts}
    rates = {context: 1 / time for context, time in steps.items()}
    return {"flops_per_s": hardware.flops, "bytes_per_s": hardware.bandwidth, "decode_tokens_per_s": rates}


def of_requests(experiment: Experiment, here: Here) -> dict[str, Any]:
    """Predict latencies and rates with the real scheduler on a simulated clock that takes each step's bound.

    With speculation all drafts count as accepted. Without a cache, requests run one after another."""
    sizes, dtype = sizes_of(experiment), spec_of(experiment)[1]
    hardware = here(sizes, dtype)
    ceilings = {"flops_per_s": hardware.flops, "bytes_per_s": hardware.bandwidth}
    if isinstance(experiment.executor, UncachedExecutor):
        return ceilings | _anew(experiment, cost_of(sizes), hardware)
    clock = SimulatedExecutor(hardware=hardware)
    changes = {"executor": clock, "speculate": NoSpeculation(), "variants": {}, "judge": None}
    plain = experiment.model_copy(update=changes)
    fleet = fleet_for(plain, tokenizer=tokenizer_of(plain)).run()
    found = results(fleet, experiment.measure.promise, 0.0)
    figures = {f"{key}_p50": found[key]["p50"] for key in ("ttft_s", "tpot_s", "e2el_s")}
    gain = _drafts_gain(experiment, sizes, hardware, here) if figures["tpot_s_p50"] else 1.0
    if gain != 1:
        figures |= {"tpot_s_p50": figures["tpot_s_p50"] / gain, "e2el_s_p50": None}
    return ceilings | figures | {"output_tokens_per_s": gain * found["output_tokens_per_s"]}


def _anew(experiment: Experiment, cost: StepCost, hardware: Hardware) -> dict[str, Any]:
    requests = requests_of(experiment, tokenizer_of(experiment), spec_of(experiment)[0].vocab)
    ttft, tpot = [], []
    for request in requests:
        known = len(request.prompt_ids)
        steps = [
            seconds([cost([(0, length)], 1)], hardware) for length in range(known, known + request.sampling.max_tokens)
        ]
        ttft.append(steps[0])
        tpot += steps[1:]
    return {
        "ttft_s_p50": median(ttft), "tpot_s_p50": median(tpot) if tpot else None, "e2el_s_p50": None,
        "output_tokens_per_s": (len(ttft) + len(tpot)) / (sum(ttft) + sum(tpot)),
    }  # fmt: skip


def _drafts_gain(experiment: Experiment, sizes: Sizes, hardware: Hardware, here: Here) -> float:
    """Times the tokens a second of decode that drafts would give if all stood, contexts left out. Drafts that stop
    where the draft is unsure are as long as is best for them, with the token that was not proposed computed too."""
    speculate = experiment.speculate
    if isinstance(speculate, NoSpeculation):
        return 1.0
    rows, more = experiment.schedule.max_num_seqs, speculate.num_speculative_tokens
    target = cost_of(sizes)
    step, proposing = seconds([target([(0, 1)] * rows, rows)], hardware), 0.0
    stops = isinstance(speculate, DraftModel) and speculate.confidence_threshold > 0
    if isinstance(speculate, DraftModel):
        small = experiment.model_copy(update={"model": ModelPart(name=speculate.model, dtype=speculate.dtype)})
        each = sizes_of(small)
        proposing = seconds([cost_of(each)([(0, 1)] * rows, rows)], here(each, spec_of(small)[1]))

    def gain(drafted: int) -> float:
        check = seconds([target([(0, drafted + 1)] * rows, rows * (drafted + 1))], hardware)
        return (drafted + 1) * step / (check + min(more, drafted + 1) * proposing)

    return max(map(gain, range(more + 1) if stops else [more]))


def chunks(cost: StepCost, prompt: int, most: int) -> list[Cost]:
    """Return the costs of the steps of a prefill, `max_num_batched_tokens` tokens each."""
    starts = range(0, prompt, most)
    return [cost([(at, min(most, prompt - at))], int(at + most >= prompt)) for at in starts]


def seconds(steps: list[Cost], hardware: Hardware) -> float:
    return sum(step.seconds(hardware.flops, hardware.bandwidth) for step in steps)


def _variants(experiment: Experiment) -> dict[str, Experiment]:
    return every_variant(experiment) or {"as given": experiment}
