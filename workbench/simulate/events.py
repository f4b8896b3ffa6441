"""Emit the events of a simulated run, of the same kinds and in the same order as those of the real runner."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from workbench.model.cost import StepCostModel
from workbench.simulate.instance import Instance, PlannedSteps
from workbench.simulate.job import SimulatedRequest
from workbench.simulate.routers import AnyRouter, routing_options
from workbench.simulate.step_times import TICKS_PER_SECOND
from workbench.trace.events import (
    Decoded,
    Event,
    Finished,
    HandedOver,
    Moved,
    Preempted,
    Prefilled,
    Routed,
    Scheduled,
    Stepped,
    Submitted,
)

UNKNOWN = -1  # the id of every token: no model samples tokens


class FleetEventAdapter:
    """An adapter that converts a fleet's callbacks into trace events, and passes each event to `emit`. `cost` predicts
    the FLOPs and bytes of each step."""

    def __init__(self, emit: Callable[[Event], None], cost: StepCostModel | None = None):
        self._note, self._cost = emit, cost
        self._is_fleet = False  # set by the first routed request: events then name their replicas

    def on_arrival(self, job: SimulatedRequest) -> None:
        time, came = job.arrival_time / TICKS_PER_SECOND, job.arrival
        self._note(
            Submitted(
                time, job.name, prompt_tokens=came.prompt_tokens, arrival=time, tenant=came.tenant,
                priority=came.priority, deadline=came.deadline,
            )
        )  # fmt: skip

    def on_routed(
        self, job: SimulatedRequest, time: int, chosen: Instance, up: Sequence[Instance], router: AnyRouter
    ) -> None:
        """Emit an event for a router's choice. Its replicas count from 1, as in a real fleet."""
        self._is_fleet = True
        if job.retries and not chosen.spec.receives_kv:
            source = job.instances[-1] if job.instances else chosen.number
            self._note(
                Moved(
                    time / TICKS_PER_SECOND, job.name, replica=chosen.number + 1, source=source + 1,
                    reason="its instance failed", generated_tokens=job.generated_tokens,
                )
            )  # fmt: skip
        options = routing_options(up, job, first=1)
        reason = router.reason(job, chosen, up)
        self._note(Routed(time / TICKS_PER_SECOND, job.name, replica=chosen.number + 1, reason=reason, options=options))

    def on_handover(self, job: SimulatedRequest, target: Instance, time: int, size: int, ticks: int) -> None:
        """Emit an event for the arrival of a request's pages at another instance, `ticks` after they were sent."""
        pages = sum(-(-(job.num_tokens - 1) // target.spec.page_size) for _ in target.spec.tables)
        self._note(
            HandedOver(
                time / TICKS_PER_SECOND, job.name, replica=target.number + 1, source=job.instances[-1] + 1, pages=pages,
                bytes=size, seconds=ticks / TICKS_PER_SECOND,
            )
        )  # fmt: skip

    def on_steps(self, instance: Instance, move: PlannedSteps) -> None:
        step, plan = instance.counters.steps - move.steps, move.plan
        begun, replica = move.start / TICKS_PER_SECOND, self._replica(instance)
        for decision in plan.decisions:
            name, reason = decision.request_id, decision.reason
            if decision.action == "preempted":
                self._note(Preempted(begun, name, replica=replica, step=step, reason=reason))
            else:
                self._note(Scheduled(begun, name, replica=replica, step=step, action=decision.action, reason=reason))
        for past in range(move.steps):
            self._step(instance, move, step + past, past)

    def _step(self, instance: Instance, move: PlannedSteps, step: int, past: int) -> None:
        """Emit the events of one step of a series, after `past` earlier steps of it."""
        plan, began = move.plan, move.start + move.series.elapsed(past)
        now, seconds = (move.start + move.series.elapsed(past + 1)) / TICKS_PER_SECOND, 0.0
        replica = self._replica(instance)
        for span in plan.spans:
            job = instance.jobs[span.sequence.request_id]
            if not span.is_decode:
                self._note(Prefilled(now, job.name, replica=replica, step=step, tokens=span.length, computed=span.end))
            if span.needs_sample:
                index = job.generated_tokens - move.steps + past
                self._note(Decoded(now, job.name, replica=replica, step=step, token_id=UNKNOWN, index=index))
        seconds = now - began / TICKS_PER_SECOND
        spans = [(span.start + past, span.length) for span in plan.spans]
        sampled = sum(span.needs_sample for span in plan.spans)
        cost = self._cost(spans, sampled) if self._cost is not None else None
        used = [pool.num_used for pool in instance.scheduler.pools]
        self._note(
            Stepped(
                now, replica=replica, step=step, phase=plan.phase, requests=len(plan.spans),
                prefill_tokens=plan.prefill_tokens,
                decode_tokens=plan.decode_tokens, pages_used=sum(used),
                kv_bytes=sum(n * size for n, size in zip(used, instance.spec.page_bytes, strict=True)),
                wall_seconds=seconds, forward_seconds=seconds,
                predicted_flops=cost.flops if cost else 0.0, predicted_bytes=cost.bytes if cost else 0.0,
                context_tokens=sum(start + length for start, length in spans),
                pages_idle=sum(len(pool.evictable) for pool in instance.scheduler.pools),
            )
        )  # fmt: skip

    def _replica(self, instance: Instance) -> int:
        return instance.number + 1 if self._is_fleet else 0

    def on_finish(self, job: SimulatedRequest) -> None:
        now = (job.finish_time or 0) / TICKS_PER_SECOND
        reason = "length" if not job.error else "error" if job.instances else "refused"
        self._note(
            Finished(
                now, job.name, reason=reason, error=job.error,
                token_ids=(UNKNOWN,) * job.generated_tokens, prompt_tokens=job.arrival.prompt_tokens,
                cached_tokens=job.cached_tokens, computed_tokens=job.computed_tokens,
                written_tokens=job.written_tokens,
            )
        )  # fmt: skip
