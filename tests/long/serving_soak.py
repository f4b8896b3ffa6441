"""Let 2,000 mixed requests come, a tenth of which leave early: `python -m tests.long.serving_soak`; or, on a real
model, as many as come in an hour: `... --model smollm2 --minutes 60 --at-once 16`.

Chats, conversations, completions, responses and messages, streamed and whole, with tools, schemas, several choices,
thoughts, and some that are refused, drawn from a seed. The rules, written before the first run; when all have ended:

- pages: none is in use but those that the prefix index keeps.
- threads: no more than after the first half. (Written as 'after the first tenth' before a trial of 120 requests, in
  which pools of threads were still being filled then.) The same of file handles since 2026-11-29.
- memory: what the process holds beside mapped files has grown by at most 5% between the end of the first half and the
  end. (Written for all resident memory, with every trace kept, and missed so in serving_soak-20261123-221755: weights
  and libraries are mapped and come and go, and 2,000 traces are what was asked for. The records of 2026-11-23 count
  what the client had read too, which this process kept until then; it is thrown away now. What the server remembers of
  calls has bounds that the first half fills.)
- accounts: prompt and output tokens of the gateway's accounts are those that the engine's events say: of a prompt those
  that were read, found or computed. (Written for whole prompts, and missed so in the same run by 50 tokens of prompts
  whose clients left before they were read.)
- answers: every call whose client stayed has the status and the end that it should have.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import psutil
import typer
from rich.console import Console

import workbench
from experiments.serving_client import Ask, Reply, ask
from workbench.display import Table
from workbench.engine.runner import Runner
from workbench.engine.runner_thread import RunnerThread
from workbench.gateway.gate import Gateway
from workbench.machine.environment import environment
from workbench.progress import discard
from workbench.runs.folder import write_dated_record
from workbench.serve.server import Server, serve
from workbench.trace.events import Event, Finished, Prefilled

PARTS = {"count": 10, "minutes": 4}  # after each of which the server is looked at
MAX_GROWTH = 0.05
SETTLE_SECONDS = 60.0
BOUNDS: dict[str, Any] = {
    "kept_traces": 64,
    "memory_bytes": 1 << 20,
}  # of what the server remembers, which 1,000 requests fill
QUESTIONS = ("What is {} * {}?", "How many minutes are {} hours and {} minutes?", "Say {} and {}.", "What is {}?")
CONVERT = {
    "name": "convert", "description": "Convert a value from one unit to another.",
    "parameters": {
        "type": "object",
        "properties": {"value": {"type": "number"}, "unit": {"type": "string"}, "to": {"type": "string"}},
        "required": ["value", "unit", "to"],
    },
}  # fmt: skip
SCHEMA = {
    "type": "object", "properties": {"value": {"type": "integer"}}, "required": ["value"],
    "additionalProperties": False,
}  # fmt: skip
KINDS = (
    "chat", "conversation", "chat whole", "chat with tools", "chat with a schema", "chat thinking", "completion",
    "completion whole", "completions of several", "messages", "messages whole", "messages with tools", "response",
    "refused",
)  # fmt: skip


def draw_ask(seed: int, model: str, kinds: Sequence[str]) -> tuple[str, Ask]:
    """Return the kind of a request, one of `kinds`, and the request."""
    draw = random.Random(seed)
    kind = draw.choice(kinds)
    text = draw.choice(QUESTIONS).format(draw.randrange(100), draw.randrange(100))
    most, turns = draw.choice((4, 16, 40)), [{"role": "user", "content": text}]
    common: dict[str, Any] = {"model": model, "temperature": draw.choice((0, 0.7))}
    chat = {**common, "messages": turns, "max_tokens": most, "stream": True}
    questions = [QUESTIONS[number % len(QUESTIONS)].format(number, number + 1) for number in range(draw.randint(1, 5))]
    earlier = [
        {"role": role, "content": words} for each in questions for role, words in (("user", each), ("assistant", "5."))
    ]  # fmt: skip
    tool = {"type": "function", "function": CONVERT}
    form = {"type": "json_schema", "json_schema": {"name": "v", "schema": SCHEMA}}
    claude_tool = {**{k: CONVERT[k] for k in ("name", "description")}, "input_schema": CONVERT["parameters"]}
    path, body = {
        "chat": ("/v1/chat/completions", {**chat, "stream_options": {"include_usage": True}}),
        "conversation": ("/v1/chat/completions", {**chat, "messages": [*earlier, *turns]}),
        "chat whole": ("/v1/chat/completions", {**chat, "stream": False, "logprobs": True, "top_logprobs": 2}),
        "chat with tools": (
            "/v1/chat/completions", {**chat, "max_tokens": 100 + most, "tools": [tool], "tool_choice": "required"},
        ),
        "chat with a schema": ("/v1/chat/completions", {**chat, "max_tokens": 20 + most, "response_format": form}),
        "chat thinking": ("/v1/chat/completions", {**chat, "reasoning_effort": "low"}),
        "completion": ("/v1/completions", {**common, "prompt": text, "max_tokens": most, "stream": True}),
        "completion whole": ("/v1/completions", {**common, "prompt": text, "max_tokens": most, "stop": ["\n"]}),
        "completions of several": (
            "/v1/completions", {**common, "prompt": [text, text[::-1]], "n": 2, "max_tokens": most, "stream": True},
        ),
        "messages": ("/v1/messages", {**chat}),
        "messages whole": ("/v1/messages", {**chat, "stream": False, "system": "Be short."}),
        "messages with tools": (
            "/v1/messages", {**chat, "max_tokens": 100 + most, "tools": [claude_tool], "tool_choice": {"type": "any"}},
        ),
        "response": ("/v1/responses", {**common, "input": text, "max_output_tokens": 16 + most, "stream": True}),
        "refused": ("/v1/chat/completions", {**chat, "max_tokens": -1}),
    }[kind]  # fmt: skip
    leaves = draw.random() < 0.1
    return kind, Ask(path, body, leave_after=draw.choice((0, 1, 2, 5)) if leaves else None)


def fault(kind: str, reply: Reply) -> str:
    """Return what is wrong with a reply to a client that stayed; empty if nothing is."""
    if kind == "refused":
        return "" if reply.status == 400 else f"status {reply.status}, not 400"
    if reply.status != 200 or not reply.events:
        return f"status {reply.status}: {reply.events[-1:]}"
    last, is_stream = reply.events[-1], reply.headers["content-type"].startswith("text/event-stream")
    if not is_stream:
        return "" if "whole" in kind else "no stream came"
    ends = "message_stop" if kind.startswith("messages") else "[DONE]"
    if kind == "response":
        ends = '{"type":"response.completed"' if "response.completed" in last else '{"type":"response.incomplete"'
    return "" if ends in last and '{"error":' not in last else f"it ends with {last[:200]}"


class EngineAccount:
    """The tokens that the engine's own events say."""

    def __init__(self, runner: Runner):
        self.output = 0
        self._read: dict[str, int] = {}  # tokens found or computed, by request
        self._prompts: dict[str, int] = {}  # of these the prompt's, of requests of which a sample has ended
        self.close = RunnerThread.attach(runner).listen(self._add)

    def _add(self, event: Event) -> None:
        if isinstance(event, Prefilled):
            self._read[event.request_id] = max(event.computed, self._read.get(event.request_id, 0))
        elif isinstance(event, Finished):
            self.output += len(event.token_ids)
            self._prompts[event.request_id] = min(event.prompt_tokens, self._read.get(event.request_id, 0))

    @property
    def prompt(self) -> int:
        return sum(self._prompts.values())


