"""Compare two scheduling policies under the same simulated traffic: latency, fairness, and time of a decision."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from workbench.experiment.experiment import Experiment
from workbench.measure.jobs import job_row
from workbench.measure.simulated import fleet_for, fleet_metrics
from workbench.measure.simulation import tokenizer_of
from workbench.scheduler.policy import SchedulerDecision, SchedulerState, SchedulingPolicy
from workbench.scheduler.validate import items_of, policy_name
from workbench.simulate.instance import Instance, PlannedSteps

END = object()  # marks the end of an order


class TimedPolicy:
    """A policy that times the calls of `inner` and the iteration over its orders. Its promises (`steady`,
    `starvation_limit`) are those of `inner`."""

    def __init__(self, inner: SchedulingPolicy):
        self.inner, self.calls, self.seconds = inner, 0, 0.0

    def __call__(self, state: SchedulerState) -> SchedulerDecision:
        began = time.perf_counter()
        decision = self.inner(state)
        self.seconds += time.perf_counter() - began
        self.calls += 1
        num_requests = len(state.running) + len(state.waiting)
        return replace(decision, order=self._timed(items_of(decision.order, policy_name(self.inner), num_requests)))

    def _timed(self, items: Iterator[Any]) -> Iterator[Any]:
        while True:
            began = time.perf_counter()
            item = next(items, END)
            self.seconds += time.perf_counter() - began
            if item is END:
                return
            yield item

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@dataclass
class TenantMeter:
    """Tokens computed for each of `tenants`, counted in steps that end with a waiting request of every tenant."""

    tenants: Iterable[str]
    tokens: Counter[str] = field(default_factory=Counter)

    def on_steps(self, instance: Instance, move: PlannedSteps) -> None:
        waiting = {sequence.request.tenant for sequence in instance.scheduler.waiting}
        if waiting.issuperset(self.tenants):
            for span in move.plan.spans:
                self.tokens[span.sequence.request.tenant] += span.length * move.steps

    @property
    def fairness(self) -> float | None:
        """Return Jain's index; None with fewer than two tenants, or if they never waited at the same time."""
        tenants = list(self.tenants)
        return jain_index([self.tokens[name] for name in tenants]) if len(tenants) > 1 else None


def jain_index(values: Iterable[float]) -> float | None:
    """Return (sum of x)^2 / (n * sum of x^2): 1 if all are equal, 1/n if one has everything (Jain et al., 1984).

    None if all are 0."""
    found = list(values)
    squares = sum(value * value for value in found)
    return sum(found) ** 2 / (len(found) * squares) if squares else None


def simulate_policies(experiment: Experiment, names: Iterable[str], on_progress: Callable[[str], None]) -> list[dict]:
    """Simulate the variants `names` and return one row each: `job_row`, `e2el_s_mean`, `fairness`, `decision_us`."""
    rows = []
    for name in names:
        on_progress(name)
        variant = experiment.variant(name)
        began = time.perf_counter()
        fleet = fleet_for(variant, tokenizer=tokenizer_of(variant))
        meter = TenantMeter(tuple(getattr(variant.workload, "tenants", ())))
        timed = []
        for instance in fleet.instances:
            timed.append(TimedPolicy(instance.scheduler.policy))
            instance.scheduler.set_policy(timed[-1])
            instance.on_steps = meter.on_steps
        found = fleet_metrics(fleet.run(), variant.measure.slo, began)
        calls = sum(policy.calls for policy in timed)
        rows.append({
            "variant": name, **job_row(fleet.jobs, found), "e2el_s_mean": found["e2el_s"]["mean"],
            "fairness": meter.fairness,
            "decision_us": 1e6 * sum(policy.seconds for policy in timed) / calls if calls else None,
        })  # fmt: skip
    return rows
