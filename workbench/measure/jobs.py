"""Compute metrics of requests that a fleet served, with the same functions for simulated and real fleets.

A real fleet's events are turned into `SimulatedRequest` values, token by token, as a simulated instance fills them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from workbench.experiment.experiment import SLO
from workbench.measure.goodput import goodput
from workbench.runs.metrics import distribution, metrics_by_group, percentile
from workbench.simulate.arrival import Arrival
from workbench.simulate.job import SimulatedRequest
from workbench.simulate.step_times import TICKS_PER_SECOND
from workbench.trace.events import Decoded, Event, Finished, Moved, Preempted, Scheduled

SPREADS = ("ttft_s", "tpot_s", "longest_gap_s", "e2el_s", "queue_s")
SHORT_PROMPT_TOKENS = 2048  # prompts up to this many tokens count as short


def jobs_of_events(
    arrivals: Mapping[str, Arrival], events: Iterable[Event], began: float = 0.0
) -> list[SimulatedRequest]:
    """Convert the events of a real fleet into one `SimulatedRequest` per request, in the order of `arrivals`.

    Args:
        arrivals: arrivals of all requests by id; times count from `began`.
        events: events of the fleet in order, with the times at which a client received them.
        began: the time at which the traffic began, on the clock of the events.
    """
    jobs = {
        name: SimulatedRequest(number, name, arrival, _ticks(arrival.time), arrival.output_tokens)
        for number, (name, arrival) in enumerate(arrivals.items())
    }
    for event in events:
        job = jobs.get(event.request_id)
        if job is None:
            continue
        now = _ticks(event.time - began)
        if isinstance(event, Decoded):
            job.add_tokens(1, now, 0, now)
        elif isinstance(event, Scheduled):
            if event.action == "admitted" and job.first_scheduled is None:
                job.first_scheduled = now
        elif isinstance(event, Preempted):
            job.num_preemptions += 1
        elif isinstance(event, Moved):
            job.retries += 1
        elif isinstance(event, Finished):
            job.finish_time = now
            job.error = event.error or ("" if event.reason in ("stop", "length") else event.reason)
            job.cached_tokens, job.written_tokens = event.cached_tokens, event.written_tokens
            job.computed_tokens = event.computed_tokens
    return list(jobs.values())


def request_metrics_of(job: SimulatedRequest) -> dict[str, Any]:
    """Return the metrics of one request; the times of events that did not happen are None."""

    def since(ticks: int | None) -> float | None:
        return None if ticks is None else (ticks - job.arrival_time) / TICKS_PER_SECOND

    first, done = job.first_token, job.finish_time is not None and not job.error
    more = job.generated_tokens - 1
    return {
        "request_id": job.name,
        "tenant": job.arrival.tenant,
        "priority": job.arrival.priority,
        "deadline_s": job.arrival.deadline,
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


def job_metrics(jobs: Sequence[SimulatedRequest], slo: SLO, seconds: float | None) -> dict[str, Any]:
    """Return summary metrics of requests, whose keys name the units. `seconds`, from the first arrival to the last end,
    is the duration for rates.
    """
    figures = [request_metrics_of(job) for job in jobs]
    done = [each for each in figures if each["e2el_s"] is not None]
    failed = sum(bool(job.error) for job in jobs)
    output = sum(job.generated_tokens for job in jobs)
    return {
        "requests": {
            "submitted": len(jobs),
            "finished": len(done),
            "failed": failed,
            "in_flight": len(jobs) - len(done) - failed,
            "retries": sum(job.retries for job in jobs),
            "num_preemptions": sum(job.num_preemptions for job in jobs),
            "errors": dict(Counter(job.error for job in jobs if job.error).most_common(3)),
        },
        "tokens": {
            "prompt": sum(job.arrival.prompt_tokens for job in jobs if not job.error),
            "output": output,
            "cached": sum(job.cached_tokens for job in jobs),
            "written": sum(job.written_tokens for job in jobs),
            "computed": sum(job.computed_tokens for job in jobs),
        },
        "output_tokens_per_s": output / seconds if seconds else None,
        **{name: distribution(each[name] for each in done) for name in SPREADS},
        "by_tenant": metrics_by_group(done, "tenant", distribution),
        "by_priority": metrics_by_group(done, "priority", distribution),
        "goodput": goodput(figures, slo, seconds),
    }


def served_seconds(jobs: Sequence[SimulatedRequest]) -> float | None:
    """Return the seconds from the first arrival to the last end; None if no request ended."""
    ends = [job.finish_time for job in jobs if job.finish_time is not None]
    return (max(ends) - min(job.arrival_time for job in jobs)) / TICKS_PER_SECOND if ends else None


def job_row(jobs: Sequence[SimulatedRequest], found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `job_metrics` of requests as one flat row for a table of variants."""
    last = max((job.arrival.time for job in jobs), default=0.0)
    short = [
        job.first_token - job.arrival_time
        for job in jobs
        if job.arrival.prompt_tokens <= SHORT_PROMPT_TOKENS and job.first_token
    ]
    return {
        **{name: found["requests"][name] for name in ("submitted", "finished", "failed", "retries", "num_preemptions")},
        **{f"{name}_{q}": found[name][q] for name in SPREADS for q in ("p50", "p90", "p99", "max")},
        **{f"short_ttft_s_p{q}": percentile((ticks / TICKS_PER_SECOND for ticks in short), q) for q in (50, 99)},
        "offered_requests_per_s": len(jobs) / last if last else None,
        "slo_attainment": found["goodput"]["share"],
        "goodput_requests_per_s": found["goodput"]["requests_per_s"],
        "output_tokens_per_s": found["output_tokens_per_s"],
    }


def _ticks(seconds: float) -> int:
    return round(seconds * TICKS_PER_SECOND)
