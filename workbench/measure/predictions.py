"""Predictions of the cost model before variants run: a step takes at least its computing and its reading time.

Both rates are ceilings of this machine, measured now: a matrix product in the model's dtype, and a read of as many
bytes as the weights have."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from compiled_kernels import Backend, backend_problems
from workbench.engine.cache import AUTO_CACHE_BYTES
from workbench.engine.config import ModelConfig
from workbench.errors import WorkbenchError
from workbench.experiment.build import requests_of
from workbench.experiment.experiment import Experiment, PromptsWorkload, RandomWorkload
from workbench.experiment.settings import LengthsWorkload, QualityWorkload, TextsWorkload
from workbench.experiment.variants import every_variant
from workbench.machine.ceilings import ceilings_for, gemm_dtypes
from workbench.measure.processes.prediction import predict_processes
from workbench.measure.quality.costs import with_model
from workbench.measure.sampled_texts import predict_draws
from workbench.measure.simulated import fleet_for, fleet_metrics, sizes_of, step_cost_of
from workbench.measure.simulation import tokenizer_of
from workbench.memory.capacity import spec_and_dtype
from workbench.model.cost import StepCostEstimate, StepCostModel
from workbench.simulate.executor_settings import ProcessesExecutor, SimulatedExecutor, UncachedExecutor
from workbench.simulate.roofline import Hardware, ModelSizes
from workbench.simulate.traffic_settings import TrafficWorkload
from workbench.speculative.config import DraftModel, NoSpeculation

Predictions = dict[str, Any]
ProgressCallback = Callable[[str], None]


def predict_variants(experiment: Experiment, on_progress: ProgressCallback = lambda line: None) -> Predictions | None:
    """Predict every variant, with the ceilings used; None where the experiment asks for no prediction.

    For sampled texts the prediction is of the drawn distributions, not of time, since all variants cost the same."""
    work, here = experiment.workload, MeasuredHardware(on_progress)
    if isinstance(experiment.executor, ProcessesExecutor):
        if experiment.measure.predict:
            raise WorkbenchError("measure.predict: a fleet is predicted by `executor.predict`; leave it out")
        return predict_processes(experiment, on_progress)
    if isinstance(work, TextsWorkload):
        return predict_draws(experiment, on_progress)
    if isinstance(work, LengthsWorkload):
        of: Callable[[Experiment, MeasuredHardware], dict[str, Any]] = predict_lengths
    elif not experiment.measure.predict or isinstance(experiment.executor, SimulatedExecutor):
        return None
    elif isinstance(work, PromptsWorkload | RandomWorkload | TrafficWorkload):
        of = predict_serving
    elif isinstance(work, QualityWorkload) and work.speed is not None:
        of = predict_decode_speed
    else:
        raise WorkbenchError(f"measure.predict: the cost model says nothing of a workload of kind {work.kind!r}")
    return {"variants": {name: of(each, here) for name, each in _variants(experiment).items()}}


class MeasuredHardware:
    """Ceilings of this machine, each measured once, as a `Hardware` value."""

    def __init__(self, on_progress: ProgressCallback = lambda line: None):
        self._tell = on_progress
        self._known: dict[tuple[int, str], Hardware] = {}

    def __call__(self, sizes: ModelSizes, dtype: str) -> Hardware:
        kind = gemm_dtypes(dtype)[0]
        size = round(sizes.weight_bytes)
        if (size, kind) not in self._known:
            self._tell("measuring what this machine reads and multiplies at best")
            compiled = backend_problems()[Backend.INDUCTOR] is None
            with tempfile.TemporaryDirectory() as folder:  # what was measured on another day is no part of this run
                found = ceilings_for(size, dtypes=gemm_dtypes(kind), compiled=compiled, cache_dir=Path(folder))
            reads = found.read_ceiling(size).value
            self._known[size, kind] = Hardware(
                name="here", flops=found.gemm_ceiling(kind).value, bandwidth=reads, network=reads, link=reads,
                cpu_link=reads, memory=(sizes.weight_bytes + AUTO_CACHE_BYTES) / SimulatedExecutor().memory,
                source="measured in this run",
            )  # fmt: skip
        return self._known[size, kind]


def predict_lengths(experiment: Experiment, measured_hardware: MeasuredHardware) -> dict[str, Any]:
    """Predict each length's prefill, and the decode step in the middle of its output."""
    assert isinstance(experiment.workload, LengthsWorkload)
    sizes, dtype = sizes_of(experiment), spec_and_dtype(experiment)[1]
    hardware, cost = measured_hardware(sizes, dtype), step_cost_of(sizes)
    uncached = isinstance(experiment.executor, UncachedExecutor)
    found = []
    for prompt, output in experiment.workload.lengths:
        most = prompt if uncached else experiment.schedule.max_num_batched_tokens
        prefill = prefill_steps(cost, prompt, most)
        known = prompt + output // 2
        decode = cost([(0, known)], 1) if uncached else cost([(known - 1, 1)], 1)
        times = {
            "prefill_s": roofline_seconds(prefill, hardware),
            "decode_step_s": roofline_seconds([decode], hardware),
        }
        times["decode_s"] = (output - 1) * times["decode_step_s"]
        found.append({
            "prompt_tokens": prompt, "output_tokens": output, **times,
            "e2el_s": times["prefill_s"] + times["decode_s"],
            "prefill_flops": sum(each.flops for each in prefill), "prefill_bytes": sum(each.bytes for each in prefill),
            "decode_flops": decode.flops, "decode_bytes": decode.bytes,
        })  # fmt: skip
    return {"flops_per_s": hardware.flops, "bytes_per_s": hardware.bandwidth, "lengths": found}


