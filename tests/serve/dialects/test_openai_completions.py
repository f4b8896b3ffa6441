"""Completions of the openai client: texts and ids, several at once, echo with log-probabilities, the best of many."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from tests.patience import limit
from workbench.engine.runner import Runner
from workbench.engine.runner_thread import RunnerThread
from workbench.serve.server import Server

MODEL = "demo-chat"


def complete(client: openai.OpenAI, prompt: Any, **options: Any) -> Any:
    options = {"temperature": 0, "max_tokens": 6, **options}
    return client.completions.create(model=MODEL, prompt=prompt, **options)


WRONG = [
    ([1, "a"], "1", "valid integer"),
    (["a", 1], "1", "valid string"),
    ([[1], ["a"]], "1.0", "valid integer"),
    (7, "", "valid string"),
]
TOO_MANY = [(["a"] * 1025, "", "1024"), ([[1]] * 1025, "", "1024")]


@pytest.mark.parametrize(
    ("path", "prompt", "place", "words"),
    [("completions", *each) for each in WRONG + TOO_MANY] + [("embeddings", *each) for each in WRONG],
)
def test_an_error_of_a_prompt_is_about_what_it_seems_to_be(
    server: Server, path: str, prompt: Any, place: str, words: str
) -> None:
    field = "input" if path == "embeddings" else "prompt"
    answer = httpx.post(f"{server.url}/v1/{path}", json={"model": MODEL, field: prompt}, timeout=limit(60))
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == ".".join(filter(None, (field, place))), error
    assert words in error["message"] and len(error["message"]) < 400


def test_texts_and_ids_are_completed_alike(client: openai.OpenAI, chat_runner: Runner) -> None:
    texts = ["def f(", "import os\nfor", "x = "]
    assert chat_runner.tokenizer is not None
    start = chat_runner.tokenizer.bos_token_ids
    ids = [[*start, *chat_runner.tokenizer.encode(text)] for text in texts]
    alone = [
        "".join(event.text for event in RunnerThread.attach(chat_runner).stream(text, temperature=0, max_tokens=6))
        for text in texts
    ]
    for prompts in (texts, ids):
        answer = complete(client, prompts)
        assert [choice.text for choice in answer.choices] == alone
        assert answer.usage.prompt_tokens == sum(map(len, ids))
        assert [complete(client, each).choices[0].text for each in prompts] == alone
    streamed = {0: "", 1: "", 2: ""}
    for chunk in complete(client, texts, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert list(streamed.values()) == alone


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
def test_an_echo_has_the_log_probabilities_of_the_prompt(
    client: openai.OpenAI, chat_runner: Runner, stream: bool
) -> None:
    """As lm-eval asks: `token_logprobs` and `top_logprobs` for every token, null for the first."""
    assert chat_runner.tokenizer is not None
    ids = [*chat_runner.tokenizer.bos_token_ids, *chat_runner.tokenizer.encode("def f(x):\n    return x")]
    answer = complete(client, [ids], echo=True, logprobs=1, max_tokens=1, stream=stream)
    chunks = [chunk.choices[0] for chunk in answer if chunk.choices] if stream else [answer.choices[0]]
    found = [each.logprobs for each in chunks if each.logprobs is not None]
    tokens = [token for each in found for token in each.tokens]
    scores = [score for each in found for score in each.token_logprobs]
    tops = [top for each in found for top in each.top_logprobs]
    offsets = [offset for each in found for offset in each.text_offset]
    assert len(tokens) == len(scores) == len(tops) == len(ids) + 1
    assert scores[0] is None and tops[0] is None and all(score <= 0 for score in scores[1:])
    assert all(max(top.values()) >= score for top, score in zip(tops[1:], scores[1:], strict=True))
    assert max(tops[-1].values()) == scores[-1]  # greedy
    text = "".join(each.text for each in chunks)
    assert all(text[offset:].startswith(token) for token, offset in zip(tokens, offsets, strict=True))
    logits = RunnerThread.attach(chat_runner).call(lambda runner: runner.model.logits(ids))
    expected = logits.float().log_softmax(-1)[range(len(ids) - 1), ids[1:]]
    assert scores[1:-1] == pytest.approx(expected.tolist(), abs=2e-2)


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
def test_no_token_beside_an_echo(client: openai.OpenAI, stream: bool) -> None:
    """As lm-eval scores a text: the prompt with its log-probabilities, and nothing after it."""
    options = {"stream_options": {"include_usage": True}} if stream else {}
    answer = complete(client, "def f(x):", echo=True, logprobs=1, max_tokens=0, stream=stream, **options)
    chunks = list(answer) if stream else [answer]
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(each.text for each in choices) == "def f(x):"
    assert choices[-1].finish_reason == "length" and chunks[-1].usage.completion_tokens == 0
    scores = [score for each in choices if each.logprobs for score in each.logprobs.token_logprobs]
    assert len(scores) == chunks[-1].usage.prompt_tokens and scores[0] is None


def test_the_best_of_several_is_counted_with_the_others(client: openai.OpenAI) -> None:
    answer = complete(client, "def f(", n=1, best_of=3, temperature=1.0, seed=4)
    assert len(answer.choices) == 1 and answer.usage.completion_tokens > 6
    with pytest.raises(openai.BadRequestError, match="best_of"):
        complete(client, "def f(", best_of=3, stream=True)
    with pytest.raises(openai.BadRequestError, match="best_of"):
        complete(client, "def f(", n=4, best_of=3)


def test_a_stop_token_ends_a_text_and_is_named(client: openai.OpenAI, chat_runner: Runner) -> None:
    assert chat_runner.tokenizer is not None
    free = complete(client, "def f(", extra_body={"return_token_ids": True}, max_tokens=8).choices[0]
    stop = free.token_ids[4]
    stopped = complete(client, "def f(", extra_body={"stop_token_ids": [stop]}, max_tokens=8).choices[0]
    assert stopped.finish_reason == "stop" and stopped.stop_reason == stop
    assert free.text.startswith(stopped.text) and len(stopped.text) < len(free.text)


def test_what_cannot_be_completed_is_refused_by_name(client: openai.OpenAI) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"prompt": []}, "prompt"), ({"prompt": ""}, "prompt"), ({"prompt": [[]]}, "prompt"),
        ({"suffix": "x"}, "suffix"), ({"prompt": ["a"] * 100, "n": 2}, "n"), ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": True}, "logprobs"), ({"prompt": [10**9]}, ""),
    ]  # fmt: skip
    for values, param in cases:
        with pytest.raises(openai.BadRequestError) as caught:
            client.post("/completions", body={"model": MODEL, "prompt": "a", **values}, cast_to=object)
        assert (caught.value.param or "").split(".")[0] == param, values
