"""Kill a replica in mid-answer, under load over HTTP: `python -m tests.long.replica_loss [--kills 10]`.

`workbench serve demo --replicas 2` with `batch_invariant`, and a client that streams greedy and seeded completions, of
one sample and of several. When each has had some tokens, one replica's process gets a SIGKILL. The rules, written
before the first run:

- answers: every text and every token is that of one engine that nothing happened to; each choice ends once.
- streams: the texts of all events together are that text, so nothing came twice, and each token has its index once.
- moved: what the killed replica was answering went on at the other one, and its trace says so, with the reason.
- usage: the gateway's account has each prompt token and each token that was streamed once.
- pages: none is in use once all have ended.
- replaced: two replicas serve again, and one of them is new.
- ended: the server ends by SIGTERM with its status, and leaves no process and no shared memory.

With `--kills N`, after that: N random kills, of a replica or of the front (then a new server begins), each under load.
After each kill of a front, and in the end, no process and no shared memory of the fleet is left; as long as the front
lives, what was asked is answered and accounted for as above. What does not come in time is recorded under `late`, and
ends the kills. It exits with 1 where a rule was missed.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from experiments.serving_client import Ask, Reply, ask
from tests.long.fleet_server import FleetServer, Traces, kill, wait_until
from workbench.engine.config import EngineConfig
from workbench.engine.runner import Runner, generate
from workbench.machine.environment import environment
from workbench.progress import discard
from workbench.request import Request, SamplingParameters
from workbench.runs.folder import write_dated_record

SETTINGS = ("batch_invariant=true", "gateway={}")  # a gateway keeps the accounts
PROMPTS = ("def fib(n):", "class Stack:\n    def push(self", "import os\nimport sys\n\n\ndef main", "for each in")
MAX_TOKENS = 400
TOKENS_BEFORE_THE_KILL = 4  # events of every answer
PROMPT_KINDS = ("input", "cache_read", "cache_write_5m", "cache_write_1h")  # of the gateway's account
SHARE_OF_FRONTS = 0.3  # of random kills


@dataclass(frozen=True)
class Wanted:
    """The answer of one engine, by choice."""

    texts: tuple[str, ...]
    token_ids: tuple[tuple[int, ...], ...]
    prompt_tokens: int


def draw_body(draw: random.Random) -> dict[str, Any]:
    """Return the body of a completion: greedy, or seeded with some penalty, of up to three samples."""
    body: dict[str, Any] = {
        "prompt": draw.choice(PROMPTS) + draw.choice(("", " ", "\n    x = ")),
        "max_tokens": MAX_TOKENS,
    }
    if draw.random() < 0.5:
        return body | {"temperature": 0}
    body |= {"temperature": draw.choice((0.7, 1.0)), "seed": draw.randrange(2**31), "n": draw.choice((1, 1, 3))}
    return body | {"repetition_penalty": draw.choice((1.0, 1.1))}


def answers_alone(bodies: Sequence[dict[str, Any]]) -> list[Wanted]:
    """Return the answers of one engine of the same settings in this process, each request alone."""
    runner = Runner(EngineConfig.build("demo", prefix="radix", batch_invariant=True), report=discard)
    assert runner.tokenizer is not None
    found = []
    for number, body in enumerate(bodies):
        sampling = {name: each for name, each in body.items() if name != "prompt"}
        ids = tuple(runner.tokenizer.encode(body["prompt"]))
        request = Request(f"alone-{number}", ids, SamplingParameters(ignore_eos=True, **sampling))
        ends = sorted(generate(runner, [request]).values(), key=lambda end: end.sample)
        found.append(Wanted(tuple(end.output_text for end in ends), tuple(end.token_ids for end in ends), len(ids)))
    return found


def as_ask(body: dict[str, Any]) -> Ask:
    extra = {"model": "demo", "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
    return Ask("/v1/completions", body | extra | {"return_token_ids": True})


def fault(reply: Reply | BaseException, wanted: Wanted) -> str:
    """Return what is wrong with an answer; empty if nothing is."""
    if isinstance(reply, BaseException):
        return repr(reply)
    if reply.status != 200 or not reply.events or reply.events[-1] != "[DONE]":
        return f"status {reply.status}, and the end {reply.events[-1:]}"
    texts, tokens, ends = [""] * len(wanted.texts), [[] for _ in wanted.texts], Counter[int]()
    usage: dict[str, Any] = {}
    for event in map(json.loads, reply.events[:-1]):
        if "error" in event:
            return f"error {event['error']}"
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
            tokens[choice["index"]] += choice.get("token_ids") or []
            ends[choice["index"]] += choice["finish_reason"] is not None
    for number, (text, ids) in enumerate(zip(wanted.texts, wanted.token_ids, strict=True)):
        if ends[number] != 1:
            return f"choice {number} ended {ends[number]} times"
        if texts[number] != text or tuple(tokens[number]) != ids:
            return f"choice {number} is {texts[number]!r}, not {text!r}"
    used = usage.get("prompt_tokens"), usage.get("completion_tokens")
    if used != (wanted.prompt_tokens, sum(map(len, wanted.token_ids))):
        return f"usage is {used}"
    return ""


async def ask_and_kill(
    url: str, bodies: Sequence[dict[str, Any]], strike: Callable[[], object], tokens: int
) -> list[Reply | BaseException]:
    """Ask all at once, and call `strike` when every stream has had `tokens` events; return the replies."""
    replies = [Reply() for _ in bodies]
    tasks = [
        asyncio.create_task(ask(url, as_ask(body), reply=reply)) for body, reply in zip(bodies, replies, strict=True)
    ]
    while any(len(reply.events) < tokens and not task.done() for reply, task in zip(replies, tasks, strict=True)):
        await asyncio.sleep(0.001)
    await asyncio.to_thread(strike)
    return await asyncio.gather(*tasks, return_exceptions=True)


def call_id(reply: Reply | BaseException) -> str:
    """Return the id of an answer; empty where none came, or an error in its place."""
    if isinstance(reply, BaseException) or not reply.events or reply.events[0] == "[DONE]":
        return ""
    return json.loads(reply.events[0]).get("id", "")


def faults_of(got: Sequence[Reply | BaseException], wanted: Sequence[Wanted]) -> list[str]:
    """Return what is wrong with answers, with the place of each."""
    found = (fault(each, want) for each, want in zip(got, wanted, strict=True))
    return [f"request {number}: {why}" for number, why in enumerate(found) if why]


def wait_for(true: Callable[[], bool], what: str, late: list[str]) -> float | None:
    """Wait until `true()` and return the seconds that it took; None, and a line in `late`, if it takes too long."""
    try:
        return wait_until(true, what)
    except RuntimeError as error:
        late.append(str(error))
        return None


def story(trace: dict[str, Any]) -> list[str]:
    """Return a trace's first choice as lines: what happened to it, in order, with its tokens counted."""
    request = trace["choices"][0]["request"]
    moments = [
        (each["time"], each.get("replica", 0), each["action"], each["reason"], each.get("options", ()))
        for each in trace["decisions"] if each["request"] == request
    ]  # fmt: skip
    moments += [(each["time"], each["replica"], "token", "", ()) for each in trace["choices"][0]["tokens"]]
    lines, count = (
        [f"{trace['spans'][0]['end']:8.3f} s  submitted, {trace['prompts'][0]['tokens']} tokens of prompt"],
        0,
    )
    moments.sort(key=lambda each: each[0])
    for place, (time, replica, action, reason, options) in enumerate(moments):
        if action == "token":
            count += 1
            if place + 1 == len(moments) or moments[place + 1][2] != "token":
                lines.append(f"{time:8.3f} s  replica {replica}: tokens up to number {count}")
            continue
        words = reason if reason.startswith(action) else f"{action}: {reason}"
        lines.append(f"{time:8.3f} s  replica {replica}: {words}")
        lines += [
            f"{'':12}replica {each['replica']}: {each['samples']} samples, {each['pending_prompt_tokens']} tokens "
            f"pending, {each['cached_tokens']} cached" for each in options
        ]  # fmt: skip
    end = trace["choices"][0]["finished"]
    return [
        *lines,
        f"{trace['spans'][-1]['end']:8.3f} s  finished: {end['ended_by']}, {end['completion_tokens']} tokens",
    ]


