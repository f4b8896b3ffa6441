"""Load the runners of variants, measure them in interleaved rounds, and run the requests of one round.

Requests arrive at given times or from closed-loop clients. A closed-loop client sends its next request after its last
answer has ended.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from compiled_kernels.rounds import interleaved
from workbench.engine.replay import replay
from workbench.engine.runner import Runner
from workbench.errors import WorkbenchError
from workbench.experiment.build import runner_for
from workbench.experiment.experiment import Experiment, Rows
from workbench.progress import Progress
from workbench.request import Request, SamplingParameters
from workbench.trace.events import Decoded, Event, Finished, Prefilled
from workbench.trace.script import StepScript

POLL_SECONDS = 0.01  # maximum seconds of one sleep


def load_runners(
    variants: Mapping[str, Experiment], on_progress: Callable[[str], None], same: Mapping[str, Any] | None = None
) -> dict[str, Runner]:
    """Build a runner for each variant. Variants that are equal except for the settings `same` share a runner, so that
    their weights lie at the same addresses."""
    runners: dict[str, Runner] = {}
    known: dict[str, Runner] = {}
    for name, variant in variants.items():
        on_progress(f"loading: {name}")
        key = name if same is None else variant.model_copy(update=dict(same)).to_yaml()
        if key not in known:
            known[key] = runner_for(variant)
        runners[name] = known[key]
    return runners


def greedy_sampling(tokens: int) -> SamplingParameters:
    """Return greedy sampling parameters for exactly `tokens` tokens; no end token stops the output."""
    return SamplingParameters(temperature=0.0, max_tokens=tokens, ignore_eos=True)


def check_full_length(event: Event, what: str = "") -> None:
    """Raise WorkbenchError if a request ended early; `what` replaces the request's id in the message."""
    if isinstance(event, Finished) and event.reason != "length":
        raise WorkbenchError(f"{what or event.request_id}: {event.error or event.reason}")


def measure_in_rounds(
    names: Iterable[str],
    rounds: int,
    on_progress: Callable[[str], None],
    measured: Callable[[str, int], Mapping[str, Any]],
    rotate: bool = False,
) -> Rows:
    """Call `measured(name, round)` for each variant in interleaved rounds after a warm-up, round 0. Return a row for
    each call after the warm-up: the variant, the round, and the measured values."""
    rows: Rows = []
    for number, name in interleaved(names, rounds, on_progress, rotate=rotate):
        found = measured(name, number)
        if number:
            rows.append({"variant": name, "round": number, **found})
    return rows


def stream_closed_loop(
    runner: Runner,
    requests: list[Request],
    clients: int,
    think_seconds: float,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[Event]:
    """Stream events as `runner.stream` does, for a fixed number of clients.

    Submits `clients` requests at first, and another one `think_seconds` after each has ended. Closing the iterator
    cancels running requests."""
    began, box = runner.clock(), deque[Event]()
    coming, owed = deque(requests), dict[str, int]()  # Finished events still expected, by request
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


def run_requests(
    runner: Runner,
    requests: list[Request],
    title: str,
    progress: bool,
    clients: tuple[int, float] | None = None,
    script: StepScript | None = None,
) -> float:
    """Run `requests` to their ends and return the elapsed seconds.

    Args:
        runner: The runner.
        requests: Requests with their arrival times.
        title: Text of the progress bar.
        progress: Show the progress bar.
        clients: Number of closed-loop clients and their pause in seconds; None submits at arrival times.
        script: Recorded batches to repeat.
    """
    if script is not None:
        events = replay(runner, requests, script)
    else:
        events = runner.stream(requests) if clients is None else stream_closed_loop(runner, requests, *clients)
    total = sum(len(r.prompt_ids) + r.sampling.max_tokens for r in requests)
    began = time.perf_counter()
    with Progress(total=total, desc=title, unit="token", disable=not progress) as bar:
        for event in events:
            bar.update(_tokens(event))
        bar.total = bar.n  # a text may end before max_tokens
        bar.refresh()
    return time.perf_counter() - began


def _tokens(event: Event) -> int:
    return event.tokens if isinstance(event, Prefilled) else int(isinstance(event, Decoded))
