"""Call a policy safely, and read its order item by item."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

from workbench.errors import WorkbenchError
from workbench.scheduler.policy import (
    RequestView,
    RunningViews,
    SchedulerDecision,
    SchedulerState,
    SchedulingPolicy,
    Turn,
)


def policy_name(policy: SchedulingPolicy) -> str:
    return getattr(policy, "kind", None) or getattr(policy, "__qualname__", None) or type(policy).__qualname__


def call_policy(policy: SchedulingPolicy, state: SchedulerState) -> SchedulerDecision:
    """Call `policy` on `state` and return its decision. If it fails, the scheduler is unchanged.

    Raises:
        WorkbenchError: if the policy raises, or returns no SchedulerDecision.
    """
    name = policy_name(policy)
    try:
        decision = policy(state)
        if isinstance(decision, SchedulerDecision) and decision.preempted:
            decision = replace(decision, preempted=tuple(decision.preempted))
    except Exception as error:
        raise _policy_error(name, error) from error
    if not isinstance(decision, SchedulerDecision):
        raise WorkbenchError(
            f"policy {name}: returned {type(decision).__name__}, "
            "must return workbench.parts.SchedulerDecision([request, ...])"
        )
    if not isinstance(decision.reasons, Mapping):
        raise WorkbenchError(f"policy {name}: reasons is {decision.reasons!r}, must be {{id: reason}}")
    return decision


def items_of(order: Iterable[Any], name: str, num_requests: int) -> Iterator[Any]:
    """Yield the items of an order, with groups expanded to their requests; `RunningViews` stay one item.

    At most two turns for each of `num_requests` requests are read.

    Raises:
        WorkbenchError: if the order raises. Sequences that started before keep their pages, and no token is lost.
    """
    return islice(_flat(order, name), 2 * num_requests + 3)


def _flat(order: Iterable[Any], name: str) -> Iterator[Any]:
    try:
        for item in order:
            if type(item) in (RequestView, Turn, RunningViews, str) or not hasattr(item, "__iter__"):
                yield item
            else:
                yield from item
    except Exception as error:
        raise _policy_error(name, error) from error


def _policy_error(name: str, error: Exception) -> WorkbenchError:
    if isinstance(error, WorkbenchError):
        return error
    return WorkbenchError(f"policy {name}: raised {type(error).__name__}: {error}; nothing was planned")
