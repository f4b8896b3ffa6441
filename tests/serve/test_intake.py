"""From a call's arrival to its prompt: what counts, what is bounded, and in whose turn it is prepared."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from typing import Any

import httpx
import pytest

import workbench
from tests.event_loop import run_async
from tests.patience import limit, until
from tests.serve.serving import Json, RecordingGate, connect, held_steps, pages_used, post, read_until
from workbench.engine.embeddings import TOKENS_PER_CHUNK, TextMean
from workbench.engine.runner import Runner
from workbench.engine.runner_thread import RunnerThread
from workbench.serve.call import Call
from workbench.serve.gate import OpenLease
from workbench.serve.prompt_threads import PromptThreads
from workbench.serve.server import Server
from workbench.trace.events import Submitted

CHAT = "/v1/chat/completions"
ASK: Json = {"model": "demo-chat", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
EMBED: Json = {"model": "demo-chat", "input": ["a text", "word " * 300]}


class SlowGate(RecordingGate):
    """A gate that admits no call before `opens` is set; `num_asked` have asked."""

    def __init__(self) -> None:
        super().__init__()
        self.opens, self.num_asked = threading.Event(), 0

    async def admit(self, call: Call) -> OpenLease:
        self.num_asked += 1
        while not self.opens.is_set():
            await asyncio.sleep(0.005)
        return await super().admit(call)


def send(server: Server, path: str, body: Json) -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=limit(60))


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_a_client_may_stand_behind_others_and_not_before_them(server: Server, path: str) -> None:
    asked = {**ASK} if path == CHAT else {"model": "demo-chat", "prompt": "hi", "max_tokens": 4}
    for priority, status in ((0, 200), (7, 200), (-1, 400), (-(2**40), 400), (1.5, 400)):
        answer = send(server, path, {**asked, "priority": priority})
        assert answer.status_code == status, (priority, answer.text)
        if status == 400:
            assert answer.json()["error"]["param"] == "priority"


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
def test_a_client_may_name_a_deadline(chat_runner: Runner, path: str) -> None:
    asked = {**ASK} if path == CHAT else {"model": "demo-chat", "prompt": "hi", "max_tokens": 4}
    seen: list[float | None] = []
    chat_runner.set_listener(lambda event: seen.append(event.deadline) if isinstance(event, Submitted) else None)
    with workbench.serve(chat_runner) as server:
        for deadline, status in ((None, 200), (2.5, 200), (0, 400), (-1, 400), ("soon", 400)):
            answer = send(server, path, {**asked, "deadline": deadline})
            assert answer.status_code == status, (deadline, answer.text)
            if status == 400:
                assert answer.json()["error"]["param"] == "deadline"
    assert seen == [None, 2.5]


def test_a_call_counts_from_its_arrival(chat_runner: Runner) -> None:
    """Many calls at once do not pass the bound while the gate thinks."""
    gate = SlowGate()
    with workbench.serve(chat_runner, gate=gate, max_waiting=3) as server:
        connections = [connect(server) for _ in range(12)]
        for each in connections:
            each.sendall(post(CHAT, ASK, connection="close"))
        statuses: list[int] = []

        def read(connection: Any) -> None:
            statuses.append(int(read_until(connection, lambda raw: False).split()[1]))

        threads = [threading.Thread(target=read, args=(each,)) for each in connections]
        for thread in threads:
            thread.start()
        until(lambda: len(statuses) == 9)
        assert gate.num_asked == 3 and server.service.num_waiting == 3
        gate.opens.set()
        for thread in threads:
            thread.join()
        assert Counter(statuses) == {200: 3, 503: 9}
        until(lambda: not server.service.runs)


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
def test_a_client_that_leaves_at_the_gate_is_noticed_there(chat_runner: Runner, stream: bool) -> None:
    gate = SlowGate()
    with workbench.serve(chat_runner, gate=gate) as server:
        with held_steps(chat_runner) as steps:
            with connect(server) as connection:
                connection.sendall(post(CHAT, {**ASK, "stream": stream}))
                until(lambda: gate.num_asked)
                (run,) = server.service.runs
            until(lambda: run.has_left)
            gate.opens.set()
            until(lambda: gate.outcomes)  # what was admitted is settled
            assert gate.outcomes[0][1].ended == "cancelled" and not steps.waiting.is_set()
        assert not server.service.runs


def test_tenants_take_turns_in_the_threads_of_prompts() -> None:
    """Whatever arrives in whatever order: a tenant's next prompt waits for one of each other tenant's at most."""
    draw = random.Random(5)

    async def play(arrivals: list[str], leaving: set[int]) -> list[str]:
        threads, begins, order = PromptThreads(1), threading.Event(), []
        blocked = asyncio.create_task(threads.run("first", begins.wait))
        await asyncio.sleep(0)
        tasks = []
        for tenant in arrivals:
            tasks.append(asyncio.create_task(threads.run(tenant, lambda tenant=tenant: order.append(tenant))))
            await asyncio.sleep(0)
        for number in leaving:
            tasks[number].cancel()
        begins.set()
        await asyncio.gather(blocked, *tasks, return_exceptions=True)
        assert await threads.run("last", lambda: "free again") == "free again"
        threads.close()
        return order

    for _ in range(40):
        arrivals = [draw.choice("aaaaabbc") for _ in range(draw.randint(1, 20))]
        leaving = {number for number in range(len(arrivals)) if draw.random() < 0.2}
        order = run_async(play(arrivals, leaving))
        left = Counter(tenant for number, tenant in enumerate(arrivals) if number not in leaving)
        assert Counter(order) == left
        for place, tenant in enumerate(order[:-1]):
            others = {each for each in left if each != tenant and each in order[place + 1 :]}
            assert order[place + 1] != tenant or not others, (arrivals, order)


def test_embeddings_are_calls_and_hold_no_thread(chat_runner: Runner) -> None:
    """While a step does not end they wait, are counted and bounded, and end with their client; prompts are read."""
    gate = RecordingGate()
    with workbench.serve(chat_runner, gate=gate, num_threads=1, max_waiting=4) as server:
        with held_steps(chat_runner) as steps:
            busy = connect(server)
            busy.sendall(post(CHAT, ASK))
            assert steps.waiting.wait()
            clients = [connect(server) for _ in range(3)]
            for each in clients:
                each.sendall(post("/v1/embeddings", EMBED))
            until(lambda: len(server.service.runs) == 4)
            refused = send(server, "/v1/embeddings", EMBED)
            assert refused.status_code == 503 and "wait" in refused.json()["error"]["message"]
            clients.pop().close()
            until(lambda: len(gate.outcomes) == 1)  # though no step has ended
            assert gate.outcomes[0][1].ended == "cancelled"
            assert send(server, "/tokenize", {"prompt": "read meanwhile"}).status_code == 200
        for each in [busy, *clients]:
            assert b" 200 OK" in read_until(each, lambda raw: b"\r\n\r\n" in raw).splitlines()[0]
            each.close()
        until(lambda: not server.service.runs)
        ends = Counter(f"{call.purpose} {outcome.ended}" for call, outcome in gate.outcomes)
        assert ends == {"embed cancelled": 1, "embed finished": 2, "answer finished": 1, "tokenize finished": 1}


def test_a_client_that_leaves_pays_for_the_chunks_that_began(
    chat_runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for the one under way as it leaves, and for no later one."""
    advance, begun, goes_on = TextMean.advance, threading.Semaphore(0), threading.Semaphore(0)

    def held(self: TextMean, runner: Runner) -> bool:
        begun.release()
        goes_on.acquire()
        return advance(self, runner)

    monkeypatch.setattr(TextMean, "advance", held)
    gate, body = RecordingGate(), {"model": "demo-chat", "input": [[5] * 700, [6] * 700]}
    with workbench.serve(chat_runner, gate=gate) as server:
        try:
            with connect(server) as client:
                client.sendall(post("/v1/embeddings", body))
                begun.acquire()
                goes_on.release()
                begun.acquire()  # the second chunk is being computed
            until(lambda: gate.outcomes)
            ((_, outcome),) = gate.outcomes
            assert outcome.ended == "cancelled" and outcome.used.prompt_tokens == 2 * TOKENS_PER_CHUNK
        finally:
            goes_on.release(100)
        assert send(server, "/v1/embeddings", body).json()["usage"]["prompt_tokens"] == 1400
        assert gate.outcomes[-1][1].used.prompt_tokens == 1400


