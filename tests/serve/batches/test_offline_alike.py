"""A line of a batch file has the status and the answer that its body has over HTTP, whatever fields it has."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.patience import limit
from tests.serve.serving import CALCULATE, Json
from tests.thorough import tries
from workbench.engine.load import load
from workbench.engine.runner import Runner
from workbench.offline.run import run_batch
from workbench.serve.served_model import ServedModel
from workbench.serve.server import Server

USER = {"role": "user", "content": "What is 2 + 3?"}
TOOL = {"name": "calculate", "input_schema": CALCULATE["function"]["parameters"]}
OF_ALL: Json = {
    "model": ["gpt", 3], "temperature": [0.7, 9], "top_p": [0.5, -1], "stream": [False, 0], "temperatur": [1],
    "metadata": [{"user_id": "u"}], "cache_salt": ["c"], "stop_sequences": [["e"]], "n": [2, 200],
}  # fmt: skip
OF_OPENAI: Json = {
    "seed": [3, -1, "3"], "stop": ["e", ["a", "b"], 3], "logit_bias": [{"40": 5}, {"a": 1}], "min_p": [0.1],
    "user": ["u"], "ignore_eos": [True], "return_token_ids": [True], "prompt_logprobs": [1], "best_of": [2, 1],
    "structured_outputs": [{"choice": ["yes", "no"]}, {}], "echo": [True], "logprobs": [True, 2], "top_k": [5],
}  # fmt: skip
OF_CHATS: Json = {
    "tools": [[CALCULATE], [{"type": "x"}]], "tool_choice": ["required", "none", "x"], "max_completion_tokens": [3],
    "response_format": [{"type": "json_object"}, {"type": "x"}], "reasoning_effort": ["low", "x"],
    "top_logprobs": [2], "parallel_tool_calls": [False], "functions": [[CALCULATE]],
}  # fmt: skip
OTHERS: Json = {"tools": [[TOOL], [CALCULATE]], "system": ["Be brief."], "instructions": ["Be brief."], "top_k": [5]}
# Of each route: a body that is answered, and values of further fields. Those without seeds are greedy.
ROUTES: dict[str, tuple[Json, Json]] = {
    "/v1/completions": ({"prompt": "2 + 3", "max_tokens": 4, "seed": 7}, {**OF_ALL, **OF_OPENAI}),
    "/v1/chat/completions": (
        {"messages": [USER], "max_tokens": 30, "seed": 7}, {**OF_ALL, **OF_OPENAI, **OF_CHATS},
    ),
    "/v1/responses": ({"input": "2 + 3", "max_output_tokens": 4, "temperature": 0}, {**OF_ALL, **OTHERS}),
    "/v1/messages": ({"messages": [USER], "max_tokens": 4, "temperature": 0}, {**OF_ALL, **OTHERS}),
}  # fmt: skip
DRAWN = ("id", "item_id", "call_id", "request_id", "signature", "created", "created_at", "completed_at")


@st.composite
def lines(draw: st.DrawFn) -> tuple[str, Json]:
    path = draw(st.sampled_from([*ROUTES]))
    body, further = ROUTES[path]
    names = draw(st.lists(st.sampled_from([*further]), max_size=3, unique=True))
    if "seed" not in body:
        names = [name for name in names if name != "temperature"]
    return path, {"model": "demo-chat", **body} | {name: draw(st.sampled_from(further[name])) for name in names}


@pytest.fixture(scope="module")
def runner() -> Runner:
    """The server's model once more: its own runner belongs to its thread."""
    return load("demo-chat", backend="eager", max_num_batched_tokens=64, page_size=16)


def without_drawn(value: Any) -> Any:
    """Return an answer without ids, signatures and times."""
    if isinstance(value, list):
        return [without_drawn(each) for each in value]
    if isinstance(value, dict):
        return {name: without_drawn(each) for name, each in value.items() if name not in DRAWN}
    return value


def check_alike(server: Server, runner: Runner, asked: list[tuple[str, Json]]) -> list[int]:
    """Assert that each body has one answer by both ways; return their statuses."""
    texts = [
        json.dumps({"custom_id": str(number), "method": "POST", "url": path, "body": body})
        for number, (path, body) in enumerate(asked)
    ]
    with tempfile.TemporaryDirectory() as folder:
        source, out = Path(folder) / "in.jsonl", Path(folder) / "out.jsonl"
        source.write_text("\n".join(texts))
        run_batch(source, out, lambda: ServedModel("demo-chat", runner), "", max_pending_lines=1)
        found = [json.loads(line)["response"] for line in out.read_text().splitlines()]
    for (path, body), mine in zip(asked, found, strict=True):
        theirs = httpx.post(server.url + path, json=body, timeout=limit(60))
        assert (mine["status_code"], without_drawn(mine["body"])) == (theirs.status_code, without_drawn(theirs.json()))
    return [each["status_code"] for each in found]


def test_tools_are_carried_out_alike(server: Server, runner: Runner) -> None:
    body = {**ROUTES["/v1/chat/completions"][0], "model": "demo-chat", "tools": [CALCULATE], "tool_choice": "required"}
    assert check_alike(server, runner, [("/v1/chat/completions", body)]) == [200]


@settings(max_examples=tries(40), deadline=None)
@given(st.lists(lines(), min_size=1, max_size=8))
def test_the_same_body_has_the_same_answer(server: Server, runner: Runner, asked: list[tuple[str, Json]]) -> None:
    check_alike(server, runner, asked)