def pages_in_use(runner: Runner) -> int:
    """Return pages that hold tokens of a request, the prefix index's own left out."""
    return RunnerThread.attach(runner).call(lambda each: sum(pool.num_used for pool in each.scheduler.pools))


async def ask_mixed(
    url: str, model: str, kinds: Sequence[str], seeds: Iterator[int], at_once: int, seconds: float
) -> tuple[Counter[str], list[tuple[str, Reply]]]:
    """Ask what `seeds` draw, `at_once` at a time, until they end or so many seconds have passed.

    Returns:
        the number of requests by kind, and the replies with what is wrong with each, their texts left out.
    """
    end, counts, replies = time.monotonic() + seconds, Counter[str](), list[tuple[str, Reply]]()

    async def client() -> None:
        for seed in seeds:
            kind, request = draw_ask(seed, model, kinds)
            reply = await ask(url, request)
            why = "" if reply.left else fault(kind, reply)
            reply.events.clear()  # what the client read is no memory of the server's
            counts[kind] += 1
            replies.append((f"{kind}: {why}" if why else "", reply))
            if time.monotonic() >= end:
                return

    await asyncio.gather(*(client() for _ in range(at_once)))
    return counts, replies


def quantiles(replies: list[Reply]) -> dict[str, list[float]]:
    """Return median and 99th percentile, in seconds, of the time to a stream's first event and between its events."""
    streams = [
        reply for reply in replies
        if reply.times and not reply.left and reply.headers.get("content-type", "").startswith("text/event-stream")
    ]  # fmt: skip
    first = [reply.times[0] - reply.sent for reply in streams]
    gaps = [(reply.times[-1] - reply.times[0]) / (len(reply.times) - 1) for reply in streams if len(reply.times) > 8]
    known = {"to the first event": first, "between events": gaps}
    return {name: np.quantile(times, (0.5, 0.99)).round(4).tolist() for name, times in known.items() if times}


