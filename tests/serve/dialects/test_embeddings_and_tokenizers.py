"""Embeddings and the routes of the tokenizer, over a server."""

from __future__ import annotations

import math
from typing import Any

import httpx
import openai
import pytest
from openai.types import embedding_create_params

from workbench.engine.embeddings import embed_texts
from workbench.engine.runner import Runner
from workbench.serve.dialects.openai.embeddings import EmbeddingBody
from workbench.serve.server import Server


def test_embeddings_are_those_of_the_runner_in_both_encodings(client: openai.OpenAI, chat_runner: Runner) -> None:
    texts = ["hello", "12 + 30"]
    expected = [each.vector for each in embed_texts(chat_runner, texts)]
    for encoding in ({"encoding_format": "float"}, {}, {"extra_body": {"encoding_format": None}}):  # base64 by itself
        values: Any = encoding
        found = client.embeddings.create(model="demo-chat", input=texts, **values)
        for each, vector in zip(found.data, expected, strict=True):
            assert each.embedding == pytest.approx(vector, abs=1e-6)
    assert (
        found.usage.prompt_tokens
        == found.usage.total_tokens
        == sum(e.num_tokens for e in embed_texts(chat_runner, texts))
    )
    assert found.to_dict()["workbench"] == {
        "pooling": "mean", "layer": len(chat_runner.model.blocks), "num_layers": len(chat_runner.model.blocks),
        "unit_length": True,
    }  # fmt: skip


def test_fewer_dimensions_are_the_first_ones_at_unit_length(client: openai.OpenAI) -> None:
    whole = client.embeddings.create(model="demo-chat", input="hello").data[0].embedding
    short = client.embeddings.create(model="demo-chat", input="hello", dimensions=8).data[0].embedding
    length = math.hypot(*whole[:8])
    assert short == pytest.approx([each / length for each in whole[:8]], abs=1e-5)


def test_ids_are_taken_as_they_are(client: openai.OpenAI, chat_runner: Runner) -> None:
    (vector,) = embed_texts(chat_runner, [[5, 6, 7]])
    for given in ([5, 6, 7], [[5, 6, 7]]):
        values: Any = given
        found = client.embeddings.create(model="demo-chat", input=values).data[0].embedding
        assert found == pytest.approx(vector.vector, abs=1e-6)


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input.1"),
        ({"input": "a", "dimensions": 10**6}, "dimensions"),
        ({"input": "a", "extra_body": {"layer": 99}}, "layer"),
        ({"input": [10**7]}, None),
        ({"input": "a", "extra_body": {"normalize": False}}, "normalize"),
    ],
)
def test_what_is_refused(client: openai.OpenAI, values: dict[str, Any], param: str | None) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(model="demo-chat", **values)
    body: Any = caught.value.body
    assert param is None or body["param"] == param


def test_every_field_of_an_embedding_is_known() -> None:
    known = {*EmbeddingBody.model_fields} | {*EmbeddingBody.IGNORED}
    assert {*embedding_create_params.EmbeddingCreateParams.__annotations__} <= known


def test_tokenizing_and_back(server: Server, chat_runner: Runner) -> None:
    tokenizer = chat_runner.tokenizer
    assert tokenizer is not None
    with httpx.Client(base_url=server.url) as http:
        text = "Hello, wörld <|user|>"
        found = http.post("/tokenize", json={"prompt": text, "add_special_tokens": False, "return_token_strs": True})
        values = found.json()
        assert values["tokens"] == tokenizer.encode(text) and values["count"] == len(values["tokens"])
        assert len(values["token_strs"]) == values["count"] and values["max_model_len"] == 1024
        assert http.post("/detokenize", json={"tokens": values["tokens"]}).json() == {"prompt": text}
        begun = http.post("/tokenize", json={"prompt": text}).json()["tokens"]
        assert begun == [*tokenizer.bos_token_ids, *values["tokens"]]
        messages = [{"role": "user", "content": "hi"}]
        chat = http.post("/tokenize", json={"messages": messages}).json()["tokens"]
        assert tokenizer.decode(chat, special=True).endswith("<|assistant|>")
        info = http.get("/tokenizer_info").json()
        template = chat_runner.chat_template
        assert template is not None and info["chat_template"] == template.text
        assert info["eos_token"] in tokenizer.special_token_ids
        for path, body in (("/tokenize", {}), ("/detokenize", {"tokens": [10**9]}), ("/tokenize", {"promt": "a"})):
            assert http.post(path, json=body).status_code == 400
        assert http.post("/tokenize", json={"prompt": "a", "model": "x"}).status_code == 404
