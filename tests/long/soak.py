"""Run many requests of every sort: `python -m tests.long.soak [--requests 5000] [--json] [--out DIR]`.

Pages are few, so that sequences are preempted; requests are cancelled at any event, within a step too. It fails where a
request has no end or two, a page is leaked, or memory grows.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from tests.long import flat_memory
from tests.long.soak_requests import random_requests
from workbench.engine.load import load
from workbench.engine.runner import Runner
from workbench.machine.environment import environment
from workbench.request import FinishReason, Request
from workbench.runs.folder import write_dated_record
from workbench.trace.events import Event, Finished, Preempted, Stepped

CLIENTS = 24  # requests under way
SAMPLES = 60  # of memory
CANCELLED = 0.15  # of the requests
LATEST = 20  # event of its own at which a request is cancelled


class Soak:
    """Send requests through `runner`, cancel some, and count their ends. Nothing is stored of finished requests."""

    def __init__(self, runner: Runner, seed: int = 0):
        self.runner, self.draw = runner, random.Random(f"{seed}/cancels")
        self.reasons: Counter[str] = Counter()
        self.faults: list[str] = []
        self.ended = self.sequences = self.steps = self.num_preemptions = self.tokens = self.prompt_tokens = 0
        self.cached_tokens = 0
        self._open: dict[str, set[int]] = {}  # finished samples of unfinished requests
        self._owed: dict[str, int] = {}
        self._cancels: dict[str, int] = {}  # remaining events before the cancel
        runner.set_listener(self.on_event)

    def run(self, requests: Iterable[Request], count: int) -> dict[str, Any]:
        """Run all `count` requests to their end, and return the record."""
        samples: list[tuple[int, float]] = []
        began, coming, every = time.perf_counter(), iter(requests), max(10, count // SAMPLES)
        more = True
        while more or self.runner.has_unfinished_requests:
            while more and len(self._open) < CLIENTS:
                request = next(coming, None)
                more = request is not None
                if request is not None:
                    self._submit(request)
            self.runner.step()
            if self.ended >= every * (len(samples) + 1):
                samples.append((self.ended, flat_memory.resident_mib()))
        seconds = time.perf_counter() - began
        self.faults += [f"{name} has no end" for name in self._open] + leaked_resources(self.runner)
        return {
            "requests": self.ended, "sequences": self.sequences, "reasons": dict(sorted(self.reasons.items())),
            "steps": self.steps, "num_preemptions": self.num_preemptions, "seconds": seconds,
            "output_tokens": self.tokens, "output_tokens_per_second": self.tokens / seconds,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens, "faults": self.faults, "resident_mib": samples,
            "memory": asdict(flat_memory.judge(samples, count)),
        }  # fmt: skip

    def _submit(self, request: Request) -> None:
        name = request.request_id
        self._open[name], self._owed[name] = set(), request.sampling.num_sequences
        if self.draw.random() < CANCELLED:
            self._cancels[name] = self.draw.randint(1, LATEST)
        owed = self.runner.submit(request)
        if name in self._open:
            self._owed[name] = owed
        self._close(name)

    def on_event(self, event: Event) -> None:
        if isinstance(event, Stepped):
            self.steps += 1
        name = event.request_id
        if not name:
            return
        if name not in self._open:
            self.faults.append(f"{name} has a {event.kind} after its end")
            return
        self.num_preemptions += isinstance(event, Preempted)
        if isinstance(event, Finished):
            self._end(event)
        elif name in self._cancels:
            self._cancels[name] -= 1
            if self._cancels[name] == 0:
                self.runner.cancel(name)

    def _end(self, event: Finished) -> None:
        name = event.request_id
        if event.sample in self._open[name]:
            self.faults.append(f"{name}, sample {event.sample}, ends twice")
        if event.reason not in list(FinishReason) or (event.reason == FinishReason.ERROR):
            self.faults.append(f"{name}, sample {event.sample}, ends with {event.reason!r}: {event.error}")
        self._open[name].add(event.sample)
        self.sequences += 1
        self.reasons[event.reason] += 1
        self.tokens += len(event.token_ids)
        self.prompt_tokens += event.prompt_tokens
        self.cached_tokens += event.cached_tokens
        self._close(name)

    def _close(self, name: str) -> None:
        if name in self._open and len(self._open[name]) == self._owed[name]:
            self.ended += 1
            self._cancels.pop(name, None)
            del self._open[name], self._owed[name]


def leaked_resources(runner: Runner) -> list[str]:
    """List resources that an idle runner should not hold: leaked pages, sequences, samplers' states."""
    found = []
    for table, pool in enumerate(runner.scheduler.pools):
        if pool.num_free + len(pool.evictable) != pool.num_pages:
            lost = pool.num_pages - pool.num_free - len(pool.evictable)
            found.append(f"table {table}: {lost} of {pool.num_pages} pages are neither free nor in the prefix index")
    runner.reset_prefix_cache()
    for table, pool in enumerate(runner.scheduler.pools):
        if pool.num_free != pool.num_pages:
            found.append(f"table {table}: {pool.num_pages - pool.num_free} pages stay when the prefix index is empty")
    kept = {"sequences": runner.tracker.sequences, "samplers": runner.core.decoder.sampler._states}
    return found + [f"{len(values)} {what} are kept" for what, values in kept.items() if values]


