"""The instance that an experiment's model, cache, scheduler and executor settings describe."""

from __future__ import annotations

from dataclasses import replace

from workbench.cache.settings import NoOffload, RadixPrefix
from workbench.engine.load import CACHE_MEMORY, DTYPES
from workbench.engine.schedule import policy_from
from workbench.engine.scheduler import Limits
from workbench.errors import WorkbenchError
from workbench.fleet.fitted import fitted
from workbench.fleet.fleet import Failure, Pool, Transfer
from workbench.fleet.hardware import Hardware, named_hardware
from workbench.fleet.machine import Machine, machine_of
from workbench.fleet.roofline import Sizes, roofline
from workbench.fleet.settings import SimulatedExecutor
from workbench.fleet.work import StepTimes
from workbench.model.cost import StepCost
from workbench.model.memory import weight_bytes
from workbench.study.cache_of import spec_of, store_of
from workbench.study.capacity import page_bytes
from workbench.study.ceilings import ceilings_for
from workbench.study.experiment import Experiment
from workbench.study.record import Record

HERE = "here"


def sizes_of(experiment: Experiment) -> Sizes:
    """Return the model's weight and cache bytes in the experiment's formats, without loading it."""
    spec, dtype = spec_of(experiment)
    model, cache = experiment.model, experiment.cache
    store = store_of(spec, cache, dtype)
    weights = weight_bytes(
        spec, DTYPES[dtype].itemsize, model.format
    )
    return Sizes(spec, weights, store.tables, tuple(size / cache.page_size for size in page_bytes(store)))


def cost_of(sizes: Sizes) -> StepCost:
    """Return the cost model of a step: FLOPs and bytes, counted as the real runner counts them."""
    weight = sizes.weight_bytes / sizes.spec.parameters
    numbers = sum(layer.attention.cached for layer in sizes.spec.layers)
    return StepCost(sizes.spec, weight, weight, sizes.lasting_bytes / numbers)


def hardware_of(executor: SimulatedExecutor, sizes: Sizes, dtype: str) -> Hardware:
    """Return the named hardware, the given one, or this machine's measured ceilings for a model of this size."""
    if isinstance(executor.hardware, Hardware):
        return executor.hardware
    if executor.hardware != HERE:
        return named_hardware(executor.hardware)
    kind = dtype if dtype in ("float32", "bfloat16") else "float32"
    working_set = round(sizes.weight_bytes)
    ceilings = ceilings_for(working_set, dtypes=(kind,))
    reads, flops = ceilings.read(working_set).value, ceilings.gemm(kind).value
    memory = (sizes.weight_bytes + CACHE_MEMORY) / executor.memory
    return Hardware(name=HERE, flops=flops, bandwidth=reads, memory=memory, link=reads, network=reads, host=reads,
                    source="measured on this machine")  # fmt: skip


def machine_for(experiment: Experiment) -> Machine:
    """Return the instance that an experiment simulates. Raises WorkbenchError where the model leaves no memory for a
    cache."""
    executor = simulated(experiment)
    sizes, dtype = sizes_of(experiment), spec_of(experiment)[1]
    hardware, schedule, cache = hardware_of(executor, sizes, dtype), experiment.schedule, experiment.cache
    prefix = cache.prefix
    return machine_of(
        sizes,
        hardware,
        Limits(
            schedule.max_num_seqs, schedule.max_num_batched_tokens, schedule.chunk_tokens, schedule.chunked_prefill
        ),
        gpus=executor.gpus,
        page_size=cache.page_size,
        memory_share=executor.memory,
        pages=None if cache.pages == "auto" else cache.pages,
        prefix=isinstance(prefix, RadixPrefix),
        ttl=prefix.ttl if isinstance(prefix, RadixPrefix) else None,
        policy=policy_from(schedule.policy, schedule.kind),
        times=_times(executor, sizes, hardware),
    )


def pools_for(experiment: Experiment, machine: Machine) -> tuple[Pool, Pool | None, Transfer]:
    """Return the prefill and decode pools of such instances, and the cost of a KV transfer between them."""
    executor = simulated(experiment)
    pool, decode = Pool(machine, executor.instances, executor.router), executor.decode
    if decode is None:
        return pool, None, Transfer()
    hardware = hardware_of(executor, sizes_of(experiment), spec_of(experiment)[1])
    speed = decode.bytes_per_second or hardware.network * executor.gpus
    receiving = replace(machine, arrives=True, prefix=False, ttl=None)
    return pool, Pool(receiving, decode.instances, decode.router), Transfer(speed, decode.latency)


def failures_of(experiment: Experiment) -> tuple[Failure, ...]:
    return tuple(Failure(each.instance, each.at, each.down) for each in simulated(experiment).failures)


def simulated(experiment: Experiment) -> SimulatedExecutor:
    if not isinstance(experiment.executor, SimulatedExecutor):
        raise WorkbenchError("executor: this is simulated; write `executor: {kind: simulated}`")
    if (samples := experiment.sampling.samples) > 1:
        raise WorkbenchError(f"sampling: {samples} samples or beams; a simulated run has one a request: give n 1")
    if experiment.cache.evict is not None or not isinstance(experiment.cache.offload, NoOffload):
        raise WorkbenchError("cache: evict and offload are not simulated; take them out, or run with executor: real")
    if experiment.speculate.kind != "none":
        raise WorkbenchError("speculate: a clock cannot tell which proposals are accepted; run with executor: real")
    if experiment.batch_invariant:
        raise WorkbenchError("batch_invariant: a clock computes no bits; take it out, or run with executor: real")
    schedule = experiment.schedule
    if schedule.set_back == "offload" or schedule.overflow != "refuse":
        which = "set_back: offload" if schedule.set_back == "offload" else f"overflow: {schedule.overflow}"
        raise WorkbenchError(f"schedule.{which} is not simulated; take it out, or run with executor: real")
    return experiment.executor


def _times(executor: SimulatedExecutor, sizes: Sizes, hardware: Hardware) -> StepTimes:
    if executor.steps is not None:
        return fitted(Record.open(executor.steps).steps.to_pylist(), executor.steps)
    shares = (executor.compute_share, executor.memory_share, executor.overhead)
    return roofline(sizes, hardware, executor.gpus, *shares)