def usage_of(server: FleetServer) -> dict[str, int]:
    """Return the tokens in the gateway's account of a server."""
    (sums,) = json.loads(server.get("/v1/usage?by=model"))["data"]
    return {"prompt": sum(sums[name] for name in PROMPT_KINDS), "output": sums["output"]}


def usage_alone(wanted: Sequence[Wanted], times: int = 1) -> dict[str, int]:
    """Return the tokens of answers that were each given so many times."""
    prompt = sum(each.prompt_tokens for each in wanted)
    output = sum(len(ids) for each in wanted for ids in each.token_ids)
    return {"prompt": times * prompt, "output": times * output}


def missed(record: dict[str, Any]) -> list[str]:
    """Return the rules that were missed, each with its part of the record."""
    parts = {name: part for name, part in record.items() if isinstance(part, dict) and "met" in part}
    return [f"{name}: {rule}" for name, part in parts.items() for rule, is_met in part["met"].items() if not is_met]


def one_loss(count: int, seed: int) -> dict[str, Any]:
    """Return what came of a kill of one replica under load, with the story of a request that moved."""
    draw = random.Random(seed)
    bodies = [draw_body(draw) for _ in range(count)]
    wanted = answers_alone(bodies)
    with FleetServer("demo", 2, *SETTINGS) as server:
        before = server.replicas()
        got = asyncio.run(ask_and_kill(server.url, bodies, lambda: kill(before[0]), TOKENS_BEFORE_THE_KILL))
        faults = faults_of(got, wanted)
        traces = [server.trace(name) for name in map(call_id, got) if name]
        moved = [each for each in traces if any(one["action"] == "moved" for one in each["decisions"])]
        late: list[str] = []
        took = wait_for(lambda: server.metric("workbench:replicas") == 2, "a new replica", late)
        idle = wait_for(lambda: server.metric("vllm:num_requests_running") == 0, "the end of all requests", late)
        usage = usage_of(server)
        pages = server.metric("vllm:kv_cache_usage_perc")
        lost = {
            name: server.metric(f"workbench:fleet_{name}_total") for name in ("moves", "lost_attempts", "lost_tokens")
        }
        after = server.replicas()
        footprints = Traces(server)
        status = server.stop()
    gone = wait_for(lambda: not footprints.left(), "the end of all that the fleet had", late)
    own = usage_alone(wanted)
    record = {
        "requests": count, "faults": faults, "moved": len(moved), "seconds_to_a_new_replica": took, "usage": usage,
        "lost": lost, "late": late, "left": [] if gone is not None else footprints.left(),
        "met": {
            "answers": not faults, "moved": bool(moved), "usage": usage == own,
            "pages": idle is not None and pages == 0,
            "replaced": took is not None and len(after) == 2 and before[0] not in after and before[1] in after,
            "ended": status == 128 + signal.SIGTERM and gone is not None,
        },
        "story": story(min(moved, key=lambda each: len(each["decisions"]))) if moved else [],
    }  # fmt: skip
    return record


