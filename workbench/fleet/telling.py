"""Events of a simulated run, of the same kinds and in the same order as those of the real runner."""

from __future__ import annotations

from collections.abc import Callable

from workbench.fleet.instance import Instance, Move
from workbench.fleet.job import Job
from workbench.fleet.work import SECOND
from workbench.model.cost import StepCost
from workbench.trace.events import Decoded, Event, Finished, Planned, Prefilled, SetBack, Stepped, Submitted

UNKNOWN = -1  # the id of every token: no model samples one


class Teller:
    """Convert a fleet's callbacks into trace events and pass each to `emit`; `cost` predicts each step's FLOPs and
    bytes."""

    def __init__(self, note: Callable[[Event], None], cost: StepCost | None = None):
        self._note, self._cost = note, cost

    def came(self, job: Job) -> None:
        time, came = job.came / SECOND, job.arrival
        self._note(
            Submitted(
                time, job.name, prompt_tokens=came.prompt_tokens, arrival=time, tenant=came.tenant,
                priority=came.priority,
            )
        )  # fmt: skip

    def moved(self, instance: Instance, move: Move) -> None:
        step, plan = instance.tally.steps - move.steps, move.plan
        begun = move.begun / SECOND
        for decision in plan.decisions:
            name, reason = decision.request_id, decision.reason
            if decision.action == "set_back":
                self._note(SetBack(begun, name, step=step, reason=reason))
            else:
                self._note(Planned(begun, name, step=step, action=decision.action, reason=reason))
        for past in range(move.steps):
            self._step(instance, move, step + past, past)

    def _step(self, instance: Instance, move: Move, step: int, past: int) -> None:
        """Emit the events of one step of a series; `past` steps of it came before."""
        plan, began = move.plan, move.begun + move.run.elapsed(past)
        now, seconds = (move.begun + move.run.elapsed(past + 1)) / SECOND, 0.0
        for span in plan.spans:
            job = instance.jobs[span.sequence.request_id]
            if not span.decodes:
                self._note(Prefilled(now, job.name, step=step, tokens=span.length, computed=span.end))
            if span.samples:
                index = job.produced - move.steps + past
                self._note(Decoded(now, job.name, step=step, token_id=UNKNOWN, index=index))
        seconds = now - began / SECOND
        spans = [(span.start + past, span.length) for span in plan.spans]
        sampled = sum(span.samples for span in plan.spans)
        cost = self._cost(spans, sampled) if self._cost is not None else None
        used = [pool.used for pool in instance.scheduler.pools]
        self._note(
            Stepped(
                now, step=step, phase=plan.phase, requests=len(plan.spans), prefill_tokens=plan.prefill_tokens,
                decode_tokens=plan.decode_tokens, pages_used=sum(used),
                kv_bytes=sum(n * size for n, size in zip(used, instance.machine.page_bytes, strict=True)),
                wall_seconds=seconds, forward_seconds=seconds,
                predicted_flops=cost.flops if cost else 0.0, predicted_bytes=cost.bytes if cost else 0.0,
                context_tokens=sum(start + length for start, length in spans),
                pages_idle=sum(len(pool.idle) for pool in instance.scheduler.pools),
            )
        )  # fmt: skip

    def ended(self, job: Job) -> None:
        now = (job.ended or 0) / SECOND
        reason = "length" if not job.error else "error" if job.places else "refused"
        self._note(
            Finished(
                now, job.name, reason=reason, error=job.error,
                token_ids=(UNKNOWN,) * job.produced, prompt_tokens=job.arrival.prompt_tokens,
                cached_tokens=job.cached_tokens, computed_tokens=job.computed_tokens,
                written_tokens=job.written_tokens,
            )
        )  # fmt: skip
