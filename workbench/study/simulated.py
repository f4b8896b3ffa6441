"""An experiment under simulated time: the same requests, scheduler and metrics, without weights."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from workbench.fleet.fleet import Fleet, FleetListener
from workbench.fleet.instance import Instance
from workbench.fleet.job import SimulatedRequest, symbolic_prompt
from workbench.fleet.telling import FleetEventAdapter
from workbench.fleet.work import TICKS_PER_SECOND
from workbench.prompt.tokenizer import Tokenizer
from workbench.study.apart import metrics_by_group
from workbench.study.cache_of import spec_and_dtype
from workbench.study.experiment import Experiment, SLO
from workbench.study.goodput import goodput
from workbench.study.metrics import distribution
from workbench.study.simulated_machine import step_cost_of, failures_of, instance_spec_for, pools_for, simulated_executor_of, sizes_of
from workbench.study.workload import clients_of, requests_of
from workbench.trace.events import Event
from workbench.traffic.arrival import Arrival
from workbench.traffic.settings import TrafficWorkload
from workbench.traffic.source import ClosedLoopSource, OpenLoopSource, TrafficSource, source_of


def fleet_for(
    experiment: Experiment, on_event: Callable[[Event], None] | None = None, tokenizer: Tokenizer | None = None
) -> Fleet:
    """Build the fleet of an experiment with its traffic.

    Args:
        experiment: An experiment with a simulated executor.
        on_event: Receives every event; None records none.
        tokenizer: Encodes the texts of workloads other than traffic.
    """
    machine = instance_spec_for(experiment)
    pool, decode, transfer = pools_for(experiment, machine)
    listener: FleetListener | None = FleetEventAdapter(on_event, step_cost_of(sizes_of(experiment))) if on_event is not None else None
    source, prompts = _source(experiment, tokenizer)
    return Fleet(
        source, pool, decode, transfer=transfer, failures=failures_of(experiment), prompts=prompts, listener=listener
    )


def _source(experiment: Experiment, tokenizer: Tokenizer | None) -> tuple[TrafficSource, Callable]:
    workload = experiment.workload
    if isinstance(workload, TrafficWorkload):
        return source_of(workload), symbolic_prompt
    requests = requests_of(experiment, tokenizer, spec_and_dtype(experiment)[0].vocab_size)
    arrivals = [
        Arrival(request.arrival, len(request.prompt_ids), request.sampling.max_tokens, request.request_id)
        for request in requests
    ]
    clients = clients_of(experiment)
    source = OpenLoopSource(arrivals) if clients is None else ClosedLoopSource(arrivals, *clients)
    return source, lambda arrival, number: requests[number].prompt_ids


def fleet_metrics(fleet: Fleet, slo: SLO, started_at: float) -> dict[str, Any]:
    """Summarize a fleet's requests, with units in the names. `started_at` is the wall clock's time at its start."""
    jobs = fleet.jobs
    figures = [request_metrics_of(job) for job in jobs]
    done = [each for each in figures if each["e2el_s"] is not None]
    seconds = (fleet.now - jobs[0].arrival_time) / TICKS_PER_SECOND if jobs else 0.0
    prompt, cached = sum(job.arrival.prompt_tokens for job in jobs if not job.error), sum(j.cached_tokens for j in jobs)
    return {
        "requests": {
            "submitted": fleet.submitted,
            "finished": fleet.finished,
            "failed": fleet.failed,
            "in_flight": fleet.in_flight,
            "retries": sum(job.retries for job in jobs),
            "num_preemptions": sum(job.num_preemptions for job in jobs),
            "errors": dict(Counter(job.error for job in jobs if job.error).most_common(3)),
        },
        "tokens": {
            "prompt": prompt,
            "output": sum(job.generated_tokens for job in jobs),
            "cached": cached,
            "written": sum(job.written_tokens for job in jobs),
            "computed": sum(job.computed_tokens for job in jobs),
        },
        "simulated_s": seconds,
        "wall_s": time.perf_counter() - started_at,
        "output_tokens_per_s": sum(job.generated_tokens for job in jobs) / seconds if seconds else None,
        **{
            name: distribution(each[name] for each in done)
            for name in ("ttft_s", "tpot_s", "e2el_s", "queue_s", "longest_gap_s")
        },
        "by_tenant": metrics_by_group(done, "tenant", distribution),
        "by_priority": metrics_by_group(done, "priority", distribution),
        "goodput": goodput(figures, slo, seconds),
        "cache_hit_rate": cached / prompt if prompt and any(i.spec.prefix for i in fleet.instances) else None,
        "cache_waste": cache_waste(fleet.instances),
        "instances": [instance_metrics(instance, fleet.now) for instance in fleet.instances],
    }


def request_metrics_of(job: SimulatedRequest) -> dict[str, Any]:
    """Return the metrics of one request; None for what did not happen."""

    def since(ticks: int | None) -> float | None:
        return None if ticks is None else (ticks - job.arrival_time) / TICKS_PER_SECOND

    first, done = job.first_token, job.finish_time is not None and not job.error
    more = job.generated_tokens - 1
    return {
        "request_id": job.name,
        "tenant": job.arrival.tenant,
        "priority": job.arrival.priority,
        "instance": job.instances[-1] if job.instances else None,
        "prompt_tokens": job.arrival.prompt_tokens,
        "output_tokens": job.generated_tokens,
        "cached_tokens": job.cached_tokens,
        "written_tokens": job.written_tokens,
        "retries": job.retries,
        "queue_s": since(job.first_scheduled),
        "ttft_s": since(first),
        "tpot_s": (job.last_token - first) / TICKS_PER_SECOND / more if first is not None and more > 0 else None,
        "longest_gap_s": job.longest_gap / TICKS_PER_SECOND if more > 0 else None,
        "e2el_s": since(job.last_token) if done else None,
    }


def cache_waste(instances: list[Instance]) -> float | None:
    """Return the fraction of the pages in use that holds no tokens, over all steps.

    Returns None where pages are shared or freed early, since token counts then do not measure page use."""
    tables = [table for instance in instances for table in instance.spec.tables]
    if any(instance.spec.prefix for instance in instances) or any(t.sliding_window is not None or t.is_delayed for t in tables):
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
    """Describe the simulated instances as far as the experiment does not."""
    machine, executor = instance_spec_for(experiment), simulated_executor_of(experiment)
    return {
        "model": sizes_of(experiment).spec.name,
        "step_times": machine.times.name,
        "instances": executor.instances + (executor.decode.instances if executor.decode else 0),
        "pages": list(machine.pages),
        "page_size": machine.page_size,
        "cache_tokens": min(machine.pages) * machine.page_size,
        "kv_bytes_per_token": machine.kv_bytes_per_token,
    }
