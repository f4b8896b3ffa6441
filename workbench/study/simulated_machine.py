"""The instance that an experiment's model, cache, scheduler and executor settings describe."""

from __future__ import annotations

from dataclasses import replace

from workbench.cache.settings import NoOffload, RadixPrefixCache
from workbench.engine.load import AUTO_CACHE_BYTES, DTYPES
from workbench.engine.schedule import parse_policy
from workbench.engine.scheduler import SchedulerLimits
from workbench.errors import WorkbenchError
from workbench.fleet.fitted import fit_step_times
from workbench.fleet.fleet import InstanceFailure, InstancePool, KVTransfer
from workbench.fleet.hardware import Hardware, named_hardware
from workbench.fleet.machine import InstanceSpec, instance_spec
from workbench.fleet.roofline import ModelSizes, roofline_step_times
from workbench.fleet.settings import SimulatedExecutor
from workbench.fleet.work import StepTimeModel
from workbench.model.cost import StepCostModel
from workbench.model.memory import weight_bytes
from workbench.study.cache_of import spec_and_dtype, meta_kv_store
from workbench.study.capacity import page_bytes
from workbench.study.ceilings import ceilings_for
from workbench.study.experiment import Experiment
from workbench.study.record import Record

THIS_MACHINE = "here"


def sizes_of(experiment: Experiment) -> ModelSizes:
    """Return the model's weight and cache bytes in the experiment's formats, without loading it."""
    spec, dtype = spec_and_dtype(experiment)
    model, cache = experiment.model, experiment.cache
    store = meta_kv_store(spec, cache, dtype)
    weights = weight_bytes(
        spec, DTYPES[dtype].itemsize, model.format
    )
    return ModelSizes(spec, weights, store.groups, tuple(size / cache.page_size for size in page_bytes(store)))


def step_cost_of(sizes: ModelSizes) -> StepCostModel:
    """Return the cost model of a step: FLOPs and bytes, counted as the real runner counts them."""
    weight = sizes.weight_bytes / sizes.spec.num_parameters
    numbers = sum(layer.attention.cache_values_per_token for layer in sizes.spec.layers)
    return StepCostModel(sizes.spec, weight, weight, sizes.lasting_bytes / numbers)


def hardware_for(executor: SimulatedExecutor, sizes: ModelSizes, dtype: str) -> Hardware:
    """Return the named hardware, the given one, or this machine's measured ceilings for a model of this size."""
    if isinstance(executor.hardware, Hardware):
        return executor.hardware
    if executor.hardware != THIS_MACHINE:
        return named_hardware(executor.hardware)
    kind = dtype if dtype in ("float32", "bfloat16") else "float32"
    working_set = round(sizes.weight_bytes)
    ceilings = ceilings_for(working_set, dtypes=(kind,))
    reads, flops = ceilings.read_ceiling(working_set).value, ceilings.gemm_ceiling(kind).value
    memory = (sizes.weight_bytes + AUTO_CACHE_BYTES) / executor.memory
    return Hardware(name=THIS_MACHINE, flops=flops, bandwidth=reads, memory=memory, link=reads, network=reads, host=reads,
                    source="measured on this machine")  # fmt: skip


def instance_spec_for(experiment: Experiment) -> InstanceSpec:
    """Return the instance that an experiment simulates. Raises WorkbenchError where the model leaves no memory for a
    cache."""
    executor = simulated_executor_of(experiment)
    sizes, dtype = sizes_of(experiment), spec_and_dtype(experiment)[1]
    hardware, schedule, cache = hardware_for(executor, sizes, dtype), experiment.schedule, experiment.cache
    prefix = cache.prefix
    return instance_spec(
        sizes,
        hardware,
        SchedulerLimits(
            schedule.max_num_seqs, schedule.max_num_batched_tokens, schedule.chunk_tokens, schedule.chunked_prefill
        ),
        gpus=executor.gpus,
        page_size=cache.page_size,
        memory_share=executor.memory,
        pages=None if cache.pages == "auto" else cache.pages,
        prefix=isinstance(prefix, RadixPrefixCache),
        ttl=prefix.ttl if isinstance(prefix, RadixPrefixCache) else None,
        policy=parse_policy(schedule.policy, schedule.kind),
        times=_times(executor, sizes, hardware),
    )


def pools_for(experiment: Experiment, spec: InstanceSpec) -> tuple[InstancePool, InstancePool | None, KVTransfer]:
    """Return the prefill and decode pools of such instances, and the cost of a KV transfer between them."""
    executor = simulated_executor_of(experiment)
    pool, decode = InstancePool(spec, executor.instances, executor.router), executor.decode
    if decode is None:
        return pool, None, KVTransfer()
    hardware = hardware_for(executor, sizes_of(experiment), spec_and_dtype(experiment)[1])
    speed = decode.bytes_per_second or hardware.network * executor.gpus
    receiving = replace(spec, arrives=True, prefix=False, ttl=None)
    return pool, InstancePool(receiving, decode.instances, decode.router), KVTransfer(speed, decode.latency)


def failures_of(experiment: Experiment) -> tuple[InstanceFailure, ...]:
    return tuple(InstanceFailure(each.instance, each.at, each.down) for each in simulated_executor_of(experiment).failures)


def simulated_executor_of(experiment: Experiment) -> SimulatedExecutor:
    if not isinstance(experiment.executor, SimulatedExecutor):
        raise WorkbenchError("executor: this is simulated; write `executor: {kind: simulated}`")
    if (samples := experiment.sampling.num_sequences) > 1:
        raise WorkbenchError(f"sampling: {samples} samples or beams; a simulated run has one a request: give n 1")
    if experiment.cache.evict is not None or not isinstance(experiment.cache.offload, NoOffload):
        raise WorkbenchError("cache: evict and offload are not simulated; take them out, or run with executor: real")
    if experiment.speculate.kind != "none":
        raise WorkbenchError("speculate: a clock does not know which proposals are accepted; run with executor: real")
    if experiment.batch_invariant:
        raise WorkbenchError("batch_invariant: a clock computes no bits; take it out, or run with executor: real")
    schedule = experiment.schedule
    if schedule.preemption_mode == "offload" or schedule.overflow != "refuse":
        which = "preemption_mode: offload" if schedule.preemption_mode == "offload" else f"overflow: {schedule.overflow}"
        raise WorkbenchError(f"schedule.{which} is not simulated; take it out, or run with executor: real")
    return experiment.executor


def _times(executor: SimulatedExecutor, sizes: ModelSizes, hardware: Hardware) -> StepTimeModel:
    if executor.steps is not None:
        return fit_step_times(Record.open(executor.steps).steps.to_pylist(), executor.steps)
    shares = (executor.compute_share, executor.memory_share, executor.overhead)
    return roofline_step_times(sizes, hardware, executor.gpus, *shares)
