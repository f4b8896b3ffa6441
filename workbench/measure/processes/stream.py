"""Run requests on a fleet of processes as a client does: events get the time at which the client receives them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from workbench.cluster.process_fleet import ProcessFleet
from workbench.engine.inputs import arrival
from workbench.errors import WorkbenchError
from workbench.request import Request
from workbench.simulate.executor_settings import KillSettings
from workbench.trace.events import Event, Stepped, Submitted
from workbench.trace.recorder import Recorder


@dataclass(frozen=True)
class ServedTraffic:
    """The events of requests that a fleet served; `began` is the time, on the clock of the events, at which the traffic
    began."""

    events: list[Event]
    began: float

    def recorded(self) -> Recorder:
        recorder = Recorder()
        recorder.events = self.events
        return recorder

    def steps(self) -> list[dict[str, Any]]:
        """Return a row for each step in the events, grouped by engine."""
        found: dict[int, Recorder] = {}
        for event in self.events:
            if isinstance(event, Stepped):
                found.setdefault(event.replica, Recorder()).record(event)
        return [row for _, each in sorted(found.items()) for row in each.steps()]


def serve_traffic(
    fleet: ProcessFleet, requests: Sequence[Request], kills: Sequence[KillSettings] = ()
) -> ServedTraffic:
    """Run requests to their ends, kill instances at their given times, and return the events.

    Raises:
        WorkbenchError: if the traffic ended before a kill was due.
        Exception: if a kill failed, its own exception.
    """
    faults: list[Exception] = []
    tried: list[KillSettings] = []

    def kill(asked: KillSettings) -> None:
        tried.append(asked)
        try:
            fleet.kill(asked.instance)
        except Exception as error:  # an exception of a timer's thread would be lost
            faults.append(error)

    clock = fleet.clock
    due = {each.request_id: arrival(each) for each in requests}
    events: list[Event] = []
    with ExitStack() as stack:
        began = clock()
        for each in kills:
            timer = threading.Timer(max(0.0, began + each.at - clock()), kill, (each,))
            timer.start()
            stack.callback(timer.join)  # after the timer is cancelled, wait for a kill that is under way
            stack.callback(timer.cancel)
        for event in fleet.stream(requests):
            if isinstance(event, Stepped):  # its times are on the engine's own clock, which the fit needs
                events.append(event)
            elif isinstance(event, Submitted):
                events.append(replace(event, time=clock(), arrival=began + due[event.request_id]))
            else:
                events.append(replace(event, time=clock()))
        seconds = clock() - began
    if faults:
        raise faults[0]
    for each in kills:
        if each not in tried:
            raise WorkbenchError(
                f"executor.failures: instance {each.instance} at {each.at:g} s; "
                f"the traffic ended after {seconds:.2f} s; kill it earlier"
            )
    return ServedTraffic(events, began)
