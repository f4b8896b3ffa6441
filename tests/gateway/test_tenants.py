"""Two keys before one server: what is one tenant's is not there for the other, in every protocol."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.gateway.calls import Json
from tests.patience import limit, until
from workbench.engine.runner import Runner
from workbench.gateway.gate import Gateway
from workbench.serve.server import Server, serve

MODEL, OTHER = "demo-chat", "another"
QUESTION: list[Any] = [{"role": "user", "content": "hi"}]
TOKENIZED: dict[str, Json] = {
    "/tokenize": {"prompt": "word " * 500},
    "/detokenize": {"tokens": [5] * 500},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "word " * 500}]},
    "/v1/responses/input_tokens": {"input": "word " * 500},
}


@dataclass
class Tenant:
    """A key with the clients of both vendors."""

    server: Server
    key: str

    def __post_init__(self) -> None:
        self.openai = openai.OpenAI(base_url=f"{self.server.url}/v1", api_key=self.key, max_retries=0)
        self.anthropic = anthropic.Anthropic(base_url=self.server.url, api_key=self.key, max_retries=0)

    def get(self, path: str, **headers: str) -> httpx.Response:
        found = {"authorization": f"Bearer {self.key}", **headers}
        return httpx.get(self.server.url + path, headers=found, timeout=limit(60))

    def post(self, path: str, **body: Any) -> httpx.Response:
        found = {"authorization": f"Bearer {self.key}"}
        return httpx.post(self.server.url + path, json=body, headers=found, timeout=limit(60))


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Gateway:
    folder: Path = tmp_path_factory.mktemp("tenants")
    few = {"requests_per_minute": 5, "tokens_per_minute": 100}
    return Gateway(
        {
            "keys": str(folder / "keys.json"),
            "limits": {"tenants": {"few": few}},
            "router": {"rules": [{"to": MODEL, "models": ["auto"]}]},
            "accounting": {"file": str(folder / "usage.sqlite")},
        }
    )


@pytest.fixture(scope="module")
def server(gateway: Gateway, chat_runner: Runner) -> Iterator[Server]:
    with serve({MODEL: chat_runner, OTHER: chat_runner}, gate=gateway) as running:
        yield running


@pytest.fixture(scope="module")
def alice(server: Server, gateway: Gateway) -> Tenant:
    return tenant(server, gateway, "alice")


@pytest.fixture(scope="module")
def bob(server: Server, gateway: Gateway) -> Tenant:
    return tenant(server, gateway, "bob")


def tenant(server: Server, gateway: Gateway, owner: str, **values: Any) -> Tenant:
    assert gateway.keys is not None
    return Tenant(server, gateway.keys.create(owner, **values)[1])


def test_a_response_is_its_tenants_alone(alice: Tenant, bob: Tenant) -> None:
    made = alice.openai.responses.create(model=MODEL, input="hi", max_output_tokens=4)
    responses = bob.openai.responses
    for ask in (
        lambda: responses.retrieve(made.id),
        lambda: responses.input_items.list(made.id),
        lambda: responses.delete(made.id),
        lambda: responses.cancel(made.id),
        lambda: responses.create(model=MODEL, input="x", previous_response_id=made.id),
        lambda: responses.input_tokens.count(model=MODEL, input="x", previous_response_id=made.id),
    ):
        with pytest.raises(openai.NotFoundError, match="no response"):
            ask()
    assert alice.openai.responses.retrieve(made.id).output_text == made.output_text
    more = alice.openai.responses.create(model=MODEL, input="x", previous_response_id=made.id, max_output_tokens=4)
    assert more.usage is not None and made.usage is not None and more.usage.input_tokens > made.usage.input_tokens


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": QUESTION, "max_tokens": 2}),
        ("/v1/completions", {"prompt": "hi", "max_tokens": 2}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 2}),
        ("/v1/messages", {"messages": QUESTION, "max_tokens": 2}),
        ("/v1/embeddings", {"input": "hi"}),
    ],
)
def test_a_trace_is_its_tenants_and_the_administrators(
    server: Server, gateway: Gateway, alice: Tenant, bob: Tenant, path: str, body: Json
) -> None:
    answer = alice.post(path, model=MODEL, **body)
    assert answer.status_code == 200, answer.text
    name = answer.headers["x-request-id"]
    until(lambda: not server.service.runs)
    found = alice.get(f"/v1/traces/{name}")
    assert found.status_code == 200 and found.json()["outcome"]["ended"] == "finished"
    refused = bob.get(f"/v1/traces/{name}")
    assert refused.status_code == 404 and "not yours" in refused.text
    assert tenant(server, gateway, "root", admin=True).get(f"/v1/traces/{name}").status_code == 200


def test_files_and_batches_are_their_tenants_alone(alice: Tenant, bob: Tenant) -> None:
    line = (
        b'{"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": {"model": "demo-chat", "input": "a"}}'
    )
    made = alice.openai.files.create(file=("requests.jsonl", line), purpose="batch")
    files, batches = bob.openai.files, bob.openai.batches
    batch = alice.openai.batches.create(
        input_file_id=made.id, endpoint="/v1/embeddings", completion_window="24h"
    )  # fmt: skip
    until(lambda: alice.openai.batches.retrieve(batch.id).status == "completed")
    output = alice.openai.batches.retrieve(batch.id).output_file_id
    assert output is not None
    for ask in (
        lambda: files.retrieve(made.id),
        lambda: files.content(made.id),
        lambda: files.content(output),
        lambda: files.delete(made.id),
        lambda: batches.create(input_file_id=made.id, endpoint="/v1/embeddings", completion_window="24h"),
        lambda: batches.retrieve(batch.id),
        lambda: batches.cancel(batch.id),
    ):
        with pytest.raises(openai.NotFoundError):
            ask()
    assert not files.list().data and not batches.list().data
    assert (
        alice.openai.files.content(made.id).content == line
        and b"embedding" in alice.openai.files.content(output).content
    )
    ask_for: Any = [{"custom_id": "a", "params": {"model": MODEL, "max_tokens": 1, "messages": QUESTION}}]
    mine = alice.anthropic.messages.batches.create(requests=ask_for)
    theirs = bob.anthropic.messages.batches
    for ask in (lambda: theirs.retrieve(mine.id), lambda: theirs.cancel(mine.id), lambda: [*theirs.results(mine.id)]):
        with pytest.raises((anthropic.NotFoundError, anthropic.AnthropicError)):
            ask()
    assert not theirs.list().data
    until(lambda: alice.anthropic.messages.batches.retrieve(mine.id).processing_status == "ended")


def test_models_that_a_key_may_not_use_are_not_listed(server: Server, gateway: Gateway, alice: Tenant) -> None:
    assert [each.id for each in alice.openai.models.list()] == [MODEL, OTHER]
    one = tenant(server, gateway, "one", models=(OTHER,))
    assert [each.id for each in one.openai.models.list()] == [OTHER]
    assert [each.id for each in one.anthropic.models.list()] == [OTHER]
    assert one.openai.models.retrieve(OTHER).id == OTHER
    for hidden in (one.get(f"/v1/models/{MODEL}"), one.get(f"/tokenizer_info?model={MODEL}")):
        assert hidden.status_code == 404 and MODEL not in hidden.json()["error"]["message"].replace(f"{MODEL!r} is", "")
    unknown = one.post("/v1/chat/completions", model="demo-char", messages=QUESTION)
    assert unknown.status_code == 404 and OTHER in unknown.text and MODEL not in unknown.text
    assert one.get("/tokenizer_info").status_code == 200  # that of the first model that it may use
    assert one.post("/tokenize", prompt="a").status_code == 200
    for path, body in TOKENIZED.items():
        assert one.post(path, **body, model=MODEL).status_code == 403, path


def test_an_alias_is_a_model_on_every_route(alice: Tenant) -> None:
    bodies = {**TOKENIZED, "/v1/embeddings": {"input": "a", "dimensions": 8}}
    for path, body in bodies.items():
        named, routed = (alice.post(path, **body, model=name) for name in (MODEL, "auto"))
        assert routed.status_code == 200, (path, routed.text)
        assert routed.json() == named.json(), path
    wrong = alice.post("/v1/embeddings", input="a", dimensions=10**6, model="auto")
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "dimensions"


def test_what_is_only_tokenized_counts_as_a_request_without_tokens(server: Server, gateway: Gateway) -> None:
    few = tenant(server, gateway, "few")
    for path, body in [*TOKENIZED.items(), ("/tokenize", {"messages": QUESTION})]:
        assert few.post(path, **body, model=MODEL).status_code == 200, path  # of 100 tokens a minute none is used
    for path, body in TOKENIZED.items():
        refused = few.post(path, **body, model=MODEL)
        assert refused.status_code == 429 and "requests a minute" in refused.text, path
    until(lambda: not server.service.runs)
    gateway.accounts.flush()
    (row,) = (each for each in gateway.accounts.sums(("tenant",)) if each.as_dict(("tenant",))["tenant"] == "few")
    values = row.as_dict(("tenant",))
    assert values["calls"] == 5 and values["input"] == values["output"] == 0
    assert not any(call.call.dialect in ("vllm.tokenize", "anthropic.count_tokens") for call in traces(server))


def traces(server: Server) -> list[Any]:
    return server.service.traces.latest()


def test_the_bound_of_embeddings_is_one(chat_runner: Runner, alice: Tenant) -> None:
    """More inputs than a call may have prompts are embedded, and more than 2,048 refused by one sentence."""
    assert len(alice.openai.embeddings.create(model=MODEL, input=[[5]] * 200).data) == 200
    with serve({MODEL: chat_runner}) as plain:
        errors = []
        for url, key in ((alice.server.url, alice.key), (plain.url, "any")):
            with openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
                with pytest.raises(openai.BadRequestError) as caught:
                    client.embeddings.create(model=MODEL, input=[[5]] * 2_049)
                errors.append(caught.value.body)
    assert errors[0] == errors[1] and errors[0]["param"] == "input" and "2,048" in errors[0]["message"]
    tight = Gateway({"bounds": {"inputs": 3}})
    with serve({MODEL: chat_runner}, gate=tight) as server:
        refused = httpx.post(
            f"{server.url}/v1/embeddings", json={"model": MODEL, "input": ["a"] * 4}, timeout=limit(60)
        )
        assert refused.status_code == 400 and refused.json()["error"]["message"] == "input: 4 texts; at most 3"