def predict_decode_speed(experiment: Experiment, measured_hardware: MeasuredHardware) -> dict[str, Any]:
    """Predict the tokens a second of one decoding sequence, by context length."""
    assert isinstance(experiment.workload, QualityWorkload) and experiment.workload.speed is not None
    part = experiment.workload.speed
    timed = with_model(experiment, part.model, part.dtype)
    sizes = sizes_of(timed)
    hardware, cost = measured_hardware(sizes, spec_and_dtype(timed)[1]), step_cost_of(sizes)
    steps = {str(context): roofline_seconds([cost([(context, 1)], 1)], hardware) for context in part.contexts}
    rates = {context: 1 / time for context, time in steps.items()}
    return {"flops_per_s": hardware.flops, "bytes_per_s": hardware.bandwidth, "decode_tokens_per_s": rates}


def predict_serving(experiment: Experiment, measured_hardware: MeasuredHardware) -> dict[str, Any]:
    """Predict latencies and rates with the real scheduler on a simulated clock that takes each step's bound.

    With speculation all drafts count as accepted. Without a cache, requests run one after another."""
    sizes, dtype = sizes_of(experiment), spec_and_dtype(experiment)[1]
    hardware = measured_hardware(sizes, dtype)
    ceilings = {"flops_per_s": hardware.flops, "bytes_per_s": hardware.bandwidth}
    if isinstance(experiment.executor, UncachedExecutor):
        return ceilings | _predict_uncached(experiment, step_cost_of(sizes), hardware)
    clock = SimulatedExecutor(hardware=hardware)
    changes = {"executor": clock, "speculate": NoSpeculation(), "variants": {}, "judge": None}
    plain = experiment.model_copy(update=changes)
    fleet = fleet_for(plain, tokenizer=tokenizer_of(plain)).run()
    found = fleet_metrics(fleet, experiment.measure.slo, 0.0)
    figures = {f"{key}_p50": found[key]["p50"] for key in ("ttft_s", "tpot_s", "e2el_s")}
    gain = _speculation_speedup_bound(experiment, sizes, hardware, measured_hardware) if figures["tpot_s_p50"] else 1.0
    if gain != 1:
        figures |= {"tpot_s_p50": figures["tpot_s_p50"] / gain, "e2el_s_p50": None}
    return ceilings | figures | {"output_tokens_per_s": gain * found["output_tokens_per_s"]}


def _predict_uncached(experiment: Experiment, cost: StepCostModel, hardware: Hardware) -> dict[str, Any]:
    requests = requests_of(experiment, tokenizer_of(experiment), spec_and_dtype(experiment)[0].vocab_size)
    ttft, tpot = [], []
    for request in requests:
        known = len(request.prompt_ids)
        steps = [
            roofline_seconds([cost([(0, length)], 1)], hardware)
            for length in range(known, known + request.sampling.max_tokens)
        ]
        ttft.append(steps[0])
        tpot += steps[1:]
    return {
        "ttft_s_p50": median(ttft), "tpot_s_p50": median(tpot) if tpot else None, "e2el_s_p50": None,
        "output_tokens_per_s": (len(ttft) + len(tpot)) / (sum(ttft) + sum(tpot)),
    }  # fmt: skip


def _speculation_speedup_bound(
    experiment: Experiment, sizes: ModelSizes, hardware: Hardware, measured_hardware: MeasuredHardware
) -> float:
    """Times the tokens a second of decode that drafts would give if all stood, contexts left out. Drafts that stop
    where the draft is unsure are as long as is best for them, with the token that was not proposed computed too."""
    speculate = experiment.speculate
    if isinstance(speculate, NoSpeculation):
        return 1.0
    rows, more = experiment.schedule.max_num_seqs, speculate.num_speculative_tokens
    target = step_cost_of(sizes)
    step, proposing = roofline_seconds([target([(0, 1)] * rows, rows)], hardware), 0.0
    stops = isinstance(speculate, DraftModel) and speculate.stops_early
    if isinstance(speculate, DraftModel) and speculate.is_target:
        layers = spec_and_dtype(experiment)[0].layers
        proposing = step * (len(layers) if speculate.layers is None else len(speculate.layers)) / len(layers)
    elif isinstance(speculate, DraftModel):
        small = experiment.model_copy(update={"model": ModelConfig(name=speculate.model, dtype=speculate.dtype)})
        each = sizes_of(small)
        proposing = roofline_seconds(
            [step_cost_of(each)([(0, 1)] * rows, rows)], measured_hardware(each, spec_and_dtype(small)[1])
        )

    def gain(drafted: int) -> float:
        check = roofline_seconds([target([(0, drafted + 1)] * rows, rows * (drafted + 1))], hardware)
        return (drafted + 1) * step / (check + min(more, drafted + 1) * proposing)

    return max(map(gain, range(more + 1) if stops else [more]))


def prefill_steps(cost: StepCostModel, prompt: int, max_num_batched_tokens: int) -> list[StepCostEstimate]:
    """Return the costs of the steps of a prefill, `max_num_batched_tokens` tokens each."""
    starts = range(0, prompt, max_num_batched_tokens)
    return [
        cost([(at, min(max_num_batched_tokens, prompt - at))], int(at + max_num_batched_tokens >= prompt))
        for at in starts
    ]


def roofline_seconds(steps: list[StepCostEstimate], hardware: Hardware) -> float:
    return sum(step.seconds(hardware.flops, hardware.bandwidth) for step in steps)


def _variants(experiment: Experiment) -> dict[str, Experiment]:
    return every_variant(experiment) or {"as given": experiment}
