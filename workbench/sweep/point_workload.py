"""Derive a point's workload from shapes before it runs: requests served, tokens processed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from workbench.engine.cache import AUTO_CACHE_BYTES
from workbench.engine.config import DTYPES
from workbench.engine.loaded_model import weight_format
from workbench.errors import WorkbenchError
from workbench.experiment.build import clients_of, requests_of
from workbench.experiment.experiment import Experiment
from workbench.experiment.settings import LengthsWorkload, PrefillInterferenceWorkload, QualityWorkload
from workbench.experiment.variants import reference_experiment
from workbench.machine.ceilings import ceilings_for, gemm_dtypes
from workbench.measure.quality.costs import with_model
from workbench.measure.simulated import sizes_of, step_cost_of
from workbench.measure.simulation import tokenizer_of
from workbench.memory.capacity import bytes_by_table, meta_kv_store, spec_and_dtype
from workbench.model.cost import StepCostEstimate, StepCostModel
from workbench.model.memory import estimate_memory
from workbench.simulate.executor_settings import RealExecutor

RequestLengths = Mapping[tuple[int, int], int]  # (prompt, output) tokens -> so many requests


class CachedCeilings:
    """Peak FLOP/s and bytes/s of this machine, each measured once.

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


@dataclass(frozen=True)
class ServedRequests:
    """Requests served by the model of `experiment` with its cache and schedule, `repetitions` times."""

    experiment: Experiment
    lengths: RequestLengths
    repetitions: int = 1

    @property
    def max_concurrent(self) -> int:
        return min(self.experiment.schedule.max_num_seqs, sum(self.lengths.values()))

    @property
    def cost_key(self) -> str:
        """Return a text that is equal for workloads of equal time and memory."""
        mine = {"model", "attention", "cache", "schedule"}
        return f"{self.experiment.model_dump_json(include=mine)} {sorted(self.lengths.items())} {self.repetitions}"

    def bytes(self) -> int:
        """Return the bytes of weights, activations, and the cache of as many sequences as run at once."""
        spec, dtype = spec_and_dtype(self.experiment)
        model, cache = self.experiment.model, self.experiment.cache
        tokens = min(spec.max_position_embeddings, max(prompt + output for prompt, output in self.lengths))
        found = estimate_memory(
            spec, bytes_by_table(meta_kv_store(spec, cache, dtype)), tokens, self.max_concurrent,
            DTYPES[dtype].itemsize, weight_format(model, self.experiment.attention),
            self.experiment.schedule.max_num_batched_tokens, cache.page_size,
        )  # fmt: skip
        return found.total_bytes - found.cache_bytes + min(found.cache_bytes, AUTO_CACHE_BYTES)

    def seconds(self, machine: CachedCeilings) -> float:
        """Return a lower bound in seconds: each step takes its compute or its memory time at the machine's measured
        ceilings.
        """
        sizes, dtype = sizes_of(self.experiment), spec_and_dtype(self.experiment)[1]
        rates, cost = machine.rates(round(sizes.weight_bytes), dtype), step_cost_of(sizes)
        prefill = sum(each.seconds(*rates) for each in self._prefill_costs(cost))
        steps, rows, context = self._decode_steps()
        decode = steps * cost([(context, 1)] * rows, rows).seconds(*rates) if steps else 0.0
        return self.repetitions * (prefill + decode)

    def _prefill_costs(self, cost: StepCostModel) -> list[StepCostEstimate]:
        """Return the costs of steps that are filled with prompts in turn."""
        most = self.experiment.schedule.max_num_batched_tokens
        steps: list[StepCostEstimate] = []
        spans: list[tuple[int, int]] = []
        room = most
        for (prompt, _), count in self.lengths.items():
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

    def _decode_steps(self) -> tuple[int, int, int]:
        """Return the number of decode steps, and the mean sequences and context of each, as if free slots were refilled
        at once.
        """
        tokens = sum(count * (output - 1) for (_, output), count in self.lengths.items())
        if not tokens:
            return 0, 0, 0
        seen = sum(count * (output - 1) * (prompt + output / 2) for (prompt, output), count in self.lengths.items())
        steps = max(max(output for _, output in self.lengths) - 1, -(-tokens // self.max_concurrent))
        return steps, max(1, round(tokens / steps)), round(seen / tokens)


@dataclass(frozen=True)
class PointWorkload:
    """The workload of one point. It lasts `min_seconds` on any machine, for requests arrive over time."""

    served: tuple[ServedRequests, ...]
    min_seconds: float = 0.0
    other_bytes: int = 0


def point_workload(experiment: Experiment) -> PointWorkload | None:
    """Derive the workload of an experiment.

    Returns None where shapes do not suffice: a simulation, texts without a cache, or a workload whose steps are its
    result. WorkbenchError where the model or the workload is impossible.
    """
    spec, _ = spec_and_dtype(experiment)
    experiment.cache.check(len(spec.layers), experiment.cache.page_size)
    workload = experiment.workload
    if not isinstance(experiment.executor, RealExecutor) or experiment.model.device != "cpu":
        return None
    if isinstance(workload, QualityWorkload):
        return _quality_workload(experiment, workload, spec.max_position_embeddings, spec.vocab_size)
    if isinstance(workload, PrefillInterferenceWorkload):
        lengths = {(workload.prompt_tokens, workload.output_tokens): workload.running + 1, (workload.long_tokens, 1): 1}
        return PointWorkload((ServedRequests(experiment, lengths, workload.rounds + 1),))
    if isinstance(workload, LengthsWorkload):
        return PointWorkload((ServedRequests(experiment, Counter(workload.lengths), workload.rounds + 1),))
    if experiment.is_comparison:
        return None
    requests = requests_of(experiment, tokenizer_of(experiment), spec.vocab_size)
    if not requests:
        return None
    lengths = Counter((len(each.prompt_ids), each.sampling.max_tokens) for each in requests)
    times = experiment.measure.warmup + 1
    last = 0.0 if clients_of(experiment) else max(each.arrival for each in requests)
    return PointWorkload((ServedRequests(experiment, lengths, times),), last * times)


def _quality_workload(experiment: Experiment, work: QualityWorkload, max_context: int, vocab: int) -> PointWorkload:
    """Return scored windows, one alone to measure memory, greedy outputs and copying, of the reference and of the
    point.
    """
    if (work.context or 0) > max_context:
        raise WorkbenchError(f"workload.context {work.context}: above the model's own, {max_context}")
    context = work.context or max_context
    if work.decode + 2 > context:
        raise WorkbenchError(f"workload.decode {work.decode}: must be below the context of {context}")
    lengths: Counter[tuple[int, int]] = Counter()
    lengths[max(1, context - work.decode), work.decode] += work.windows
    lengths[max(1, min(context // 2, context - work.greedy_tokens)), work.greedy_tokens] += work.greedy_prompts
    if work.copying is not None:
        tokens = context * 9 // 10 if work.copying.tokens == "auto" else work.copying.tokens
        lengths[tokens, 1] += work.copying.names * (len(work.copying.depths) + 1)
    served = [ServedRequests(reference_experiment(experiment), lengths), ServedRequests(experiment, lengths)]
    if work.speed is not None:
        steps = work.speed.tokens * (work.speed.rounds + 1)
        for each, dtype in ((reference_experiment(experiment), None), (experiment, work.speed.dtype)):
            alone = with_model(each, work.speed.model, dtype)
            alone = alone.model_copy(update={"schedule": alone.schedule.model_copy(update={"max_num_seqs": 1})})
            served.append(ServedRequests(alone, dict.fromkeys(((one, steps) for one in work.speed.contexts), 1)))
    return PointWorkload(tuple(served), other_bytes=work.windows * context // 2 * vocab * 4)  # the reference's logits
