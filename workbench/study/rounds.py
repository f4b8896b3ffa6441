"""Run requests to their ends, with a progress bar and a fixed number of threads."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from workbench.engine.replay import replay
from workbench.engine.runner import Runner
from workbench.progress import Progress
from workbench.request import Request
from workbench.study.closed_loop import stream_closed_loop
from workbench.trace.events import Decoded, Event, Prefilled
from workbench.trace.script import StepScript


def run_requests(
    runner: Runner,
    requests: list[Request],
    title: str,
    progress: bool,
    clients: tuple[int, float] | None = None,
    script: StepScript | None = None,
) -> float:
    """Run `requests` to their ends and return the wall seconds.

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


@contextmanager
def torch_threads(count: int | str) -> Iterator[None]:
    """Set torch's threads for the duration of a run and restore them after; `auto` leaves them."""
    before = torch.get_num_threads()
    if isinstance(count, int):
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