def summarize(record: dict[str, Any]) -> str:
    memory, reasons = record["memory"], ", ".join(f"{count} {name}" for name, count in record["reasons"].items())
    flat = {True: "flat", False: "NOT FLAT", None: "too few samples to judge"}[memory["flat"]]
    lines = [
        f"{record['requests']} requests, {record['sequences']} sequences: {reasons}",
        f"{record['output_tokens']} tokens in {record['seconds']:.1f} s "
        f"({record['output_tokens_per_second']:.0f} a second), {record['steps']} steps, {record['num_preemptions']} "
        f"preemptions, {record['cached_tokens']} of {record['prompt_tokens']} prompt tokens found in the prefix index",
        f"memory {flat}: {memory['slope']:+.2f} MiB a thousand requests, last third less first "
        f"{memory['difference']:+.2f} MiB, {memory['samples']} samples",
    ]
    return "\n".join([*lines, *(f"FAULT: {fault}" for fault in record["faults"][:20])])


def main(
    requests: Annotated[int, typer.Option(min=1)] = 5000,
    model: Annotated[str, typer.Option()] = "demo",
    backend: Annotated[str, typer.Option()] = "auto",
    policy: Annotated[str, typer.Option()] = "priority",
    speculate: Annotated[str, typer.Option()] = "none",
    pages: Annotated[int, typer.Option(help="so few that sequences are preempted")] = 48,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="the record on standard output")] = False,
    out: Annotated[Path | None, typer.Option(help="folder for a dated record")] = None,
) -> None:
    """Send many requests of every sort through a runner, and check that none is lost, leaked or left without an end."""
    date = datetime.now(UTC).isoformat(timespec="seconds")
    runner = load(
        model, backend=backend, policy=policy, speculate=speculate, page_size=16, pages=pages, prefix="radix",
        max_num_batched_tokens=256,
    )  # fmt: skip
    spec = runner.model.spec
    given = random_requests(
        requests, spec.vocab_size, spec.max_position_embeddings, seed, text=runner.tokenizer is not None
    )
    settings = {
        "model": model,
        "backend": str(runner.core.backends),
        "policy": policy,
        "speculate": speculate,
        "pages": pages,
    }
    record = {"experiment": "soak", "date": date, "settings": settings | {"seed": seed}, "environment": environment()}
    record |= Soak(runner, seed).run(given, requests)
    print(json.dumps(record, indent=2) if as_json else summarize(record))
    if out is not None:
        print(write_dated_record(record, out, "soak"), file=sys.stderr)
    raise typer.Exit(1 if record["faults"] or record["memory"]["flat"] is False else 0)


if __name__ == "__main__":
    typer.run(main)
