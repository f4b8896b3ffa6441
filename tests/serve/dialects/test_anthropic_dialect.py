"""Anthropic's Messages as its own client sends and reads them, over scripted pieces."""

from __future__ import annotations

import itertools
import typing
from types import UnionType
from typing import Any

import anthropic
import orjson
import pytest
from anthropic import types
from anthropic.types import message_create_params
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.serve.dialects.scripted import PLAIN_MODEL, THINKING_MODEL, Script
from workbench.errors import WorkbenchError
from workbench.prompt.cache_miss import CacheMiss
from workbench.prompt.turns import AssistantTurn, ResultTurn, ToolCall, UserTurn
from workbench.serve.answers.pieces import (
    Ended,
    Piece,
    PromptRead,
    Text,
    Thought,
    ToolArguments,
    ToolCallBegun,
    Used,
)
from workbench.serve.bodies.fields import read_body
from workbench.serve.call import Breakpoint
from workbench.serve.dialects.anthropic import body as anthropic_body
from workbench.serve.dialects.anthropic.answer import STOP_REASONS
from workbench.serve.dialects.anthropic.messages import AnthropicMessages
from workbench.serve.dialects.anthropic.models import describe_model, list_models
from workbench.serve.dialects.thought_signature import ThoughtSigner
from workbench.serve.errors import STATUS, ApiError

HI: list[Any] = [{"role": "user", "content": "hi"}]
TOOL: Any = {"name": "add", "description": "Add.", "input_schema": {"type": "object", "properties": {"a": {}}}}
CALL: Any = {"type": "tool_use", "id": "a", "name": "b", "input": {}}
EPHEMERAL: Any = {"type": "ephemeral"}
HOUR: Any = {"type": "ephemeral", "ttl": "1h"}
READ = PromptRead(prompt_tokens=10, cached_tokens=4, written_tokens=3, cache_written_by_ttl=((300.0, 1), (3600.0, 2)))
USED = Used(
    prompt_tokens=10, completion_tokens=9, cached_tokens=4, written_tokens=3, thinking_tokens=2,
    cache_written_by_ttl=((300.0, 1), (3600.0, 2)),
)  # fmt: skip
WHOLE: list[Piece] = [
    READ,
    Thought(text="hm "),
    Thought(text="ok"),
    Text(text="Hel"),
    Text(text="lo"),
    ToolCallBegun(index=0, id="toolu_1", name="add"),
    ToolArguments(index=0, text='{"a":'),
    ToolArguments(index=0, text=" 1}"),
    ToolCallBegun(index=1, id="toolu_2", name="now"),
    Ended(reason="tool_calls"),
    USED,
]


def ask(script: Script, **values: Any) -> types.Message:
    return script.anthropic().messages.create(**{"model": "tiny", "max_tokens": 50, "messages": HI, **values})


def refused(**values: Any) -> tuple[str, str]:
    """Return the message of a refusal, and the parameter that it names first."""
    with pytest.raises(anthropic.BadRequestError) as caught:
        ask(Script(AnthropicMessages(), [READ, Ended(), USED], THINKING_MODEL), **values)
    body: Any = caught.value.body
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error" and body["request_id"]
    return body["error"]["message"], body["error"]["message"].split(":")[0]


# ---- answers ----


@pytest.mark.parametrize("steps", [1, 2, 100])
def test_a_stream_and_a_whole_answer_are_the_same_message(steps: int) -> None:
    script = Script(AnthropicMessages(), WHOLE, THINKING_MODEL, steps=steps)
    whole = ask(script)
    with script.anthropic().messages.stream(model="tiny", max_tokens=50, messages=HI) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert [block.to_dict() for block in streamed.content] == [block.to_dict() for block in whole.content]
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert whole.content[2].to_dict()["input"] == {"a": 1} and whole.content[3].to_dict()["input"] == {}
    assert streamed.usage == whole.usage and streamed.stop_reason == whole.stop_reason == "tool_use"
    assert {"message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_delta",
            "message_stop", "thinking", "signature", "text", "input_json"} == {*kinds}  # fmt: skip


