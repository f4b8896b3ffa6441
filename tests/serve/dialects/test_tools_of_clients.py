"""Tools and turns as clients of the three protocols declare and send them become one and the same conversation."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.serve.dialects.scripted import HI, PLAIN_MODEL, Script
from tests.serve.serving import Json
from workbench.agents.choice import arguments_schema
from workbench.errors import WorkbenchError
from workbench.prompt.conversation import Conversation
from workbench.serve.answers.pieces import Ended, PromptRead, Used
from workbench.serve.call import Call
from workbench.serve.dialects.anthropic.messages import AnthropicMessages
from workbench.serve.dialects.openai.chat import OpenAIChat
from workbench.serve.dialects.responses.responses import OpenAIResponses

END = [PromptRead(prompt_tokens=1), Ended(), Used(prompt_tokens=1, completion_tokens=1)]
WAYS: dict[str, Any] = {"chat": OpenAIChat, "messages": AnthropicMessages, "responses": OpenAIResponses}


def parsed(way: str, tool: Json, messages: list[Json] | None = None) -> Conversation:
    """Return the conversation of a call with a tool, by a vendor's own client."""
    script = Script(WAYS[way](), END, SimpleNamespace(**vars(PLAIN_MODEL), answer_tokens=9, fingerprint=""))
    said: Any = messages or HI
    if way == "chat":
        tools: Any = [{"type": "function", "function": tool}]
        script.openai().chat.completions.create(model="tiny", messages=said, tools=tools)
    elif way == "responses":
        script.openai().responses.create(model="tiny", input=said, tools=[{"type": "function", **tool}])  # type: ignore[list-item]
    else:
        declared: Any = {"input_schema" if key == "parameters" else key: value for key, value in tool.items()}
        script.anthropic().messages.create(model="tiny", max_tokens=9, messages=said, tools=[declared])
    (call,) = script.calls
    assert isinstance(call, Call) and isinstance(call.prompts[0], Conversation)
    return call.prompts[0]


@pytest.mark.parametrize("way", WAYS)
def test_a_name_may_have_128_characters(way: str) -> None:
    for name in ("n" * 65, "n-_.9" + "n" * 123):
        assert parsed(way, {"name": name, "parameters": {"type": "object"}}).tools[0].name == name
    with pytest.raises(Exception, match="1 to 128 letters"):
        parsed(way, {"name": "n" * 129, "parameters": {"type": "object"}})


@pytest.mark.parametrize("way", WAYS)
def test_strict_and_a_schema_without_a_type(way: str) -> None:
    schema = {"properties": {"a": {"uniqueItems": True}}}
    given = {"name": "f", "parameters": schema}
    free, strict = (parsed(way, {**given, **more}).tools[0] for more in ({}, {"strict": True}))
    assert arguments_schema(free, False) == {"properties": {"a": {}}, "type": "object"}
    with pytest.raises(WorkbenchError, match=r"tool 'f': parameters\.properties\.a: the keyword 'uniqueItems'"):
        arguments_schema(strict, False)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("role", ["system", "developer"])
def test_an_instruction_after_the_first_turn_is_a_turn(way: str, role: str) -> None:
    if (way, role) == ("messages", "developer"):
        return
    said = [*HI, {"role": "assistant", "content": "b"}, {"role": role, "content": "Be brief."}, *HI]
    turns = parsed(way, {"name": "f", "parameters": {"type": "object"}}, said).turns
    assert [(turn.role, turn.content) for turn in turns] == [
        ("user", "hi"), ("assistant", "b"), ("system", "Be brief."), ("user", "hi"),
    ]  # fmt: skip