class RandomKills:
    """Kills of replicas and of fronts, each with the same requests under way; without a front a new server begins."""

    def __init__(self, bodies: Sequence[dict[str, Any]], seed: int):
        self.draw, self.bodies, self.wanted = random.Random(seed), bodies, answers_alone(bodies)
        self.server: FleetServer | None = None
        self.answered = 0  # times that it answered all
        self.seen: list[Traces] = []  # of every server

    def next(self) -> dict[str, Any]:
        """Kill once, wait until what should follow has followed, and return what came of it."""
        if self.server is None:
            self.server, self.answered = FleetServer("demo", 2, *SETTINGS), 0
            self.seen.append(Traces(self.server))
        server, footprints = self.server, self.seen[-1]
        is_front = self.draw.random() < SHARE_OF_FRONTS
        victim = server.process.pid if is_front else self.draw.choice(server.replicas())
        events = self.draw.randrange(1, 2 * TOKENS_BEFORE_THE_KILL)
        got = asyncio.run(ask_and_kill(server.url, self.bodies, lambda: kill(victim), events))
        late: list[str] = []
        if is_front:
            server.kill()
            self.server = None
            seconds = wait_for(lambda: not footprints.left(), "the end of a fleet", late)
            return {"killed": "front", "after_events": events, "seconds_until_nothing_was_left": seconds, "late": late}
        faults = faults_of(got, self.wanted)
        seconds = wait_for(lambda: server.metric("workbench:replicas") == 2, "a new replica", late)
        wait_for(lambda: server.metric("vllm:num_requests_running") == 0, "the end of all requests", late)
        footprints.note(server)
        self.answered += 1
        usage, own = usage_of(server), usage_alone(self.wanted, self.answered)
        return {
            "killed": "replica", "after_events": events, "faults": faults, "seconds_to_a_new_replica": seconds,
            "usage": usage, "usage_alone": own,
            "pages": server.metric("vllm:kv_cache_usage_perc"), "late": late,
        }  # fmt: skip

    def left(self) -> list[str]:
        return [each for one in self.seen for each in one.left()]