def test_blocks_follow_one_another_and_the_signature_comes_last_in_its_block() -> None:
    events = raw_events(WHOLE)
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["message_start", "ping"] and kinds[-2:] == ["message_delta", "message_stop"]
    open_block, ended = None, -1
    for event in events:
        if event["type"] == "content_block_start":
            assert open_block is None and event["index"] == ended + 1
            open_block = event["index"]
        elif event["type"] == "content_block_delta":
            assert event["index"] == open_block
        elif event["type"] == "content_block_stop":
            assert event["index"] == open_block
            open_block, ended = None, event["index"]
    assert open_block is None and ended == 3
    deltas = [event["delta"]["type"] for event in events if event["type"] == "content_block_delta"]
    assert deltas[:3] == ["thinking_delta", "thinking_delta", "signature_delta"]


def raw_events(pieces: list[Piece], **values: Any) -> list[dict[str, Any]]:
    script = Script(AnthropicMessages(), pieces, THINKING_MODEL)
    body = {"model": "tiny", "max_tokens": 50, "messages": HI, "stream": True, **values}
    response = script.anthropic()._client.post("/v1/messages", content=orjson.dumps(body))
    lines = [part.split(b"\n") for part in response.content.split(b"\n\n") if part]
    events = [orjson.loads(line[1].removeprefix(b"data: ")) for line in lines]
    assert [line[0] for line in lines] == [f"event: {event['type']}".encode() for event in events]
    return events


pieces_of_text = st.lists(
    st.one_of(
        st.text(max_size=3).map(lambda text: Text(text=text)),
        st.text(max_size=3).map(lambda text: Thought(text=text)),
        st.sampled_from(["{}", '{"a": [1, "é"]}', '{"b": {']).map(lambda text: (text,)),
    ),
    max_size=8,
)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(pieces_of_text, st.integers(1, 4))
def test_every_answer_is_the_same_streamed_and_whole(made: list[Any], steps: int) -> None:
    pieces: list[Piece] = [READ]
    numbers = itertools.count()
    for each in made:
        if isinstance(each, tuple):
            number = next(numbers)
            pieces.append(ToolCallBegun(index=number, id=f"toolu_{number}", name="add"))
            pieces += [ToolArguments(index=number, text=letter) for letter in each[0]]
        else:
            pieces.append(each)
    pieces += [Ended(reason="length"), USED]
    script = Script(AnthropicMessages(), pieces, THINKING_MODEL, steps=steps)
    whole = ask(script)
    with script.anthropic().messages.stream(model="tiny", max_tokens=50, messages=HI) as stream:
        streamed = stream.get_final_message()
    assert [block.to_dict() for block in streamed.content] == [block.to_dict() for block in whole.content]


@pytest.mark.parametrize("reason", STOP_REASONS)
def test_every_stop_reason(reason: Any) -> None:
    stop = "END" if reason == "stop_sequence" else None
    script = Script(AnthropicMessages(), [READ, Text(text="a"), Ended(reason=reason, stop=stop), USED])
    whole = ask(script)
    with script.anthropic().messages.stream(model="tiny", max_tokens=50, messages=HI) as stream:
        streamed = stream.get_final_message()
    for message in (whole, streamed):
        assert message.stop_reason == STOP_REASONS[reason]
        assert message.stop_sequence == stop
    assert (whole.stop_details is not None) == (reason == "content_filter")
    assert {*STOP_REASONS.values()} == {*typing.get_args(types.StopReason)}


def test_a_stop_token_is_no_stop_sequence() -> None:
    message = ask(Script(AnthropicMessages(), [READ, Ended(reason="stop_sequence", stop=7), USED]))
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)


