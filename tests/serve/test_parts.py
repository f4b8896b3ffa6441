"""Texts that come in parts, over HTTP: each protocol reads all of them, in every role, under templates of any kind."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.patience import limit, until
from tests.prompt import apply, model_templates
from tests.serve.serving import RecordingGate
from tests.serve.strangers import ANSWERED, ASSISTANT, PROTOCOLS, SYSTEM, TOOL, USER
from workbench.engine.runner import Runner
from workbench.gateway.bounds import prompt_texts
from workbench.prompt.conversation import Conversation
from workbench.prompt.own_template import NAMES, TEMPLATE
from workbench.prompt.templates import ChatTemplate
from workbench.serve.server import Server

TEMPLATES = {
    "own": TEMPLATE, "parts_alone": model_templates.PARTS_ALONE,
    **{name: model_templates.ALL[name] for name in ("folded", "tools_as_json", "thought_dropped", "dated")},
}  # fmt: skip


def send(server: Server, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=limit(60))


@pytest.mark.parametrize("path", PROTOCOLS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_all_parts_are_read(
    server: Server, chat_runner: Runner, gate: RecordingGate, monkeypatch: pytest.MonkeyPatch, name: str, path: str
) -> None:
    names = NAMES if name == "own" else apply.NAMES
    monkeypatch.setitem(vars(chat_runner.loaded_model), "chat_template", ChatTemplate(TEMPLATES[name], names))
    make, counting, count = PROTOCOLS[path]
    calls = name != "folded"  # where roles alternate, and there is none of a tool
    found = []
    for are_cut in (False, True):
        body, before = make(are_cut, calls), len(gate.outcomes)
        answer = send(server, path, body)
        assert answer.status_code == 200, answer.text
        until(lambda before=before: len(gate.outcomes) == before + 1)
        ((prompt,),) = [call.prompts for call, _ in gate.outcomes[before:]]
        usage = answer.json()["usage"]
        tokens = usage["prompt_tokens"] if "prompt_tokens" in usage else usage["input_tokens"]
        counted = send(server, counting, {key: value for key, value in body.items() if key not in ANSWERED}).json()
        assert counted[count] == tokens
        found.append((prompt, tokens, counted.get("tokens")))
        assert isinstance(prompt, Conversation)
        text = prompt.prompt(chat_runner).text
        said = [SYSTEM, USER, ASSISTANT, *([TOOL] if calls else [])]
        assert all("".join(texts) in text for texts in said), text
        assert {"".join(texts) for texts in said} <= set(prompt_texts(prompt))  # what a gateway moderates
    assert found[0] == found[1]
