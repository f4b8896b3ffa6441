"""Derive a point's workload from shapes before it runs: requests served, tokens processed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from workbench.engine.load import CACHE_MEMORY, DTYPES
from workbench.errors import WorkbenchError
from workbench.fleet.settings import RealExecutor
from workbench.model.cost import Cost, StepCost
from workbench.model.memory import memory
from workbench.study.cache_of import parts_of, spec_of, store_of
from workbench.study.ceilings import ceilings_for
from workbench.study.experiment import Experiment
from workbench.study.interruption_workload import InterruptionWorkload
from workbench.study.lengths_workload import LengthsWorkload
from workbench.study.quality_costs import with_model
from workbench.study.quality_workload import QualityWorkload
from workbench.study.simulated_machine import cost_of, sizes_of
from workbench.study.simulated_run import tokenizer_of
from workbench.study.variants import reference_of
from workbench.study.workload import clients_of, requests_of

Lengths = Mapping[tuple[int, int], int]  # (prompt, output) tokens -> so many requests


class ThisMachine:
    """Peak FLOP/s and bytes/s of this machine, each measured once.

    `contention` is the largest share that other processes took during a measurement.
    """

    def __init__(self) -> None:
        self.busy = 0.0
        self._known: dict[tuple[int, str], tuple[float, float]] = {}

    def rates(self, working_set: int, dtype: str) -> tuple[float, float]:
        kind = dtype if dtype in ("float32", "bfloat16") else "float32"
        if (working_set, kind) not in self._known:
            ceilings = ceilings_for(working_set, dtypes=(kind,))
            gemm, read = ceilings.gemm(kind), ceilings.read(working_set)
            self.busy = max(self.busy, gemm.others_cpu_share or 0.0, read.others_cpu_share or 0.0)
            self._known[working_set, kind] = gemm.value, read.value
        return self._known[working_set, kind]


@dataclass(frozen=True)
class Served:
    """Requests served by the model of `experiment` with its cache and schedule, `repetitions` times."""

    experiment: Experiment
    lengths: Lengths
    times: int = 1

    @property
    def at_once(self) -> int:
        return min(self.experiment.schedule.max_num_seqs, sum(self.lengths.values()))

    @property
    def likeness(self) -> str:
        """Return a text that is equal for workloads of equal time and memory."""
        mine = {"model", "attention", "cache", "schedule"}
        return f"{self.experiment.model_dump_json(include=mine)} {sorted(self.lengths.items())} {self.times}"

    def bytes(self) -> int:
        """Return the bytes of weights, activations, and the cache of as many sequences as run at once."""
        spec, dtype = spec_of(self.experiment)
        model, cache = self.experiment.model, self.experiment.cache
        tokens = min(spec.context, max(prompt + output for prompt, output in self.lengths))
        found = memory(
            spec, parts_of(store_of(spec, cache, dtype)), tokens, self.at_once, DTYPES[dtype].itemsize,
            model.format,
            self.experiment.schedule.max_num_batched_tokens, cache.page_size,
        )  # fmt: skip
        return found.total_bytes - found.cache_bytes + min(found.cache_bytes, CACHE_MEMORY)

    def seconds(self, machine: ThisMachine) -> float:
        """Return a lower bound in seconds: each step takes its compute or its memory time at the machine's measured
        ceilings.
        """
        sizes, dtype = sizes_of(self.experiment), spec_of(self.experiment)[1]
        rates, cost = machine.rates(round(sizes.weight_bytes), dtype), cost_of(sizes)
        prefill = sum(each.seconds(*rates) for each in self._prefills(cost))
        steps, rows, context = self._decodes()
        decode = steps * cost([(context, 1)] * rows, rows).seconds(*rates) if steps else 0.0
        return self.times * (prefill + decode)

    def _prefills(self, cost: StepCost) -> list[Cost]:
        """Return the costs of steps that are filled with prompts in turn."""
        most = self.experiment.schedule.max_num_batched_tokens
        steps: list[Cost] = []
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

    def _decodes(self) -> tuple[int, int, int]:
        """Return the number of decode steps, and the mean sequences and context of each, as if free slots were refilled
        at once.
        """
        tokens = sum(count * (output - 1) for (_, output), count in self.lengths.items())
        if not tokens:
            return 0, 0, 0
        seen = sum(count * (output - 1) * (prompt + output / 2) for (prompt, output), count in self.lengths.items())
        steps = max(max(output for _, output in self.lengths) - 1, -(-tokens // self.at_once))
        return steps, max(1, round(tokens / steps)), round(seen / tokens)


@dataclass(frozen=True)
class Work:
    """The workload of one point. It lasts `min_seconds` on any machine, for requests arrive over time."""

    served: tuple[Served, ...]
    least_seconds: float = 0.0
    other_bytes: int = 0


def work_of(experiment: Experiment) -> Work | None:
    """Derive the workload of an experiment.

    Returns None where shapes do not suffice: a simulation, texts without a cache, or a workload whose steps are its
    result. WorkbenchError where the model or the workload is impossible.
    """
    spec, _ = spec_of(experiment)
    experiment.cache.check(len(spec.layers), experiment.cache.page_size)
    workload = experiment.workload
    if not isinstance(experiment.executor, RealExecutor) or experiment.model.device != "cpu":
        return None
    if isinstance(workload, QualityWorkload):
        return _quality(experiment, workload, spec.context, spec.vocab)
    if isinstance(workload, InterruptionWorkload):
        lengths = {(workload.prompt_tokens, workload.output_tokens): workload.running + 1, (workload.long_tokens, 1): 1}
        return Work((Served(experiment, lengths, workload.rounds + 1),))
    if isinstance(workload, LengthsWorkload):
        return Work((Served(experiment, Counter(workload.lengths), workload.rounds + 1),))
    if experiment.compares:
        return None
    requests = requests_of(experiment, tokenizer_of(experiment), spec.vocab)
    if not requests:
        return None
    lengths = Counter((len(each.prompt_ids), each.sampling.max_tokens) for each in requests)
    times = experiment.measure.warmup + 1
    last = 0.0 if clients_of(experiment) else max(each.arrival for each in requests)
    return Work((Served(experiment, lengths, times),), last * times)


def _quality(experiment: Experiment, work: QualityWorkload, most: int, vocab: int) -> Work:
    """Return scored windows, one alone to measure memory, greedy outputs and copying, of the reference and of the
    point.
    """
    if (work.context or 0) > most:
        raise WorkbenchError(f"workload.context {work.context}: above the model's own, {most}")
    context = work.context or most
    if work.decode + 2 > context:
        raise WorkbenchError(f"workload.decode {work.decode}: must be below the context of {context}")
    lengths: Counter[tuple[int, int]] = Counter()
    lengths[max(1, context - work.decode), work.decode] += work.windows
    lengths[max(1, min(context // 2, context - work.greedy_tokens)), work.greedy_tokens] += work.greedy_prompts
    if work.copying is not None:
        tokens = context * 9 // 10 if work.copying.tokens == "auto" else work.copying.tokens
        lengths[tokens, 1] += work.copying.names * (len(work.copying.depths) + 1)
    served = [Served(reference_of(experiment), lengths), Served(experiment, lengths)]
    if work.speed is not None:
        steps = work.speed.tokens * (work.speed.rounds + 1)
        for each, dtype in ((reference_of(experiment), None), (experiment, work.speed.dtype)):
            alone = with_model(each, work.speed.model, dtype)
            alone = alone.model_copy(update={"schedule": alone.schedule.model_copy(update={"max_num_seqs": 1})})
            served.append(Served(alone, dict.fromkeys(((one, steps) for one in work.speed.contexts), 1)))
    return Work(tuple(served), other_bytes=work.windows * context // 2 * vocab * 4)  # the reference's logits