def test_usage_says_what_was_read_and_written_by_lifetime() -> None:
    usage = ask(Script(AnthropicMessages(), WHOLE, THINKING_MODEL), cache_control=HOUR).usage
    assert usage.input_tokens == 10 - 4 - 3 and usage.output_tokens == 9
    assert usage.cache_read_input_tokens == 4 and usage.cache_creation_input_tokens == 3
    assert usage.cache_creation is not None and usage.output_tokens_details is not None
    assert usage.cache_creation.ephemeral_5m_input_tokens == 1
    assert usage.cache_creation.ephemeral_1h_input_tokens == 2
    assert usage.output_tokens_details.thinking_tokens == 2
    started = raw_events(WHOLE, cache_control=HOUR)[0]["message"]["usage"]
    assert started["input_tokens"] == 3 and started["cache_creation"]["ephemeral_1h_input_tokens"] == 2
    plain = ask(Script(AnthropicMessages(), WHOLE, THINKING_MODEL)).usage
    assert (plain.input_tokens, plain.cache_creation_input_tokens) == (10 - 4, 0), "no breakpoint, nothing to keep"


def test_an_error_in_mid_stream_raises_in_the_client() -> None:
    fails = ApiError("overloaded_error", "no room")
    script = Script(AnthropicMessages(), [READ, Text(text="a")], fails=fails)
    with pytest.raises(anthropic.APIStatusError, match="no room"):
        for _ in script.anthropic().messages.create(model="tiny", max_tokens=5, messages=HI, stream=True):
            pass


@pytest.mark.parametrize("kind", STATUS)
def test_every_error_has_the_shape_of_the_protocol(kind: str) -> None:
    status, body = AnthropicMessages().error(ApiError(kind, "what"), "req_7")
    assert status == STATUS[kind] and body["request_id"] == "req_7"
    if kind == "request_too_large":  # of the protocol's documents, not of its client's types
        assert body["error"] == {"type": kind, "message": "what"}
    else:
        assert types.shared.ErrorResponse.model_validate(body).error.message == "what"


def test_max_tokens_0_only_warms() -> None:
    script = Script(AnthropicMessages(), [READ, Text(text="a"), Ended(reason="length"), USED])
    message = ask(script, max_tokens=0)
    assert message.content == [] and message.usage.output_tokens == 0 and message.stop_reason == "max_tokens"
    assert script.calls[0].sampling.max_tokens == 1
    assert refused(max_tokens=0, stream=True)[1] == "max_tokens"


# ---- thoughts ----


def test_a_thought_comes_back_as_it_went_out_and_a_changed_one_is_refused() -> None:
    script = Script(AnthropicMessages(), WHOLE, THINKING_MODEL)
    answer = ask(script, thinking={"type": "enabled", "budget_tokens": 20})
    results = [{"type": "tool_result", "tool_use_id": f"toolu_{n}", "content": str(n)} for n in (1, 2)]
    ask(script, messages=[*HI, answer.to_param(), {"role": "user", "content": results}])
    turns = script.calls[1].prompts[0].turns
    assert turns[1] == AssistantTurn(
        content="Hello",
        thinking="hm ok",
        tool_calls=(ToolCall(name="add", arguments={"a": 1}, id="toolu_1"), ToolCall(name="now", id="toolu_2")),
    )
    thinking: Any = answer.content[0].to_dict()
    for changed in (
        {**thinking, "thinking": "hm OK"},
        {**thinking, "signature": "x" + thinking["signature"][1:]},
        {**thinking, "signature": ""},
        {**thinking, "thinking": ""},
        {"type": "redacted_thinking", "data": thinking["signature"]},
    ):
        blocks: Any = [changed, *(block.to_dict() for block in answer.content[1:])]
        with pytest.raises(anthropic.BadRequestError, match=r"messages\.1\.content\.0\.(signature|data)"):
            ask(script, messages=[*HI, {"role": "assistant", "content": blocks}, {"role": "user", "content": results}])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.text(), st.text(max_size=5), st.integers(0, 3), st.data())
