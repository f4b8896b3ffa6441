"""Every field that the clients' own types define is carried out, without effect for a stated reason, or refused."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import completion_create_params as completions
from openai.types.chat import ChatCompletionMessage, ChatCompletionStreamOptionsParam
from openai.types.chat import completion_create_params as chats

from tests.serve.dialects.scripted import PLAIN_MODEL, Script
from tests.serve.serving import Json
from workbench.errors import nearest
from workbench.serve.answers.pieces import Ended, Used
from workbench.serve.batches.openai_batch_routes import OpenAIBatchBody
from workbench.serve.bodies.fields import MAX_IGNORED, UNKNOWN, Body, IgnoredFields, read_body
from workbench.serve.call import Caller
from workbench.serve.dialects.anthropic.body import CountTokensBody, MessagesBody
from workbench.serve.dialects.anthropic.messages import AnthropicMessages
from workbench.serve.dialects.openai.chat import ChatBody, OpenAIChat
from workbench.serve.dialects.openai.common import StreamOptions
from workbench.serve.dialects.openai.completions import CompletionBody, OpenAICompletions
from workbench.serve.dialects.openai.embeddings import EmbeddingBody
from workbench.serve.dialects.openai.messages import continues_last, read_conversation
from workbench.serve.dialects.responses.body import INCLUDED, OTHER_PARTS, ResponsesBody
from workbench.serve.dialects.responses.responses import OpenAIResponses
from workbench.serve.dialects.vllm_tokenizer import TokenizeBody
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
        ([{**USER, "prefix": True}], [], "messages.0.prefix"),
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


ALL_BODIES: dict[type[Body], Json] = {
    **LEAST,
    EmbeddingBody: {"model": "m", "input": "a"},
    MessagesBody: {"model": "m", "max_tokens": 1, "messages": [USER]},
    CountTokensBody: {"model": "m", "messages": [USER]},
    ResponsesBody: {"model": "m", "input": "a"},
    TokenizeBody: {"prompt": "a"},
    OpenAIBatchBody: {"input_file_id": "f", "endpoint": "/v1/x", "completion_window": "24h"},
}


@given(st.sampled_from([*ALL_BODIES]), st.text(max_size=9), st.sampled_from([1, "a", {}, [], False]))
def test_an_unknown_field_is_ignored_and_listed_and_null_says_nothing(body: type[Body], name: str, value: Any) -> None:
    least, known = ALL_BODIES[body], {*body.carried_out(), *body.REFUSED, *body.IGNORED}
    nulls = dict.fromkeys(known - {*least})
    plain, ignored = read_body(body, {**least, **nulls})
    assert (plain, ignored) == (read_body(body, least)[0], {})
    if name not in known:
        assert read_body(body, {**least, name: value}, is_strict=False) == (plain, {name: ignored_words(name, known)})
        with pytest.raises(ApiError) as caught:
            read_body(body, {**least, name: value})
        assert (caught.value.param, caught.value.code) == (name, "unknown")


def ignored_words(name: str, known: Iterable[str]) -> str:
    return f"{UNKNOWN}{nearest(name, known)}"


def test_unknown_fields_within_a_body_leave_the_prompt_as_it_was() -> None:
    blocks = {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]}
    extra = {"x": 1, "given": {"name": "g"}}
    more = {**blocks, **extra, "content": [{**blocks["content"][0], **extra,
                                            "cache_control": {"type": "ephemeral", "scope": "global"}}]}  # fmt: skip
    tool: Json = {"name": "f", "input_schema": {"type": "object"}}
    least = {"model": "m", "max_tokens": 1, "tools": [tool], "messages": [blocks]}
    body, ignored = read_body(MessagesBody, {**least, "messages": [more], "tools": [{**tool, **extra}]}, False)
    assert body == read_body(MessagesBody, least)[0]
    assert {*ignored} == {"CacheControl.scope", *(f"{kind}.{name}" for name in extra
                          for kind in ("Message", "TextBlock", "ToolDeclaration"))}  # fmt: skip
    listed = IgnoredFields()
    called = {"role": "assistant", "tool_calls": [{**CALLED, **extra}]}
    chat = [{**USER, **extra, "content": [{**TEXT, **extra}]}, called]
    plain = [{**USER, "content": [TEXT]}, {"role": "assistant", "tool_calls": [CALLED]}]
    function = {**DECLARED["function"], **extra}
    found = read_conversation(chat, [{**DECLARED, **extra, "function": function}], listed)
    assert found == read_conversation(plain, [DECLARED])
    assert {each.rpartition(".")[0] for each in listed} == {
        "messages.0", "messages.0.content.0", "messages.1.tool_calls.0", "tools.0", "tools.0.function",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("body", "fields"),
    [
        (ResponsesBody, {"max_tokens": 5, "stop": ["a"], "n": 2, "response_format": {"type": "json_object"}}),
        (MessagesBody, {"stop": "a", "seed": 3, "frequency_penalty": 1, "response_format": {"type": "json_object"}}),
        (CompletionBody, {"max_completion_tokens": 5, "response_format": {"type": "json_object"}, "messages": [USER]}),
        (ChatBody, {"max_output_tokens": 5, "system": "a", "instructions": "a", "stop_sequences": ["a"]}),
    ],
)
def test_what_another_protocol_would_carry_out_is_refused_by_name(body: type[Body], fields: Json) -> None:
    for name, value in fields.items():
        with pytest.raises(ApiError) as caught:
            read_body(body, {**ALL_BODIES[body], name: value}, is_strict=False)
        assert (caught.value.param, caught.value.code) == (name, "unsupported")


def test_null_says_nothing_within_a_chat_and_unknown_fields_are_listed_there() -> None:
    named = {"type": "function", "function": {"name": "f", "x": 1}, "x": 1}
    marked = {**TEXT, "prompt_cache_breakpoint": {"mode": None, "ttl": None, "x": 1}}
    described = {"name": "a", "schema": None, "strict": None}
    given = {"model": "m", "messages": [{**USER, "content": [marked]}], "tools": [DECLARED], "tool_choice": named,
             "max_tokens": 5, "response_format": {"type": "json_schema", "json_schema": described}}  # fmt: skip
    body, ignored = read_body(ChatBody, given, is_strict=False)
    call = OpenAIChat().parse(body, PLAIN_MODEL, ignored, Caller())
    assert {*call.ignored} == {
        "messages.0.content.0.prompt_cache_breakpoint.x", "tool_choice.x", "tool_choice.function.x",
    }  # fmt: skip
    assert [each.seconds for each in call.breakpoints] == [1800.0]


def test_a_body_of_many_unknown_fields_lists_some() -> None:
    _, ignored = read_body(ChatBody, {**LEAST[ChatBody], **{f"x{n}": n for n in range(5000)}}, is_strict=False)
    assert len(ignored) == MAX_IGNORED


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt"),
        ({"add_generation_prompt": False}, "add_generation_prompt"),
    ],
)
def test_the_two_ways_to_begin_an_answer_exclude_one_another(fields: Json, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        continues_last(fields.get("continue_final_message"), fields.get("add_generation_prompt"))
    assert caught.value.param == param
    assert continues_last(True, None) and continues_last(True, False) and not continues_last(None, True)


@pytest.mark.parametrize("edits", [[], [{"type": "clear_thinking_20251015", "keep": "all"}]])
def test_edits_of_thoughts_are_ignored_by_name_and_others_refused(edits: list[Json]) -> None:
    body = {"model": "m", "max_tokens": 1, "messages": [USER], "context_management": {"edits": edits}}
    script = Script(AnthropicMessages(), [Ended(0), Used()])
    client = script.anthropic()
    client.post("/v1/messages", body={**body, "betas": ["x"]}, cast_to=object)
    assert {*script.calls[0].ignored} == {"context_management", "betas"}
    body["context_management"] = {"edits": [{"type": "clear_tool_uses_20250919"}]}
    with pytest.raises(Exception, match="clear_tool_uses_20250919"):
        client.post("/v1/messages", body=body, cast_to=object)


IDLE: list[tuple[Any, Json, str]] = [
    (OpenAIChat, {"stream_options": {"include_usage": True}}, "stream_options"), (OpenAIChat, {"top_logprobs": 0}, ""),
    (OpenAICompletions, {"stream_options": {"include_usage": True}}, "stream_options"),
    (OpenAIResponses, {"stream_options": {"include_obfuscation": True}}, "stream_options"),
    *[(OpenAIResponses, {"include": [name, INCLUDED[0]]}, f"include.{name}") for name in (*OTHER_PARTS, "a.part")],
]  # fmt: skip


@pytest.mark.parametrize(("dialect", "fields", "place"), IDLE)
def test_what_would_say_something_elsewhere_is_ignored_and_listed(dialect: Any, fields: Json, place: str) -> None:
    """Options of a stream where there is none; parts of answers that none here has."""
    model = SimpleNamespace(**vars(PLAIN_MODEL), answer_tokens=9)
    spoken = dialect()
    body, ignored = read_body(spoken.body, {**ALL_BODIES[spoken.body], **fields}, is_strict=False)
    found = {*spoken.parse(body, model, ignored, Caller()).ignored} - {"ResponseStreamOptions.include_obfuscation"}
    assert found == ({place} if place else set())
    if place == "include.a.part":
        with pytest.raises(ApiError, match="a.part: unknown"):
            read_body(spoken.body, {**ALL_BODIES[spoken.body], **fields})


def test_what_clients_send_back_of_an_answer_is_taken() -> None:
    """The client's own message, dumped: fields without a value, and those of a streamed call."""
    said = ChatCompletionMessage.model_validate({"role": "assistant", "content": None, "tool_calls": [CALLED]})
    result = {"role": "tool", "content": [TEXT], "tool_call_id": "1"}
    conversation, _ = read_conversation([USER, {**said.model_dump(), "annotations": [{}]}, result], [DECLARED])
    assert [turn.role for turn in conversation.turns] == ["user", "assistant", "tool"]