def random_kills(kills: int, count: int, seed: int) -> dict[str, Any]:
    """Return what came of random kills, each with `count` requests under way."""
    draw = random.Random(seed)
    run = RandomKills([draw_body(draw) for _ in range(count)], seed)
    rows: list[dict[str, Any]] = []
    try:
        for _ in range(kills):
            rows.append(run.next())
            print(rows[-1], file=sys.stderr, flush=True)
            if rows[-1].get("late"):
                break
    finally:
        if run.server is not None:
            run.server.stop()
    late: list[str] = []
    gone = wait_for(lambda: not run.left(), "the end of all fleets", late)
    slow = {each["killed"] for each in rows if each.get("late")}
    return {
        "kills": rows, "of": Counter(each["killed"] for each in rows), "late": late,
        "left": [] if gone is not None else run.left(),
        "met": {
            "answers": not any(each.get("faults") for each in rows),
            "usage": all(each.get("usage") == each.get("usage_alone") for each in rows),
            "pages": not any(each.get("pages") for each in rows),
            "replaced": "replica" not in slow,
            "nothing left": gone is not None and "front" not in slow,
        },
    }  # fmt: skip


def main(
    count: Annotated[int, typer.Option(help="requests")] = 16,
    kills: Annotated[int, typer.Option(help="random kills after the first one")] = 0,
    seed: Annotated[int, typer.Option(help="of requests and kills")] = 19,
    out: Annotated[Path | None, typer.Option(help="folder for a dated record")] = None,
) -> None:
    """Kill a replica in mid-answer and hold answers, traces and accounts against the rules; then kill at random."""
    loss = one_loss(count, seed)
    print("\n".join(loss["story"]))
    record = {
        "experiment": "replica_loss", "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "environment": environment(), "seed": seed, "loss": loss,
    }  # fmt: skip
    if kills:
        record["random"] = random_kills(kills, count, seed)
    for name, part in record.items():
        for rule, is_met in part["met"].items() if isinstance(part, dict) and "met" in part else ():
            print(f"{name}: {rule}: {'met' if is_met else 'missed'}")
    if out is not None:
        print(write_dated_record(record, out, "replica_loss"), file=sys.stderr)
    if missed(record):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
