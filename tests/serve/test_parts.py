"""Texts that come in parts, over HTTP: each protocol reads all of them, in every role, under templates of any kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.patience import limit, until
from tests.prompt import apply, model_templates
from tests.serve.serving import RecordingGate
from workbench.engine.load import load
from workbench.engine.runner import Runner
from workbench.gateway.bounds import prompt_texts
from workbench.prompt.conversation import Conversation
from workbench.prompt.own_template import NAMES, TEMPLATE
from workbench.prompt.templates import ChatTemplate
from workbench.serve.server import Server, serve

TEMPLATES = {
    "own": TEMPLATE, "parts_alone": model_templates.PARTS_ALONE,
    **{name: model_templates.ALL[name] for name in ("folded", "tools_as_json", "thought_dropped", "dated")},
}  # fmt: skip
ROLES = ("system", "user", "assistant", "tool")
SYSTEM, USER, ASSISTANT, TOOL = (("Be ", f"brief, {each}", ".") for each in ROLES)


def parts(texts: tuple[str, ...], are_cut: bool, kind: str = "text") -> Any:
    """A content: one text, or its parts."""
    return [{"type": kind, "text": each} for each in texts] if are_cut else "".join(texts)


def chat(are_cut: bool, calls: bool) -> dict[str, Any]:
    call = {"id": "c1", "type": "function", "function": {"name": "calculate", "arguments": '{"expression": "1"}'}}
    called = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": parts(TOOL, are_cut)},
    ]
    return {
        "model": "demo-chat",
        "max_tokens": 1,
        "messages": [
            {"role": "developer", "content": parts(SYSTEM, are_cut)},
            {"role": "user", "content": parts(USER, are_cut)},
            {"role": "assistant", "content": parts(ASSISTANT, are_cut)},
            {"role": "user", "content": "q"},
            *(called if calls else ()),
        ],
    }


def messages(are_cut: bool, calls: bool) -> dict[str, Any]:
    use = {"type": "tool_use", "id": "c1", "name": "calculate", "input": {"expression": "1"}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": parts(TOOL, are_cut)}
    called = [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    return {
        "model": "demo-chat",
        "max_tokens": 1,
        "system": parts(SYSTEM, are_cut),
        "messages": [
            {"role": "user", "content": parts(USER, are_cut)},
            {"role": "assistant", "content": parts(ASSISTANT, are_cut)},
            {"role": "user", "content": "q"},
            *(called if calls else ()),
        ],
    }


def responses(are_cut: bool, calls: bool) -> dict[str, Any]:
    called = [
        {"type": "function_call", "call_id": "c1", "name": "calculate", "arguments": '{"expression": "1"}'},
        {"type": "function_call_output", "call_id": "c1", "output": parts(TOOL, are_cut, "input_text")},
    ]
    return {
        "model": "demo-chat",
        "max_output_tokens": 1,
        "input": [
            {"role": "system", "content": parts(SYSTEM, are_cut, "input_text")},
            {"role": "user", "content": parts(USER, are_cut, "input_text")},
            {"role": "assistant", "content": parts(ASSISTANT, are_cut, "output_text")},
            {"role": "user", "content": "q"},
            *(called if calls else ()),
        ],
    }


PROTOCOLS: dict[str, tuple[Callable[[bool, bool], dict[str, Any]], str, str]] = {
    # bodies; the path that counts their tokens, without an answer; the field of the count
    "/v1/chat/completions": (chat, "/tokenize", "count"),
    "/v1/messages": (messages, "/v1/messages/count_tokens", "input_tokens"),
    "/v1/responses": (responses, "/v1/responses/input_tokens", "input_tokens"),
}
ANSWERED = {"max_tokens", "max_output_tokens"}  # fields of a body that is answered, and not counted


@pytest.fixture(scope="module")
def runner() -> Runner:
    return load("demo-chat", backend="eager", max_num_batched_tokens=64, page_size=16)


@pytest.fixture(scope="module")
def gate() -> RecordingGate:
    return RecordingGate()


@pytest.fixture(scope="module")
def running(runner: Runner, gate: RecordingGate) -> Iterator[Server]:
    with serve(runner, gate=gate) as server:
        yield server


def send(server: Server, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=limit(60))


@pytest.mark.parametrize("path", PROTOCOLS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_all_parts_are_read(
    running: Server, runner: Runner, gate: RecordingGate, monkeypatch: pytest.MonkeyPatch, name: str, path: str
) -> None:
    names = NAMES if name == "own" else apply.NAMES
    monkeypatch.setitem(vars(runner.loaded_model), "chat_template", ChatTemplate(TEMPLATES[name], names))
    make, counting, count = PROTOCOLS[path]
    calls = name != "folded"  # where roles alternate, and there is none of a tool
    found = []
    for are_cut in (False, True):
        body, before = make(are_cut, calls), len(gate.outcomes)
        answer = send(running, path, body)
        assert answer.status_code == 200, answer.text
        until(lambda before=before: len(gate.outcomes) == before + 1)
        ((prompt,),) = [call.prompts for call, _ in gate.outcomes[before:]]
        usage = answer.json()["usage"]
        tokens = usage["prompt_tokens"] if "prompt_tokens" in usage else usage["input_tokens"]
        counted = send(running, counting, {key: value for key, value in body.items() if key not in ANSWERED}).json()
        assert counted[count] == tokens
        found.append((prompt, tokens, counted.get("tokens")))
        assert isinstance(prompt, Conversation)
        text = prompt.prompt(runner).text
        said = [SYSTEM, USER, ASSISTANT, *([TOOL] if calls else [])]
        assert all("".join(texts) in text for texts in said), text
        assert {"".join(texts) for texts in said} <= set(prompt_texts(prompt))  # what a gateway moderates
    assert found[0] == found[1]
