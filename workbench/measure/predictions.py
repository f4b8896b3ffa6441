"""Predict variants by the cost model before they run: a step takes at least its computing time and its reading time.

Both rates are ceilings of this machine, measured in the same run: a matrix product in the model's dtype, and a read of
as many bytes as the weights have."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from compiled_kernels import Backend, backend_problems
from workbench.engine.cache import AUTO_CACHE_BYTES
from workbench.errors import WorkbenchError
from workbench.experiment.experiment import Experiment, Predictions, ProgressCallback
from workbench.experiment.variants import every_variant
from workbench.machine.ceilings import ceilings_for, gemm_dtypes
from workbench.measure.processes.prediction import predict_processes
from workbench.model.cost import StepCostEstimate, StepCostModel
from workbench.simulate.executor_settings import ProcessesExecutor, SimulatedExecutor
from workbench.simulate.roofline import Hardware, ModelSizes


def predict_variants(experiment: Experiment, on_progress: ProgressCallback = lambda line: None) -> Predictions | None:
    """Predict every variant, and return the predictions and the ceilings used; None if neither the experiment nor its
    workload asks for a prediction.
    """
    wanted = experiment.measure.predict
    if isinstance(experiment.executor, ProcessesExecutor):
        if wanted:
            raise WorkbenchError("measure.predict: does not predict fleets; remove it and set `executor.predict`")
        return predict_processes(experiment, on_progress)
    if experiment.workload.is_predicted or wanted and not isinstance(experiment.executor, SimulatedExecutor):
        return experiment.workload.predict(experiment, on_progress)
    return None


def predict_each(
    experiment: Experiment,
    on_progress: ProgressCallback,
    predict: Callable[[Experiment, MeasuredHardware], dict[str, Any]],
) -> Predictions:
    """Return the result of calling `predict` for each variant with this machine's measured ceilings."""
    here = MeasuredHardware(on_progress)
    return {"variants": {name: predict(each, here) for name, each in every_variant(experiment).items()}}


class MeasuredHardware:
    """The ceilings of this machine as a `Hardware` value, each measured only once."""

    def __init__(self, on_progress: ProgressCallback = lambda line: None):
        self._tell = on_progress
        self._known: dict[tuple[int, str], Hardware] = {}

    def __call__(self, sizes: ModelSizes, dtype: str) -> Hardware:
        kind = gemm_dtypes(dtype)[0]
        size = round(sizes.weight_bytes)
        if (size, kind) not in self._known:
            self._tell("measuring this machine's ceilings: read bandwidth and matrix products")
            compiled = backend_problems()[Backend.INDUCTOR] is None
            # an empty cache folder, so that no ceilings stored on other days are used
            with tempfile.TemporaryDirectory() as folder:
                found = ceilings_for(size, dtypes=gemm_dtypes(kind), compiled=compiled, cache_dir=Path(folder))
            reads = found.read_ceiling(size).value
            self._known[size, kind] = Hardware(
                name="here", flops=found.gemm_ceiling(kind).value, bandwidth=reads, network=reads, link=reads,
                cpu_link=reads, memory=(sizes.weight_bytes + AUTO_CACHE_BYTES) / SimulatedExecutor().memory,
                source="measured in this run",
            )  # fmt: skip
        return self._known[size, kind]


def prefill_steps(cost: StepCostModel, prompt: int, max_num_batched_tokens: int) -> list[StepCostEstimate]:
    """Return the cost of each step of a prefill that is cut into chunks of up to `max_num_batched_tokens` tokens."""
    starts = range(0, prompt, max_num_batched_tokens)
    return [
        cost([(at, min(max_num_batched_tokens, prompt - at))], int(at + max_num_batched_tokens >= prompt))
        for at in starts
    ]


def roofline_seconds(steps: list[StepCostEstimate], hardware: Hardware) -> float:
    return sum(step.seconds(hardware.flops, hardware.bandwidth) for step in steps)
