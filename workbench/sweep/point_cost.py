"""Estimate a point from shapes before it runs: bytes, and seconds at this machine's ceilings."""

from __future__ import annotations

from workbench.engine.cache import AUTO_CACHE_BYTES
from workbench.engine.config import DTYPES
from workbench.engine.loaded_model import weight_format
from workbench.experiment.experiment import Experiment, ServedRequests, WorkloadCost
from workbench.machine.ceilings import ceilings_for, gemm_dtypes
from workbench.measure.simulated import sizes_of, step_cost_of
from workbench.memory.capacity import bytes_by_table, meta_kv_store, spec_and_dtype
from workbench.model.cost import StepCostEstimate, StepCostModel
from workbench.model.memory import estimate_memory
from workbench.simulate.executor_settings import RealExecutor


class CachedCeilings:
    """The peak FLOP/s and bytes/s of this machine, each measured only once.

    `contention` is the largest share that other processes took during a measurement.
    """

    def __init__(self) -> None:
        self.contention = 0.0
        self._known: dict[tuple[int, str], tuple[float, float]] = {}

    def rates(self, working_set: int, dtype: str) -> tuple[float, float]:
        kind = gemm_dtypes(dtype)[0]
        if (working_set, kind) not in self._known:
            ceilings = ceilings_for(working_set, dtypes=gemm_dtypes(kind))
            gemm, read = ceilings.gemm_ceiling(kind), ceilings.read_ceiling(working_set)
            self.contention = max(self.contention, gemm.others_cpu_share or 0.0, read.others_cpu_share or 0.0)
            self._known[working_set, kind] = gemm.value, read.value
        return self._known[working_set, kind]


def cost_key(served: ServedRequests) -> str:
    """Return a text that is equal for requests that take equal time and memory."""
    mine = {"model", "attention", "cache", "schedule"}
    settings = served.experiment.model_dump_json(include=mine)
    return f"{settings} {sorted(served.lengths.items())} {served.repetitions}"


def served_bytes(served: ServedRequests) -> int:
    """Return the bytes of weights and activations, and of the cache of the sequences that run at the same time."""
    experiment = served.experiment
    spec, dtype = spec_and_dtype(experiment)
    model, cache = experiment.model, experiment.cache
    tokens = min(spec.max_position_embeddings, max(prompt + output for prompt, output in served.lengths))
    found = estimate_memory(
        spec, bytes_by_table(meta_kv_store(spec, cache, dtype)), tokens, _max_concurrent(served),
        DTYPES[dtype].itemsize, weight_format(model, experiment.attention),
        experiment.schedule.max_num_batched_tokens, cache.page_size,
    )  # fmt: skip
    return found.total_bytes - found.cache_bytes + min(found.cache_bytes, AUTO_CACHE_BYTES)


def served_seconds(served: ServedRequests, machine: CachedCeilings) -> float:
    """Return a lower bound of a run in seconds: each step takes its compute or its memory time at the machine's
    measured ceilings.
    """
    sizes, dtype = sizes_of(served.experiment), spec_and_dtype(served.experiment)[1]
    rates, cost = machine.rates(round(sizes.weight_bytes), dtype), step_cost_of(sizes)
    prefill = sum(each.seconds(*rates) for each in _prefill_costs(served, cost))
    steps, rows, context = decode_steps(served)
    decode = steps * cost([(context, 1)] * rows, rows).seconds(*rates) if steps else 0.0
    return served.repetitions * (prefill + decode)


def _prefill_costs(served: ServedRequests, cost: StepCostModel) -> list[StepCostEstimate]:
    """Return the costs of steps that are filled with prompts in turn."""
    most = served.experiment.schedule.max_num_batched_tokens
    steps: list[StepCostEstimate] = []
    spans: list[tuple[int, int]] = []
    room = most
    for (prompt, _), count in served.lengths.items():
        for _ in range(count):
            start = 0
            while start < prompt:
                taken = min(room, prompt - start)
                spans.append((start, taken))
                start, room = start + taken, room - taken
                if not room:
                    steps.append(cost(spans, len(spans)))
                    spans, room = [], most
    return [*steps, cost(spans, len(spans))] if spans else steps


def decode_steps(served: ServedRequests) -> tuple[int, int, int]:
    """Return the number of decode steps, the mean number of sequences in a step, and their mean context, as if free
    slots were refilled at once.
    """
    tokens = sum(count * (output - 1) for (_, output), count in served.lengths.items())
    if not tokens:
        return 0, 0, 0
    seen = sum(count * (output - 1) * (prompt + output / 2) for (prompt, output), count in served.lengths.items())
    steps = max(max(output for _, output in served.lengths) - 1, -(-tokens // _max_concurrent(served)))
    return steps, max(1, round(tokens / steps)), round(seen / tokens)


def _max_concurrent(served: ServedRequests) -> int:
    return min(served.experiment.schedule.max_num_seqs, sum(served.lengths.values()))


def point_cost(experiment: Experiment) -> WorkloadCost | None:
    """Return the requests and bytes that the run of a point takes, computed from shapes.

    Returns None where shapes do not suffice: a simulation, texts without a cache, or a workload whose steps are its
    result. WorkbenchError where the model or the workload is impossible.
    """
    spec, _ = spec_and_dtype(experiment)
    experiment.cache.check(len(spec.layers), experiment.cache.page_size)
    if not isinstance(experiment.executor, RealExecutor) or experiment.model.device != "cpu":
        return None
    return experiment.workload.cost(experiment)