def test_a_signature_holds_for_its_thought_model_and_place_alone(
    thought: str, model: str, place: int, data: st.DataObject
) -> None:
    signer = ThoughtSigner(b"key")
    signature, sealed = signer.sign(model, place, thought), signer.seal(model, place, thought)
    signer.check(model, place, thought, signature)
    assert signer.unseal(model, place, sealed) == thought
    for wrong in (
        lambda: signer.check(model, place + 1, thought, signature),
        lambda: signer.check(model + "x", place, thought, signature),
        lambda: signer.check(model, place, thought + " ", signature),
        lambda: ThoughtSigner(b"other").check(model, place, thought, signature),
        lambda: signer.unseal(model, place, signature),
    ):
        with pytest.raises(WorkbenchError):
            wrong()
    at = data.draw(st.integers(0, len(sealed) - 1))
    try:
        found = signer.unseal(model, place, sealed[:at] + ("A" if sealed[at] != "A" else "B") + sealed[at + 1 :])
    except WorkbenchError:
        return
    assert found == thought  # the change is in bits that base64 and zlib do not read


def test_a_thought_that_is_not_shown_comes_back_in_its_signature() -> None:
    script = Script(AnthropicMessages(), WHOLE, THINKING_MODEL)
    hidden: Any = {"type": "enabled", "budget_tokens": 20, "display": "omitted"}
    with script.anthropic().messages.stream(model="tiny", max_tokens=50, messages=HI, thinking=hidden) as stream:
        assert "thinking" not in [event.type for event in stream]
        streamed = stream.get_final_message()
    whole = ask(script, thinking=hidden)
    for answer in (whole, streamed):
        block: Any = answer.content[0]
        assert block.thinking == "" and "hm ok" not in block.signature
        ask(script, messages=[*HI, {"role": "assistant", "content": [block.to_dict()]}, *HI])
        redacted: Any = {"type": "redacted_thinking", "data": block.signature}
        ask(script, messages=[*HI, {"role": "assistant", "content": [redacted]}, *HI])
        assert [call.prompts[0].turns[1].thinking for call in script.calls[-2:]] == ["hm ok", "hm ok"]


# ---- what is asked ----


def call_of(**values: Any) -> Any:
    script = Script(AnthropicMessages(), [READ, Ended(), USED], THINKING_MODEL)
    ask(script, **values)
    return script.calls[0]


def test_a_conversation_with_tools_results_and_errors() -> None:
    call = call_of(
        system=[{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Add."}],
        tools=[TOOL],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "1+1"}, {"type": "text", "text": "?"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "tool_use", "id": "a", "name": "add", "input": {"a": 1}},
                    {"type": "tool_use", "id": "b", "name": "add", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "b", "content": "no", "is_error": True},
                    {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "2"}]},
                    {"type": "text", "text": "well?"},
                ],
            },
        ],
    )
    conversation = call.prompts[0]
    assert conversation.system == ("Be brief.", "Add.") and conversation.tools[0].name == "add"
    assert conversation.turns[0] == UserTurn(content=("1+1", "?"))
    assert conversation.turns[2:] == (
        ResultTurn(content="2", name="add", call_id="a"),
        ResultTurn(content="Error: no", name="add", call_id="b"),
        UserTurn(content="well?"),
    )


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, ("auto", True)),
        ({"type": "any", "disable_parallel_tool_use": True}, ("required", False)),
        ({"type": "tool", "name": "add"}, ("add", True)),
        ({"type": "none"}, ("none", True)),
    ],
)
def test_every_tool_choice(choice: Any, expected: tuple[str, bool]) -> None:
    call = call_of(tools=[TOOL], tool_choice=choice)
    assert (call.tool_choice, call.parallel_tool_calls) == expected


def test_sampling_stops_and_formats() -> None:
    format = {"type": "json_schema", "schema": {"type": "object"}}
    extra = {"temperature": 0, "top_p": 0.5, "top_k": 4}
    call = call_of(max_tokens=7, stop_sequences=["END"], output_config={"format": format}, extra_body=extra)
    sampling = call.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (0, 0.5, 4, 7)
    assert sampling.stop == ("END",) and sampling.response_format.json_schema == {"type": "object"}


