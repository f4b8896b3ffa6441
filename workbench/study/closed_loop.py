"""Closed-loop clients: each sends its next request when its last answer has ended."""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace

from workbench.engine.runner import Runner
from workbench.request import Request
from workbench.trace.events import Event, Finished

POLL_SECONDS = 0.01  # maximum seconds between two looks at the clock


def stream_closed_loop(
    runner: Runner, requests: list[Request], clients: int, think_seconds: float, sleep: Callable[[float], None] = time.sleep
) -> Iterator[Event]:
    """Stream events as `runner.stream` does, for a fixed number of clients.

    Submits `clients` requests at first and the next one `think_seconds` after one has ended. Closing the iterator
    cancels running requests."""
    began, box = runner.clock(), deque[Event]()
    coming, owed = deque(requests), dict[str, int]()  # Finished events to come, by request
    due = [(0.0, number) for number in range(min(clients, len(coming)))]
    numbers = len(due)
    try:
        while due or owed:
            while due and began + due[0][0] <= runner.clock():
                arrival, _ = heapq.heappop(due)
                request = replace(coming.popleft(), arrival=arrival)
                owed[request.request_id] = runner.submit(request, box, began + arrival)
            if owed and not box:
                runner.step(box)
            elif not box:
                sleep(max(0.0, min(POLL_SECONDS, began + due[0][0] - runner.clock())))
            while box:
                event = box.popleft()
                if isinstance(event, Finished):
                    owed[event.request_id] -= 1
                    if not owed[event.request_id]:
                        del owed[event.request_id]
                        if numbers < len(requests):
                            heapq.heappush(due, (runner.clock() - began + think_seconds, numbers))
                            numbers += 1
                yield event
    finally:
        runner.cancel_all(box)
