"""The event loop: what takes long is done beside it, and nothing of an answer depends on where it was written."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram

import workbench
from tests.patience import limit
from workbench.engine.runner import Runner
from workbench.serve import responses, service
from workbench.serve.answers.pieces import Ended, Piece, PromptRead, Text, TokenLogprob, num_values
from workbench.serve.dialects.openai.chat import ChatWriter, OpenAIChat
from workbench.serve.server import Server
from workbench.serve.watch.metrics import SECONDS, Counts

ASK: dict[str, Any] = {
    "model": "demo-chat", "messages": [{"role": "user", "content": "What is 2 + 3?"}], "max_tokens": 12, "seed": 5,
    "temperature": 0.8,
}  # fmt: skip


def streamed(client: openai.OpenAI) -> str:
    chunks = client.chat.completions.create(**ASK, stream=True, logprobs=True, top_logprobs=3)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def plain(client: openai.OpenAI) -> str:
    return client.chat.completions.create(**ASK, logprobs=True, top_logprobs=3).choices[0].message.content or ""


@pytest.mark.parametrize("ask", [plain, streamed])
def test_large_answers_and_bodies_are_beside_the_loop(
    chat_runner: Runner, monkeypatch: pytest.MonkeyPatch, ask: Callable[[openai.OpenAI], str]
) -> None:
    """Count everything as large: the answer is the same, and no thread but the prompts' has written it."""
    threads: set[str] = set()

    def recorded(function: Callable[..., Any]) -> Callable[..., Any]:
        def record(*arguments: Any, **more: Any) -> Any:
            threads.add(threading.current_thread().name)
            return function(*arguments, **more)

        return record

    for kind, name in ((OpenAIChat, "parse"), (OpenAIChat, "answer"), (ChatWriter, "write")):
        monkeypatch.setattr(kind, name, recorded(getattr(kind, name)))
    with workbench.serve(chat_runner) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="any")
        small = ask(client)
        assert threads == {"server"}
        threads.clear()
        monkeypatch.setattr(responses, "MAX_ON_LOOP", 0)
        monkeypatch.setattr(service, "MAX_BYTES_ON_LOOP", 0)
        assert ask(client) == small
        assert threads and all(each.startswith("prompts") for each in threads), threads


def test_errors_of_a_body_that_is_parsed_beside_the_loop_are_the_same(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    none = b'{"model": "none", "messages": [{"role": "user", "content": "hi"}]}'
    bodies = (b"{", b"[]", b'{"model": "demo-chat", "messages": []}', none)
    url = f"{server.url}/v1/chat/completions"
    here = [httpx.post(url, content=each, timeout=limit(60)) for each in bodies]
    monkeypatch.setattr(service, "MAX_BYTES_ON_LOOP", 0)
    beside = [httpx.post(url, content=each, timeout=limit(60)) for each in bodies]
    assert [each.json() for each in here] == [each.json() for each in beside]
    assert [each.status_code for each in beside] == [400, 400, 400, 404]


@given(tokens=st.integers(0, 50), alternatives=st.integers(0, 20))
def test_the_size_of_pieces_goes_with_their_log_probabilities(tokens: int, alternatives: int) -> None:
    top = tuple((number, -1.0) for number in range(alternatives))
    logprobs = (TokenLogprob(1, None), *(TokenLogprob(1, -1.0, top) for _ in range(tokens)))
    pieces: list[Piece] = [PromptRead(logprobs=logprobs), Text(text="x"), Ended()]
    assert num_values(pieces) >= 3 + tokens * (1 + alternatives)


@given(st.lists(st.lists(st.one_of(st.floats(0, 1000), st.sampled_from(SECONDS)), max_size=30), max_size=5))
def test_latencies_are_counted_as_prometheus_counts_them(answers: list[list[float]]) -> None:
    registry = CollectorRegistry()
    theirs, ours = Histogram("seconds", "One by one.", registry=registry, buckets=SECONDS), Counts()
    for values in answers:
        ours.add(values)
        for each in values:
            theirs.observe(each)
    (family,) = registry.collect()
    expected = [(each.labels["le"], each.value) for each in family.samples if each.name == "seconds_bucket"]
    assert ours.buckets() == expected
    assert ours.total == pytest.approx(sum(map(sum, answers)))


def test_the_metrics_of_a_server_have_them(server: Server, client: openai.OpenAI) -> None:
    client.chat.completions.create(**ASK)
    lines = httpx.get(f"{server.url}/metrics", timeout=limit(60)).text.splitlines()
    (count,) = (line for line in lines if line.startswith("vllm:inter_token_latency_seconds_count"))
    (whole,) = (line for line in lines if line.startswith("vllm:generation_tokens_total"))
    assert 0 < float(count.split()[1]) < float(whole.split()[1])