def test_embeddings_take_turns_with_the_steps(chat_runner: Runner) -> None:
    """Between two steps there is one chunk at most, however many texts wait."""
    with workbench.serve(chat_runner) as server, held_steps(chat_runner) as steps:
        with connect(server) as chat, connect(server) as vectors, connect(server) as others:
            chat.sendall(post(CHAT, {**ASK, "max_tokens": 64, "ignore_eos": True}))
            assert steps.waiting.wait()
            jobs = RunnerThread.attach(chat_runner)._jobs
            for each in (vectors, others):
                each.sendall(post("/v1/embeddings", {**EMBED, "input": ["a text"] * 20}))
            until(lambda: jobs)
            until(lambda: len(server.service.runs) == 3)
            for _ in range(5):
                assert len(jobs) <= 1
                done = steps.done
                steps.allow()
                until(lambda done=done: steps.done > done and steps.waiting.is_set())
            steps.release()
            for each in (chat, vectors, others):
                assert b" 200 OK" in read_until(each, lambda raw: b"\r\n\r\n" in raw).splitlines()[0]
        until(lambda: not server.service.runs)
        assert RunnerThread.attach(chat_runner).call(pages_used) == 0


def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded(
    server: Server, chat_runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = chat_runner.tokenizer
    assert tokenizer is not None
    encoded: list[int] = []
    encode = tokenizer.encode
    monkeypatch.setattr(tokenizer, "encode", lambda text, *more: encoded.append(len(text)) or encode(text, *more))
    long = "word " * 600_000
    bodies: list[tuple[str, Json]] = [
        ("/v1/completions", {"model": "demo-chat", "prompt": long, "max_tokens": 1}),
        ("/v1/embeddings", {"model": "demo-chat", "input": long}),
        (CHAT, {**ASK, "messages": [{"role": "user", "content": long}]}),
    ]
    for path, body in bodies:
        answer = send(server, path, body)
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded", path
    assert max(encoded, default=0) < 10_000
