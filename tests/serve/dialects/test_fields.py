"""Every field that the clients' own types define is carried out, without effect for a stated reason, or refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import completion_create_params as completions
from openai.types.chat import ChatCompletionMessage, ChatCompletionStreamOptionsParam
from openai.types.chat import completion_create_params as chats

from tests.serve.serving import Json
from workbench.serve.bodies.fields import Body, read_body
from workbench.serve.dialects.openai.chat import ChatBody
from workbench.serve.dialects.openai.common import StreamOptions
from workbench.serve.dialects.openai.completions import CompletionBody
from workbench.serve.dialects.openai.messages import read_conversation
from workbench.serve.errors import ApiError

BODIES = [
    (ChatBody, chats.CompletionCreateParamsStreaming),
    (CompletionBody, completions.CompletionCreateParamsStreaming),
    (StreamOptions, ChatCompletionStreamOptionsParam),
]
LEAST: dict[type[Body], Json] = {
    ChatBody: {"model": "m", "messages": [{"role": "user", "content": "a"}]},
    CompletionBody: {"model": "m", "prompt": "a"},
}


@pytest.mark.parametrize(("body", "params"), BODIES, ids=lambda each: each.__name__)
def test_every_field_of_the_client_has_a_place(body: type[Body], params: Any) -> None:
    defined = set(params.__required_keys__ | params.__optional_keys__)
    assert defined >= {"model"} or body is StreamOptions
    done, refused, ignored = set(body.model_fields), set(body.REFUSED), set(body.IGNORED)
    assert defined - done - refused - ignored == set()
    assert not done & refused and not done & ignored and not refused & ignored


@pytest.mark.parametrize("body", [ChatBody, CompletionBody], ids=lambda each: each.__name__)
def test_what_is_refused_is_named_and_what_is_ignored_is_listed(body: type[Body]) -> None:
    least = LEAST[body]
    for name, refused in body.REFUSED.items():
        for value in (None, *refused.neutral):
            assert name not in read_body(body, {**least, name: value})[1]
        with pytest.raises(ApiError, match=name) as caught:
            read_body(body, {**least, name: {"a": 1}})
        assert caught.value.param == name and refused.reason in caught.value.message
    for name, reason in body.IGNORED.items():
        assert read_body(body, {**least, name: "a"})[1] == {name: reason}
    assert read_body(body, {**least, **dict.fromkeys(set(body.model_fields) - set(least))})[1] == {}


@given(st.floats(allow_nan=False) | st.integers(-100, 100) | st.booleans() | st.text(max_size=3) | st.lists(st.none()))
def test_a_whole_number_is_one_also_as_a_float_and_nothing_else_is(value: Any) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    allowed = is_number and float(value).is_integer() and 1 <= value < 2**31
    try:
        body, _ = read_body(ChatBody, {**LEAST[ChatBody], "max_tokens": value})
    except ApiError as error:
        assert not allowed and error.param == "max_tokens"
    else:
        assert allowed and body.max_tokens == value and type(body.max_tokens) is int


USER: Json = {"role": "user", "content": "a"}
CALLED = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
DECLARED = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
TEXT = {"type": "text", "text": "a"}


@pytest.mark.parametrize(
    ("messages", "tools", "where"),
    [
        ([{**USER, "content": [{**TEXT, "cache_control": {"type": "ephemeral"}}]}], [],
         "messages.0.content.0.cache_control"),
        ([{**USER, "tool_call_id": "1"}], [], "messages.0.tool_call_id"),
        ([USER, {"role": "assistant", "tool_calls": [{**CALLED, "custom": {}}]}], [], "messages.1.tool_calls.0.custom"),
        ([USER], [{**DECLARED, "given": {"name": "g"}}], "tools.0.given"),
        ([USER], [{**DECLARED, "function": {**DECLARED["function"], "examples": []}}], "tools.0.function.examples"),
    ],
)  # fmt: skip
def test_a_field_within_a_message_or_a_tool_is_refused_by_its_path(
    messages: list[Json], tools: list[Json], where: str
) -> None:
    with pytest.raises(ApiError) as caught:
        read_conversation(messages, tools)
    assert caught.value.param == where and caught.value.message.startswith(where)


def test_what_clients_send_back_of_an_answer_is_taken() -> None:
    """The client's own message, dumped: fields without a value, and those of a streamed call."""
    said = ChatCompletionMessage.model_validate({"role": "assistant", "content": None, "tool_calls": [CALLED]})
    result = {"role": "tool", "content": [TEXT], "tool_call_id": "1"}
    conversation, _ = read_conversation([USER, {**said.model_dump(), "annotations": []}, result], [DECLARED])
    assert [turn.role for turn in conversation.turns] == ["user", "assistant", "tool"]
