"""The gateway before a server: both vendors' clients, raw events, and accounts that are those of the traces."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.gateway.calls import Json
from tests.patience import limit, until
from workbench.economics.prices import load_prices
from workbench.engine.runner import Runner
from workbench.gateway.gate import Gateway
from workbench.serve.server import Server, serve
from workbench.serve.watch.traces import CallTrace

MODEL = "demo-chat"
LIMITS = {
    "each_key": {"requests_per_minute": 10_000, "tokens_per_minute": 10_000_000},
    "tenants": {"poor": {"requests_per_minute": 1, "money_per_day": 100}, "broke": {"money_per_day": 0}},
}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Gateway:
    folder = tmp_path_factory.mktemp("gateway")
    rules = [{"name": "no weather", "terms": ["weather"]}]
    return Gateway(
        {
            "keys": str(folder / "keys.json"),
            "limits": LIMITS,
            "moderation": {"rules": rules},
            "router": {"rules": [{"to": MODEL, "models": ["auto"]}], "fallbacks": {"large": [MODEL]}},
            "answers": {"ttl_seconds": 600},
            "accounting": {"file": str(folder / "usage.sqlite"), "prices": "article-a"},
        }
    )


@pytest.fixture(scope="module")
def server(gateway: Gateway, chat_runner: Runner) -> Iterator[Server]:
    with serve(chat_runner, gate=gateway) as running:
        yield running


def key_of(gateway: Gateway, owner: str, **values: Any) -> str:
    assert gateway.keys is not None
    return gateway.keys.create(owner, **values)[1]


def post(server: Server, key: str, path: str = "/v1/chat/completions", **body: Any) -> httpx.Response:
    values = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "temperature": 0} | body
    return httpx.post(f"{server.url}{path}", json=values, headers={"authorization": f"Bearer {key}"}, timeout=limit(60))


def test_keys_are_asked_for_everywhere_but_health(
    server: Server, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert httpx.get(f"{server.url}/health").status_code == 200
    for path in ("/v1/models", "/v1/usage", "/v1/limits", "/v1/keys", "/v1/server", "/metrics", "/v1/traces/x"):
        assert httpx.get(f"{server.url}{path}").status_code == 401, path
    assert post(server, "wb_x_y").status_code == 401
    scoped = key_of(gateway, "alice", models=("other",))
    assert post(server, scoped).status_code == 403
    alice = {"authorization": f"Bearer {key_of(gateway, 'alice')}"}
    for path in ("/v1/keys", "/v1/server", "/metrics"):
        assert httpx.get(f"{server.url}{path}", headers=alice).status_code == 403, path
    admin = {"x-api-key": key_of(gateway, "root", admin=True)}
    assert "vllm:" in httpx.get(f"{server.url}/metrics", headers=admin).text
    settings = server.service.settings
    monkeypatch.setattr(server.service, "settings", settings.model_copy(update={"metrics_open": True}))
    assert httpx.get(f"{server.url}/metrics", headers=alice).status_code == 200
    assert httpx.get(f"{server.url}/metrics").status_code == 401
    listed = httpx.get(f"{server.url}/v1/keys", headers=admin).json()["data"]
    assert {each["owner"] for each in listed} == {"alice", "root"} and "sha256" not in str(listed)


def test_both_clients_are_answered_and_see_their_limits(server: Server, gateway: Gateway) -> None:
    key = key_of(gateway, "clients")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as client:
        raw = client.chat.completions.with_raw_response.create(
            model="auto", messages=[{"role": "user", "content": "Hello"}], max_tokens=8
        )
        assert raw.parse().model == MODEL
        assert raw.headers["x-ratelimit-limit-requests"] == "10000"
        assert int(raw.headers["x-ratelimit-remaining-tokens"]) < 10_000_000
        fallback = client.chat.completions.create(
            model="large", messages=[{"role": "user", "content": "Hello"}], max_tokens=8
        )
        assert fallback.model == MODEL
    with anthropic.Anthropic(base_url=server.url, api_key=key, max_retries=0) as client:
        answer = client.messages.with_raw_response.create(
            model=MODEL, messages=[{"role": "user", "content": "Hello"}], max_tokens=8
        )
        assert answer.headers["anthropic-ratelimit-requests-limit"] == "10000"
        assert answer.headers["anthropic-ratelimit-tokens-reset"].endswith("Z")


def test_limits_and_budgets_refuse_in_the_protocols_shape(server: Server, gateway: Gateway) -> None:
    poor, broke = key_of(gateway, "poor"), key_of(gateway, "broke")
    assert post(server, poor).status_code == 200
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=poor, max_retries=0) as client:
        with pytest.raises(openai.RateLimitError, match="requests a minute") as caught:
            client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Hi"}])
        assert int(caught.value.response.headers["retry-after"]) > 50
    refused = post(server, broke, "/v1/messages")
    assert refused.status_code == 402 and refused.json()["error"]["type"] == "billing_error"


def test_bounds_refuse_before_any_work(server: Server, gateway: Gateway) -> None:
    refused = post(server, key_of(gateway, "bounds"), n=100, max_tokens=5_000)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "max_completion_tokens"


def test_moderation_stops_prompts_and_streams(server: Server, gateway: Gateway) -> None:
    key = key_of(gateway, "moderated")
    refused = post(server, key, messages=[{"role": "user", "content": "The weather?"}])
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "content_filter"
    question = [{"role": "user", "content": "What is it like?"}]
    schema = {"type": "string", "enum": ["lovely weather today"]}  # the model can say nothing else
    form = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0) as client:
        create: Any = client.chat.completions.create
        stream = create(model=MODEL, messages=question, max_tokens=40, stream=True, response_format=form)
        parts = list(stream)
    name, chunks = parts[0].id, [choice for chunk in parts for choice in chunk.choices]
    assert chunks[-1].finish_reason == "content_filter"
    assert "".join(each.delta.content or "" for each in chunks) == '"lovely '
    path, admin = f"{server.url}/v1/traces/{name}", key_of(gateway, "root", admin=True)
    own, whole = (httpx.get(path, headers={"authorization": f"Bearer {each}"}).json() for each in (key, admin))
    assert own["text_withheld"] and not whole["text_withheld"]
    (shown,), (said,) = ([each["tokens"] for each in trace["choices"]] for trace in (own, whole))
    assert "weather" in "".join(each["text"] for each in said), "the trace has what was withheld"
    assert [each["time"] for each in shown] == [each["time"] for each in said]
    assert not any({"id", "text", "logprob"} & each.keys() for each in shown) and "weather" not in json.dumps(
        own["choices"]
    )
    form = {"format": {"type": "json_schema", "schema": schema}}
    answer = post(server, key, "/v1/messages", messages=question, max_tokens=40, output_config=form).json()
    assert answer["stop_reason"] == "refusal" and answer["content"][0]["text"] == '"lovely '


def test_a_kept_answer_is_replayed_in_the_other_protocol(server: Server, gateway: Gateway) -> None:
    key, other = key_of(gateway, "kept"), key_of(gateway, "not kept")
    question = [{"role": "user", "content": "Say hello."}]
    first = post(server, key, messages=question, max_tokens=12).json()
    with anthropic.Anthropic(base_url=server.url, api_key=key, max_retries=0) as client:
        begin: Any = client.messages.stream
        values = {"model": MODEL, "messages": question, "max_tokens": 12, "extra_body": {"temperature": 0}}
        with begin(**values) as stream:
            text, message = stream.get_final_text(), stream.get_final_message()
    assert text == first["choices"][0]["message"]["content"]
    assert message.usage.output_tokens == first["usage"]["completion_tokens"]
    assert gateway.answers is not None and gateway.answers.hits["exact"] == 1
    post(server, other, messages=question, max_tokens=12)
    assert gateway.answers.hits["exact"] == 1  # that of another tenant


KINDS = ("plain", "stream", "leave", "same", "messages", "moderated", "failed", "embedding", "batch")


def test_the_accounts_are_those_of_the_traces(
    server: Server, gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random traffic of every kind: also calls that end early, fail, are refused, or are lines of batches."""
    key, draw, begin = key_of(gateway, "traffic"), random.Random(3), server.service._open
    kinds = [*KINDS, *(draw.choice(KINDS) for _ in range(19))]
    headers = {"authorization": f"Bearer {key}"}

    async def fail_some(trace: CallTrace) -> Any:
        if "must fail" in str(trace.call.prompts):
            raise RuntimeError("a test breaks this call after its admission")
        return await begin(trace)

    monkeypatch.setattr(server.service, "_open", fail_some)

    def body_of(number: int, kind: str) -> Json:
        words = {"same": "the same", "moderated": f"weather {number}", "failed": f"{number} must fail"}
        messages = [{"role": "user", "content": words.get(kind, f"number {number}")}]
        tokens = 5 if kind == "same" else 1 + 7 * number % 30
        return {"model": MODEL, "temperature": 0, "messages": messages, "max_tokens": tokens}

    def ask(number: int) -> int:
        """Return how many calls were admitted."""
        kind = kinds[number]
        body = body_of(number, kind)
        if kind == "embedding":
            values = {"model": MODEL, "input": ["a text", f"number {number}"]}
            assert httpx.post(f"{server.url}/v1/embeddings", json=values, headers=headers, timeout=limit(60)).is_success
        elif kind in ("stream", "leave"):
            values = body | {"stream": True}
            with httpx.stream(
                "POST", f"{server.url}/v1/chat/completions", json=values, headers=headers, timeout=limit(60)
            ) as response:
                for _ in response.iter_lines():
                    if kind == "leave":
                        break
        elif kind == "batch":
            return _batch(server, key, [body_of(number, each) for each in ("same", "plain", "moderated", "failed")])
        else:
            path = "/v1/messages" if kind == "messages" else "/v1/chat/completions"
            answer = post(server, key, path, **body)
            assert answer.status_code == {"moderated": 400, "failed": 500}.get(kind, 200)
        return 0 if kind == "moderated" else 1

    with ThreadPoolExecutor(6) as pool:
        admitted = sum(pool.map(ask, range(len(kinds))))
    until(lambda: not server.service.runs)
    found = httpx.get(f"{server.url}/v1/usage?by=id,ended", headers=headers).json()["data"]
    caller = gateway_caller(gateway, key)
    traces = {each.call.id: each for each in server.service.traces.latest() if each.call.caller.key == caller.key}
    assert {row["id"] for row in found} == traces.keys() and len(found) == admitted
    prices, sums = load_prices("article-a"), Counter[str]()
    for row in found:
        trace = traces[row["id"]]
        assert trace.outcome is not None and trace.outcome.ended == row["ended"]
        used, is_kept = trace.outcome.used, row["ended"] == "kept"
        assert row["kept"] == (used.prompt_tokens + used.completion_tokens if is_kept else 0)
        assert row["output"] == (0 if is_kept else used.completion_tokens)
        assert row["input"] + row["cache_read"] + row["cache_write_5m"] == (0 if is_kept else used.prompt_tokens)
        sums.update({"output": row["output"], "input": row["input"], "cache_read": row["cache_read"]})
    pages, after = [], ""
    while after is not None:
        page = httpx.get(
            f"{server.url}/v1/usage", params={"by": "id,ended", "limit": 5, "after": after}, headers=headers
        ).json()
        assert len(page["data"]) == 5 or not page["has_more"]
        pages, after = pages + page["data"], page["last"]
    assert pages == found and len(pages) > 5
    for wrong in ("limit=0", "limit=10001", "after=x", 'after=["a"]', 'after=["a",1]'):
        refused = httpx.get(f"{server.url}/v1/usage?by=id,ended&{wrong}", headers=headers)
        assert refused.status_code == 400, wrong
    (whole,) = httpx.get(f"{server.url}/v1/usage?by=tenant", headers=headers).json()["data"]
    assert whole["calls"] == admitted and whole["output"] == sums["output"] and whole["input"] == sums["input"]
    cost = sum(count * prices.token_price(kind) for kind, count in sums.items())
    assert Fraction(whole["exact_cost"]) == cost
    assert {row["ended"] for row in found} >= {"finished", "kept", "failed", "cancelled"}
    assert {each.call.dialect for each in traces.values()} >= {"openai.chat", "anthropic.messages", "openai.embeddings"}


