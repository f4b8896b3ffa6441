"""A log of a serving runner from events."""

from __future__ import annotations

from workbench.serve.watch.serving_log import ServingLog
from workbench.trace.events import Event


def log_of(events: list[Event], now: float | None = None) -> ServingLog:
    """Return a log that took `events`, begun when the first of them came, whose clock stands at `now` or the last."""
    times = [event.time for event in events] or [0.0]
    clock = iter([min(times)])
    log = ServingLog("m", clock=lambda: next(clock, max(times) if now is None else now))
    for event in events:
        log.record(event)
    return log