@pytest.mark.parametrize(
    ("thinking", "effort", "budget"),
    [
        ({"type": "enabled", "budget_tokens": 20}, None, 20),
        ({"type": "disabled"}, None, 0),
        ({"type": "adaptive"}, "low", 10),
        ({"type": "adaptive"}, "max", 45),
        ({"type": "adaptive"}, None, 30),
    ],
)
def test_every_kind_of_thinking(thinking: Any, effort: Any, budget: int) -> None:
    call = call_of(thinking=thinking, **({"output_config": {"effort": effort}} if effort else {}))
    assert call.sampling.thinking.budget_tokens == budget and call.sampling.thinking.within_max_tokens


def test_a_model_without_thoughts() -> None:
    script = Script(AnthropicMessages(), [READ, Ended(), USED], PLAIN_MODEL)
    ask(script, thinking={"type": "adaptive"})
    assert script.calls[0].sampling.thinking is None
    with pytest.raises(anthropic.BadRequestError, match="no control tokens of a thought"):
        ask(script, thinking={"type": "enabled", "budget_tokens": 5})


def test_breakpoints_with_their_lifetimes() -> None:
    call = call_of(
        tools=[{**TOOL, "cache_control": HOUR}],
        system=[{"type": "text", "text": "s", "cache_control": HOUR}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": EPHEMERAL}]},
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": "c"},
        ],
        cache_control=EPHEMERAL,
    )
    assert call.breakpoints == (
        Breakpoint("tools", 0, 3600.0),
        Breakpoint("system", 0, 3600.0),
        Breakpoint("turn", 0, 300.0),
        Breakpoint("turn", 2, 300.0),
    )


def test_breakpoints_that_are_refused() -> None:
    marked = {"type": "text", "text": "a", "cache_control": EPHEMERAL}
    assert refused(messages=[{"role": "user", "content": [marked] * 5}]) == (
        "messages.0.content.4.cache_control: is breakpoint 5 of 5; a prompt has at most 4",
        "messages.0.content.4.cache_control",
    )
    late = {"type": "text", "text": "a", "cache_control": HOUR}
    assert refused(messages=[{"role": "user", "content": [marked, late]}])[1] == (
        "messages.0.content.1.cache_control.ttl"
    )
    assert refused(system=[{**marked, "cache_control": {"type": "ephemeral", "ttl": "2h"}}])[1] == (
        "system.0.cache_control.ttl"
    )


