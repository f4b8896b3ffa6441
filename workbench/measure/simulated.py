"""Build a simulated run of an experiment: its instances, and the same requests, scheduler and metrics as in a real run,
without weights."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from workbench.engine.cache import AUTO_CACHE_BYTES
from workbench.engine.config import DTYPES, CacheConfig
from workbench.engine.loaded_model import weight_format
from workbench.errors import WorkbenchError
from workbench.experiment.build import clients_of, requests_of
from workbench.experiment.experiment import SLO, Experiment
from workbench.kv_cache.settings import NoOffload, RadixPrefixCache
from workbench.machine.ceilings import ceilings_for, gemm_dtypes
from workbench.measure.jobs import job_metrics
from workbench.memory.capacity import meta_kv_store, page_bytes, spec_and_dtype
from workbench.memory.ranks import rank_memories
from workbench.model.cost import StepCostModel
from workbench.model.memory import weight_bytes
from workbench.model.quantized import WeightFormat
from workbench.model.spec import ModelSpec
from workbench.prompt.tokenization.tokenizer import Tokenizer
from workbench.runs.record import Record
from workbench.scheduler.policies import parse_policy
from workbench.simulate.arrival import Arrival
from workbench.simulate.events import FleetEventAdapter
from workbench.simulate.executor_settings import SimulatedExecutor
from workbench.simulate.fleet import Fleet, FleetListener, InstanceFailure, InstancePool, KVTransfer
from workbench.simulate.instance import Instance, InstanceSpec, instance_spec
from workbench.simulate.job import symbolic_prompt
from workbench.simulate.roofline import (
    Hardware,
    ModelSizes,
    all_reduce_bytes_per_token,
    bubble_share,
    named_hardware,
    roofline_step_times,
)
from workbench.simulate.source import ClosedLoopSource, OpenLoopSource, TrafficSource
from workbench.simulate.step_times import TICKS_PER_SECOND, StepTimeModel, fit_step_times
from workbench.trace.events import Event

THIS_MACHINE = "here"


def sizes_of(experiment: Experiment) -> ModelSizes:
    """Return the model's weight and cache bytes in the experiment's formats, without loading it."""
    format = weight_format(experiment.model, experiment.attention)
    return model_sizes(*spec_and_dtype(experiment), format, experiment.cache)


def model_sizes(spec: ModelSpec, dtype: str, format: WeightFormat, cache: CacheConfig) -> ModelSizes:
    """Return the weight and cache bytes of `spec` in these formats."""
    store = meta_kv_store(spec, cache, dtype)
    weights = weight_bytes(spec, DTYPES[dtype].itemsize, format)
    return ModelSizes(spec, weights, store.groups, tuple(size / cache.page_size for size in page_bytes(store)))


def step_cost_of(sizes: ModelSizes) -> StepCostModel:
    """Return the cost model of a step, which counts FLOPs and bytes as the real runner does."""
    weight = sizes.weight_bytes / sizes.spec.num_parameters
    numbers = sum(layer.attention.cache_values_per_token for layer in sizes.spec.layers)
    # a model with recurrent states only has no keys and values
    return StepCostModel(sizes.spec, weight, weight, sizes.lasting_bytes / max(1, numbers))


def hardware_for(executor: SimulatedExecutor, sizes: ModelSizes, dtype: str) -> Hardware:
    """Return the hardware of a simulated executor: a data sheet's by name, given values, or this machine's ceilings
    measured for a model of this size.
    """
    if isinstance(executor.hardware, Hardware):
        return executor.hardware
    if executor.hardware != THIS_MACHINE:
        return named_hardware(executor.hardware)
    working_set = round(sizes.weight_bytes)
    ceilings = ceilings_for(working_set, dtypes=gemm_dtypes(dtype))
    reads, flops = ceilings.read_ceiling(working_set).value, ceilings.gemm_ceiling(dtype).value
    memory = (sizes.weight_bytes + AUTO_CACHE_BYTES) / executor.memory
    return Hardware(name=THIS_MACHINE, flops=flops, bandwidth=reads, memory=memory, link=reads, network=reads,
                    cpu_link=reads, source="measured on this machine")  # fmt: skip


def instance_spec_for(experiment: Experiment, times: StepTimeModel | None = None) -> InstanceSpec:
    """Return the instance that an experiment simulates. `times`, if given, replaces the step times of its executor.

    Raises WorkbenchError if the model leaves no memory for a cache."""
    executor = simulated_executor_of(experiment)
    sizes, dtype = sizes_of(experiment), spec_and_dtype(experiment)[1]
    if experiment.parallel.tensor not in (1, executor.gpus):
        raise WorkbenchError(
            f"parallel.tensor {experiment.parallel.tensor}: a simulated instance has executor.gpus {executor.gpus}; "
            "remove parallel.tensor"
        )
    hardware, schedule, cache = hardware_for(executor, sizes, dtype), experiment.schedule, experiment.cache
    prefix = cache.prefix
    return instance_spec(
        sizes,
        hardware,
        schedule,
        gpus=executor.gpus * executor.pipeline,
        page_size=cache.page_size,
        cache_bytes=_cache_bytes(experiment, executor, hardware, dtype),
        memory_share=executor.memory,
        pages=None if cache.pages == "auto" else cache.pages,
        prefix=isinstance(prefix, RadixPrefixCache),
        ttl=prefix.ttl if isinstance(prefix, RadixPrefixCache) else None,
        policy=parse_policy(schedule.policy, schedule.kind),
        times=times or _times(executor, sizes, hardware),
    )


def pools_for(experiment: Experiment, spec: InstanceSpec) -> tuple[InstancePool, InstancePool | None, KVTransfer]:
    """Return the prefill pool, the decode pool if there is one, and the cost of a KV transfer between them."""
    executor = simulated_executor_of(experiment)
    pool, decode = InstancePool(spec, executor.instances, executor.router), executor.decode
    if decode is None:
        return pool, None, KVTransfer()
    hardware = hardware_for(executor, sizes_of(experiment), spec_and_dtype(experiment)[1])
    speed = decode.bytes_per_second or hardware.network * executor.gpus * executor.pipeline
    receiving = replace(spec, receives_kv=True, prefix=False, ttl=None)
    return pool, InstancePool(receiving, decode.instances, decode.router), KVTransfer(speed, decode.latency)


def failures_of(experiment: Experiment) -> tuple[InstanceFailure, ...]:
    return tuple(
        InstanceFailure(each.instance, each.at, each.down) for each in simulated_executor_of(experiment).failures
    )


def simulated_executor_of(experiment: Experiment) -> SimulatedExecutor:
    if not isinstance(experiment.executor, SimulatedExecutor):
        raise WorkbenchError("executor: must be simulated here; write `executor: {kind: simulated}`")
    if (samples := experiment.sampling.num_sequences) > 1:
        raise WorkbenchError(f"sampling: {samples} samples or beams; a simulated request has one: set n to 1")
    if experiment.cache.evict is not None or not isinstance(experiment.cache.offload, NoOffload):
        raise WorkbenchError("cache: evict and offload are not simulated; remove them, or set executor: real")
    if experiment.speculate.kind != "none":
        raise WorkbenchError("speculate: a simulation does not know which drafts are accepted; set executor: real")
    if experiment.batch_invariant:
        raise WorkbenchError("batch_invariant: a simulation computes no logits; remove it, or set executor: real")
    schedule = experiment.schedule
    if schedule.preemption_mode == "offload" or schedule.overflow != "refuse":
        which = (
            "preemption_mode: offload" if schedule.preemption_mode == "offload" else f"overflow: {schedule.overflow}"
        )
        raise WorkbenchError(f"schedule.{which} is not simulated; remove it, or set executor: real")
    return experiment.executor


def _times(executor: SimulatedExecutor, sizes: ModelSizes, hardware: Hardware) -> StepTimeModel:
    if executor.steps is not None:
        return fit_step_times(Record.open(executor.steps).steps.to_pylist(), executor.steps)
    shares = (executor.compute_share, executor.memory_share, executor.overhead)
    return roofline_step_times(sizes, hardware, executor.gpus, *shares, executor.pipeline, executor.microbatches)


def _cache_bytes(experiment: Experiment, executor: SimulatedExecutor, hardware: Hardware, dtype: str) -> float | None:
    """Return the bytes available for an instance's cache, each key and value counted once, limited by the rank with the
    least free memory. None for one accelerator."""
    if executor.gpus * executor.pipeline == 1:
        return None
    spec, format = spec_and_dtype(experiment)[0], weight_format(experiment.model, experiment.attention)
    cache = experiment.cache
    own: dict[str, Any] = {"context": spec.max_position_embeddings, "page_size": cache.page_size}
    (whole,) = rank_memories(spec, dtype, format, cache, **own)
    cut: dict[str, Any] = {"tensor": executor.gpus, "pipeline": executor.pipeline, "setting": "executor.gpus"}
    ranks = rank_memories(spec, dtype, format, cache, **cut, **own)
    return min(
        (executor.memory * hardware.memory - each.memory.weight_bytes)
        * whole.memory.sequence_bytes
        / each.memory.sequence_bytes
        for each in ranks
    )


def fleet_for(
    experiment: Experiment, on_event: Callable[[Event], None] | None = None, tokenizer: Tokenizer | None = None
) -> Fleet:
    """Build the fleet of an experiment with its traffic.

        fleet = workbench.fleet_for(experiment, recorder.record).run()

    Args:
        experiment: An experiment with a simulated executor.
        on_event: Receives every event; None records nothing.
        tokenizer: Encodes the texts of workloads other than traffic.
    """
    machine = instance_spec_for(experiment)
    pool, decode, transfer = pools_for(experiment, machine)
    listener: FleetListener | None = (
        FleetEventAdapter(on_event, step_cost_of(sizes_of(experiment))) if on_event is not None else None
    )
    source, prompts = _source(experiment, tokenizer)
    return Fleet(
        source, pool, decode, transfer=transfer, failures=failures_of(experiment), prompts=prompts, listener=listener
    )


def _source(experiment: Experiment, tokenizer: Tokenizer | None) -> tuple[TrafficSource, Callable]:
    if (traffic := experiment.workload.traffic()) is not None:
        return traffic, symbolic_prompt
    requests = requests_of(experiment, tokenizer, spec_and_dtype(experiment)[0].vocab_size)
    arrivals = [
        Arrival(request.arrival, len(request.prompt_ids), request.sampling.max_tokens, request.request_id)
        for request in requests
    ]
    clients = clients_of(experiment)
    source = OpenLoopSource(arrivals) if clients is None else ClosedLoopSource(arrivals, *clients)
    return source, lambda arrival, number: requests[number].prompt_ids


def fleet_metrics(fleet: Fleet, slo: SLO, started_at: float) -> dict[str, Any]:
    """Return summary metrics of a fleet's requests, whose keys name the units. `started_at` is the wall-clock time at
    the start."""
    jobs = fleet.jobs
    seconds = (fleet.now - jobs[0].arrival_time) / TICKS_PER_SECOND if jobs else 0.0
    found = job_metrics(jobs, slo, seconds)
    prompt, cached = found["tokens"]["prompt"], found["tokens"]["cached"]
    return found | {
        "simulated_s": seconds,
        "wall_s": time.perf_counter() - started_at,
        "handed_over": _handed_over(fleet, seconds),
        "cache_hit_rate": cached / prompt if prompt and any(i.spec.prefix for i in fleet.instances) else None,
        "cache_waste": cache_waste(fleet.instances),
        "instances": [instance_metrics(instance, fleet.now) for instance in fleet.instances],
    }


def _handed_over(fleet: Fleet, seconds: float) -> dict[str, Any] | None:
    """Return the sequences and bytes transferred from the prefill to the decode pool; None with one pool."""
    if len(fleet.pools) == 1:
        return None
    return {
        "sequences": fleet.handed_over,
        "bytes": fleet.sent_bytes,
        "bytes_per_s": fleet.sent_bytes / seconds if seconds else None,
        "transfer_bytes_per_s": fleet.transfer.bytes_per_second,
    }


def cache_waste(instances: list[Instance]) -> float | None:
    """Return the fraction of the space in used pages that holds no tokens, over all steps.

    Returns None if pages are shared or freed early, because token counts then do not measure page use."""
    tables = [table for instance in instances for table in instance.spec.tables]
    if any(instance.spec.prefix for instance in instances) or any(
        t.sliding_window is not None or t.is_delayed for t in tables
    ):
        return None
    reserved = sum(instance.counters.reserved_tokens for instance in instances)
    return 1 - sum(instance.counters.stored_tokens for instance in instances) / reserved if reserved else None


def instance_metrics(instance: Instance, now: int) -> dict[str, Any]:
    tally = instance.counters
    return {
        "instance": instance.number,
        "steps": tally.steps,
        "plans": tally.plans,
        "utilization": tally.busy_ticks / now if now else None,
        "sequences_mean": tally.sequence_steps / tally.steps if tally.steps else None,
        "sequences_max": tally.max_sequences,
        "prefill_tokens": tally.prefill_tokens,
        "decode_tokens": tally.decode_tokens,
    }


def describe_simulation(experiment: Experiment) -> dict[str, Any]:
    """Describe the simulated instances by values that follow from the experiment but are not stated in it."""
    machine, executor = instance_spec_for(experiment), simulated_executor_of(experiment)
    parallel: dict[str, Any] = {}
    spec = sizes_of(experiment).spec
    if executor.gpus > 1:
        parallel |= {
            "tensor": executor.gpus,
            "all_reduce_bytes_per_token": all_reduce_bytes_per_token(spec, executor.gpus),
        }
    if executor.pipeline > 1:
        microbatches = executor.microbatches or executor.pipeline
        parallel |= {"pipeline": executor.pipeline, "microbatches": microbatches}
        parallel |= {"bubble_share": bubble_share(executor.pipeline, microbatches)}
    return {
        "model": spec.name,
        **parallel,
        "step_times": machine.times.name,
        "instances": executor.instances + (executor.decode.instances if executor.decode else 0),
        "pages": list(machine.pages),
        "page_size": machine.page_size,
        "cache_tokens": min(machine.pages) * machine.page_size,
        "kv_bytes_per_token": machine.kv_bytes_per_token,
    }
