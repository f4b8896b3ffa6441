"""Bodies of Anthropic's Messages as its own client sends them: prompts, tools, thoughts, breakpoints, refusals."""

from __future__ import annotations

import typing
from typing import Any

import anthropic
import pytest
from anthropic import types
from anthropic.types import message_create_params

from tests.serve.dialects.scripted import (
    CALL,
    EPHEMERAL,
    HI,
    HOUR,
    PLAIN_MODEL,
    READ,
    THINKING_MODEL,
    TOOL,
    USED,
    WHOLE,
    Script,
    ask,
    literal_of,
    refused,
)
from workbench.prompt.cache_miss import CacheMiss
from workbench.prompt.turns import ResultTurn, UserTurn
from workbench.serve.answers.pieces import (
    Ended,
)
from workbench.serve.bodies.fields import read_body
from workbench.serve.call import Breakpoint
from workbench.serve.dialects.anthropic import body as anthropic_body
from workbench.serve.dialects.anthropic.messages import AnthropicMessages
from workbench.serve.dialects.anthropic.models import describe_model, list_models


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
    assert conversation.system == "Be brief.Add." and conversation.tools[0].name == "add"
    assert conversation.turns[0] == UserTurn(content="1+1?")
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
        system=[{"type": "text", "text": "Be brief.", "cache_control": HOUR}, {"type": "text", "text": "Add."}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": EPHEMERAL}]},
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": "c"},
        ],
        cache_control=EPHEMERAL,
    )
    assert call.breakpoints == (
        Breakpoint("tools", 0, 3600.0),
        Breakpoint("system", len("Be brief."), 3600.0),
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
    kinds = {literal_of(each, "type") for each in _members(types.ContentBlockParam)}
    assert kinds == {*anthropic_body.BLOCKS} | {*anthropic_body.REFUSED_BLOCKS}
    for kind in kinds - {*anthropic_body.BLOCKS}:
        message, param = refused(messages=[{"role": "user", "content": [{"type": kind}]}])
        assert param == "messages.0.content.0" and repr(kind) in message
    for each in _members(types.ToolUnionParam):
        kind = literal_of(each, "type")
        if kind != "custom":
            message, param = refused(tools=[{"type": kind, "name": "x"}])
            assert param == "tools.0" and repr(kind) in message
    thinking = {literal_of(each, "type") for each in _members(types.ThinkingConfigParam)}
    assert thinking == {"enabled", "disabled", "adaptive", "between_tools"}


def _members(union: Any) -> list[Any]:
    return [*typing.get_args(union)]


def test_what_is_ignored_is_listed() -> None:
    tool = {**TOOL, "eager_input_streaming": True}
    _, ignored = read_body(
        anthropic_body.MessagesBody,
        {"model": "m", "max_tokens": 1, "messages": HI, "service_tier": "auto", "tools": [tool]},
    )
    assert {*ignored} == {"service_tier", "ToolDeclaration.eager_input_streaming"}


def test_models_in_this_protocols_shape() -> None:
    model: Any = THINKING_MODEL
    model.tokenizer = None
    info = types.ModelInfo.model_validate(describe_model(model))
    assert info.id == "tiny" and info.max_input_tokens == 512
    assert info.capabilities is not None and info.capabilities.thinking.types.enabled.supported
    assert list_models([model])["first_id"] == "tiny" and list_models([])["data"] == []