@pytest.mark.parametrize(
    ("miss", "expected"),
    [
        (None, None),
        (CacheMiss("system_changed", 9, token=3, part="system"), ("system_changed", 9)),
        (CacheMiss("tools_changed", 9), ("tools_changed", 9)),
        (CacheMiss("messages_changed", 9), ("messages_changed", 9)),
        (CacheMiss("model_changed", 9), ("model_changed", 9)),
        (CacheMiss("previous_not_found"), ("previous_message_not_found", None)),
        (CacheMiss("evicted", 9, 9), ("unavailable", None)),
        (CacheMiss("unavailable", 9), ("unavailable", None)),
    ],
)
def test_diagnostics_of_a_miss(miss: CacheMiss | None, expected: Any) -> None:
    script = Script(AnthropicMessages(), WHOLE, THINKING_MODEL, notes={"cache_miss": miss})
    message = ask(script, diagnostics={"previous_message_id": "msg_1"})
    assert script.calls[0].previous == "msg_1" and message.diagnostics is not None
    reason = message.diagnostics.cache_miss_reason
    found = None if reason is None else (reason.type, getattr(reason, "cache_missed_input_tokens", None))
    assert found == expected
    assert ask(script).diagnostics is None


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "messages.0"),
        ({"messages": [*HI, {"role": "system", "content": "a"}]}, "messages.1.role"),
        ({"messages": [{"role": "user", "content": []}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "user", "content": [CALL]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a"}]}]},
         "messages.0.content.0.tool_use_id"),
        ({"messages": [*HI, {"role": "assistant", "content": [CALL]}, *HI]}, "messages"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0"),
        ({"tools": [{**TOOL, "defer_loading": True}]}, "tools.0"),
        ({"tools": [TOOL, TOOL]}, "two tools are named 'add'"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "auto", "name": "add"}}, "tool_choice.name"),
        ({"thinking": {"type": "enabled", "budget_tokens": 50}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type"),
        ({"container": "c"}, "container"),
        ({"extra_body": {"max_tokens": "50"}}, "max_tokens"),
        ({"extra_body": {"temprature": 1}}, "temprature"),
        ({"stop_sequences": [""]}, "stop"),
    ],
)  # fmt: skip
def test_what_is_refused_names_its_field(values: dict[str, Any], param: str) -> None:
    assert refused(**values)[1] == param


# ---- every field of the protocol ----


def test_every_field_of_the_clients_types_is_carried_out_ignored_or_refused() -> None:
    pairs = [
        (message_create_params.MessageCreateParamsStreaming, anthropic_body.MessagesBody),
        (types.MessageCountTokensParams, anthropic_body.CountTokensBody),
        (types.TextBlockParam, anthropic_body.TextBlock),
        (types.ThinkingBlockParam, anthropic_body.ThinkingBlock),
        (types.RedactedThinkingBlockParam, anthropic_body.RedactedThinkingBlock),
        (types.ToolUseBlockParam, anthropic_body.ToolUseBlock),
        (types.ToolResultBlockParam, anthropic_body.ToolResultBlock),
        (types.ToolParam, anthropic_body.ToolDeclaration),
        (types.CacheControlEphemeralParam, anthropic_body.CacheControl),
        (types.OutputConfigParam, anthropic_body.OutputConfig),
        (types.MetadataParam, anthropic_body.Metadata),
        (types.DiagnosticsParam, anthropic_body.Diagnostics),
        (types.ThinkingConfigEnabledParam, anthropic_body.ThinkingConfig),
        (types.ToolChoiceToolParam, anthropic_body.ToolChoice),
        (types.UserMessageParam, anthropic_body.Message),
    ]
    for theirs, ours in pairs:
        body: Any = ours
        known = {field.alias or name for name, field in body.model_fields.items()} | {*body.REFUSED} | {*body.IGNORED}
        assert {*typing.get_type_hints(theirs)} <= known, theirs.__name__


def test_every_type_of_block_is_known() -> None:
    kinds = {_literal(each, "type") for each in _members(types.ContentBlockParam)}
    assert kinds == {*anthropic_body.BLOCKS} | {*anthropic_body.REFUSED_BLOCKS}
    for kind in kinds - {*anthropic_body.BLOCKS}:
        message, param = refused(messages=[{"role": "user", "content": [{"type": kind}]}])
        assert param == "messages.0.content.0" and repr(kind) in message
    for each in _members(types.ToolUnionParam):
        kind = _literal(each, "type")
        if kind != "custom":
            message, param = refused(tools=[{"type": kind, "name": "x"}])
            assert param == "tools.0" and repr(kind) in message
    thinking = {_literal(each, "type") for each in _members(types.ThinkingConfigParam)}
    assert thinking == {"enabled", "disabled", "adaptive", "between_tools"}


def _members(union: Any) -> list[Any]:
    return [*typing.get_args(union)]


def _literal(kind: Any, field: str) -> str:
    hint = typing.get_type_hints(kind)[field]
    while typing.get_origin(hint) is not typing.Literal:
        assert typing.get_origin(hint) in (typing.Union, UnionType), hint
        hint = typing.get_args(hint)[0]
    return typing.get_args(hint)[0]


def test_what_is_ignored_is_listed() -> None:
    tool = {**TOOL, "strict": True}
    _, ignored = read_body(
        anthropic_body.MessagesBody,
        {"model": "m", "max_tokens": 1, "messages": HI, "service_tier": "auto", "tools": [tool]},
    )
    assert {*ignored} == {"service_tier", "ToolDeclaration.strict"}


def test_models_in_this_protocols_shape() -> None:
    model: Any = THINKING_MODEL
    model.tokenizer = None
    info = types.ModelInfo.model_validate(describe_model(model))
    assert info.id == "tiny" and info.max_input_tokens == 512
    assert info.capabilities is not None and info.capabilities.thinking.types.enabled.supported
    assert list_models([model])["first_id"] == "tiny" and list_models([])["data"] == []