def soak(model: str, count: int, minutes: float, at_once: int, progress: Any = discard) -> dict[str, Any]:
    """Send `count` requests, or as many as come in `minutes` unless that is 0, `at_once` of them at a time, and return
    the record."""
    runner = workbench.load(model, prefix="radix", page_size=16, max_num_seqs=16, report=discard)
    account, faults, counts = EngineAccount(runner), Counter[str](), Counter[str]()
    states: list[dict[str, Any]] = []
    num_left, process, began = 0, psutil.Process(), time.monotonic()
    gateway = Gateway({"accounting": {"prices": "article-a"}})
    parts = PARTS["minutes" if minutes else "count"]
    seeds = itertools.count() if minutes else iter(range(count))
    with serve({model: runner}, gate=gateway, **BOUNDS) as server:
        thinks = server.service.models[model].can_think
        kinds = [kind for kind in KINDS if thinks or kind != "chat thinking"]
        for _ in range(parts):
            some = seeds if minutes else itertools.islice(seeds, -(-count // parts))
            seconds = 60 * minutes / parts or float("inf")
            drawn, got = asyncio.run(ask_mixed(server.url, model, kinds, some, at_once, seconds))
            counts += drawn
            faults.update(why for why, _ in got if why)
            num_left += sum(reply.left for _, reply in got)
            times = quantiles([reply for _, reply in got])
            got.clear()
            wait_until_idle(server)
            memory = process.memory_info()
            state = {
                "requests": counts.total(), "threads": threading.active_count(), "file handles": process.num_fds(),
                "memory": memory.rss - memory.shared, "pages in use": pages_in_use(runner), "seconds": times,
            }  # fmt: skip
            states.append(state)
            progress(f"{state} faults {faults.total()}")
        gateway.accounts.flush()
        (sums,) = gateway.accounts.sums(by=("model",))
        accounted = {"prompt": sums.usage.prompt, "output": sums.usage.output}
    account.close()
    half, end = states[len(states) // 2 - 1], states[-1]
    return {
        "experiment": "serving_soak", "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "environment": environment(),
        "model": model, "requests": counts.total(), "at_once": at_once, "left_early": num_left,
        "seconds": time.monotonic() - began, "kinds": counts, "faults": dict(faults), "states": states,
        "tokens": {"engine": {"prompt": account.prompt, "output": account.output},
                   "accounts": accounted, "accounted calls": sums.calls, "cost": str(sums.cost)},
        "met": {
            "pages": all(not each["pages in use"] for each in states),
            "threads": end["threads"] <= half["threads"],
            "file handles": end["file handles"] <= half["file handles"],
            "memory": end["memory"] <= half["memory"] * (1 + MAX_GROWTH),
            "accounts": accounted == {"prompt": account.prompt, "output": account.output}
                and not server.service.runs,
            "answers": not faults,
        },
    }  # fmt: skip


def wait_until_idle(server: Server) -> None:
    """Wait until no call is under way: those whose clients left end within a step."""
    end = time.monotonic() + SETTLE_SECONDS
    while server.service.runs and time.monotonic() < end:
        time.sleep(0.05)


def table(record: dict[str, Any]) -> Table:
    rows = [(name, "met" if each else "missed") for name, each in record["met"].items()]
    first, last = record["states"][0], record["states"][-1]
    note = (
        f"{record['requests']} requests, {record['left_early']} left early, in {record['seconds']:.0f} s; threads "
        f"{first['threads']} to {last['threads']}, memory {first['memory'] / 2**20:,.0f} to "
        f"{last['memory'] / 2**20:,.0f} MiB; tokens {record['tokens']}"
    )
    return Table("serving soak", rows, note=note)


def main(
    model: Annotated[str, typer.Option(help="a model's name or folder")] = "demo-chat",
    count: Annotated[int, typer.Option(help="requests")] = 2000,
    minutes: Annotated[float, typer.Option(help="as many requests as come in this time, in place of a number")] = 0,
    at_once: Annotated[int, typer.Option(help="requests under way at once")] = 24,
    out: Annotated[Path | None, typer.Option(help="folder for a dated record")] = None,
) -> None:
    """Soak a server with mixed requests, and hold pages, threads, memory and accounts against the rules."""
    record = soak(model, count, minutes, at_once, lambda line: print(line, file=sys.stderr, flush=True))
    Console(width=120).print(table(record).text())
    for name, times in record["faults"].items():
        print(f"{times} times {name}")
    if out is not None:
        print(write_dated_record(record, out, "serving_soak"), file=sys.stderr)


if __name__ == "__main__":
    typer.run(main)
