"""Predict every variant of a fleet of processes by the simulator, with step times fitted to the same engines before."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from workbench.cluster.process_fleet import OpenFleet, check_fleet, open_fleet
from workbench.engine.cache import AUTO_CACHE_BYTES
from workbench.experiment.experiment import Experiment
from workbench.experiment.variants import every_variant
from workbench.machine.ceilings import engine_threads
from workbench.measure.jobs import job_metrics, job_row, served_seconds
from workbench.measure.processes.calibration import Calibration, calibrate
from workbench.measure.processes.traffic import (
    FleetTraffic,
    calibration_traffic,
    measured_traffic,
    processes_executor_of,
)
from workbench.measure.simulated import instance_spec_for, pools_for, simulated_executor_of, sizes_of
from workbench.simulate.executor_settings import DecodePoolSettings, ProcessesExecutor, SimulatedExecutor
from workbench.simulate.fleet import Fleet, InstanceFailure
from workbench.simulate.roofline import Hardware
from workbench.simulate.source import OpenLoopSource
from workbench.simulate.step_times import TICKS_PER_SECOND

# Default bytes per second and seconds of a handover. `shared` sends page numbers in a message, which waits for a step's
# end; `gloo` took 78 ms to send 128 MiB between two processes of one host.
TRANSFERS = {"shared": (1e15, 0.0005), "gloo": (1.6e9, 0.0005)}


def predict_processes(
    experiment: Experiment, on_progress: Callable[[str], None], open_fleet: OpenFleet = open_fleet
) -> dict[str, Any] | None:
    """Return the simulator's metrics of each variant, the time of the prediction, and its calibration; None if the
    experiment asks for no prediction.

    Variants whose engines differ in a setting, in threads or in number are calibrated separately."""
    variants = every_variant(experiment)
    traffics = {name: measured_traffic(variant) for name, variant in variants.items()}
    for variant in variants.values():  # find all mistakes before anything is measured
        check_fleet(executor := processes_executor_of(variant))
        if executor.predict is not None:
            simulated_executor_of(as_simulated(variant, 0.0))
    if all(processes_executor_of(each).predict is None for each in variants.values()):
        return None
    found, calibrations = {}, {}
    for name, variant in variants.items():
        executor = processes_executor_of(variant)
        if executor.predict is None:
            continue
        key = calibration_key(variant)
        if key not in calibrations:
            on_progress(f"calibrating {executor.num_engines} engines: {name}")
            mine = [each for each in variants.values() if calibration_key(each) == key]
            kills = any(processes_executor_of(each).failures for each in mine)
            traffic = calibration_traffic(variant, executor.predict.requests)
            threads = engine_threads(variant.measure.threads, executor.num_engines)
            calibrations[key] = calibrate(variant.engine, executor.num_engines, threads, traffic, kills, open_fleet)
        found[name] = predict_variant(variant, calibrations[key], traffics[name])
    made = {name: {"calibration": list(calibrations).index(calibration_key(variants[name])), **row}
            for name, row in found.items()}  # fmt: skip
    return {
        "predicted_at": datetime.now(UTC).isoformat(),
        "calibrations": [each.as_dict() for each in calibrations.values()],
        "variants": made,
    }


def calibration_key(variant: Experiment) -> str:
    """Return a text that is equal for variants with the same engines in the same number."""
    executor = processes_executor_of(variant)
    threads = engine_threads(variant.measure.threads, executor.num_engines)
    return f"{executor.num_engines} of {threads}: {variant.engine.model_dump_json()}"


def predict_variant(variant: Experiment, calibration: Calibration, traffic: FleetTraffic) -> dict[str, Any]:
    """Simulate one variant with the calibrated engines and return its row."""
    simulated = as_simulated(variant, calibration.start_seconds)
    fleet = simulated_fleet(simulated, calibration, traffic).run()
    message = round(calibration.message_seconds * TICKS_PER_SECOND)
    for job in fleet.jobs:  # each request reached its engine later by the delay of messages
        job.arrival_time -= message
    seconds = served_seconds(fleet.jobs)
    busy = [instance.counters.busy_ticks / fleet.now for instance in fleet.instances]
    row = job_row(fleet.jobs, job_metrics(fleet.jobs, variant.measure.slo, seconds))
    return row | {"seconds": seconds, "busy": busy}


def simulated_fleet(simulated: Experiment, calibration: Calibration, traffic: FleetTraffic) -> Fleet:
    """Return the simulated fleet of a variant, in which requests arrive later by the calibrated delay of messages."""
    spec = instance_spec_for(simulated, calibration.times)
    pool, decode, transfer = pools_for(simulated, spec)
    arrivals = [replace(each, time=each.time + calibration.message_seconds) for each in traffic.arrivals.values()]
    failures = [
        InstanceFailure(each.instance, each.at, each.down) for each in simulated_executor_of(simulated).failures
    ]
    requests = traffic.requests
    return Fleet(OpenLoopSource(arrivals), pool, decode, transfer=transfer, failures=failures,
                 prompts=lambda arrival, number: requests[number].prompt_ids)  # fmt: skip


def as_simulated(variant: Experiment, start_seconds: float | None) -> Experiment:
    """Return the simulated counterpart of a variant on processes; a killed engine is replaced after `start_seconds`."""
    executor = processes_executor_of(variant)
    values: dict[str, Any] = {
        "hardware": _hardware(variant).model_dump(), "instances": executor.instances,
        "router": executor.router.model_dump(), "decode": _decode(executor),
        "failures": [{**each.model_dump(), "down": start_seconds} for each in executor.failures],
    }  # fmt: skip
    return variant.model_copy(update={"executor": SimulatedExecutor.model_validate(values)})


def _decode(executor: ProcessesExecutor) -> Mapping[str, Any] | None:
    if (decode := executor.decode) is None:
        return None
    speed, latency = TRANSFERS[decode.transfer]
    made = DecodePoolSettings(
        instances=decode.instances, router=decode.router, bytes_per_second=decode.bytes_per_second or speed,
        latency=latency if decode.latency is None else decode.latency,
    )  # fmt: skip
    return made.model_dump()


def _hardware(variant: Experiment) -> Hardware:
    """Return hardware that has only a memory size: step times are fitted, and the cache has the size of the engine's
    cache.
    """
    memory = (sizes_of(variant).weight_bytes + AUTO_CACHE_BYTES) / SimulatedExecutor().memory
    return Hardware(name="this machine", flops=1.0, bandwidth=1.0, memory=memory, link=1.0, network=1.0, cpu_link=1.0,
                    source="fitted steps")  # fmt: skip