def _batch(server: Server, key: str, bodies: list[Json]) -> int:
    """Run a batch; return how many of its calls were admitted: all but the one that is moderated."""
    lines = [
        json.dumps({"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": body})
        for number, body in enumerate(bodies)
    ]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, timeout=limit(60)) as client:
        uploaded = client.files.create(file=("lines.jsonl", "\n".join(lines).encode()), purpose="batch")
        made = client.batches.create(
            input_file_id=uploaded.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        until(lambda: client.batches.retrieve(made.id).status == "completed")
        counts = client.batches.retrieve(made.id).request_counts
    assert counts is not None and (counts.completed, counts.failed) == (2, 2)
    return len(bodies) - 1


def gateway_caller(gateway: Gateway, key: str) -> Any:
    assert gateway.keys is not None
    found = gateway.keys.check(key)
    assert found is not None
    return gateway.keys.caller(found)


def test_usage_is_read_beside_the_server(server: Server, gateway: Gateway, capsys: pytest.CaptureFixture[str]) -> None:
    from workbench.cli import main

    post(server, key_of(gateway, "command line"))
    until(lambda: not server.service.runs)
    gateway.accounts.flush()
    file = gateway.config.accounting.file
    assert isinstance(file, Path)
    assert main(["usage", "--by", "tenant", "--file", str(file), "--json"]) == 0
    assert '"tenant": "command line"' in capsys.readouterr().out
