"""OpenAI's Responses as the client sends and reads them, over scripted pieces."""

from __future__ import annotations

import typing
from dataclasses import replace
from typing import Any

import openai
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import responses, shared_params
from openai.types.responses import input_token_count_params, response_create_params, response_input_item_param

from tests.serve.dialects.scripted import THINKING_MODEL, Script, first_letter_changed, literal_of
from tests.serve.serving import Json
from tests.thorough import tries
from workbench.prompt.cache_miss import CacheMiss
from workbench.prompt.turns import AssistantTurn, ResultTurn, ToolCall, UserTurn
from workbench.serve.answers.pieces import (
    Ended,
    EndReason,
    Piece,
    PromptRead,
    Text,
    Thought,
    TokenLogprob,
    ToolArguments,
    ToolCallBegun,
    Used,
)
from workbench.serve.app import load_dialects
from workbench.serve.call import Breakpoint
from workbench.serve.config import ServerSettings
from workbench.serve.dialects.responses import body as responses_body
from workbench.serve.dialects.responses.responses import OpenAIResponses
from workbench.serve.dialects.responses.store import ResponseStore, StoredResponse
from workbench.serve.errors import ApiError

TOOL: Any = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {"a": {}}}}
USED = Used(prompt_tokens=10, completion_tokens=9, cached_tokens=4, written_tokens=3, thinking_tokens=2)
WHOLE: list[Piece] = [
    PromptRead(prompt_tokens=10, cached_tokens=4),
    Thought(text="hm "),
    Thought(text="ok"),
    Text(text="Hel"),
    Text(text="lo"),
    ToolCallBegun(index=0, id="call_1", name="add"),
    ToolArguments(index=0, text='{"a":'),
    ToolArguments(index=0, text=" 1}"),
    ToolCallBegun(index=1, id="call_2", name="now"),
    ToolArguments(index=1, text="{}"),
    Ended(reason="tool_calls", token_ids=(5, 6, 7)),
    USED,
]
KINDS = {
    "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    "response.reasoning_text.delta", "response.reasoning_text.done", "response.output_text.delta",
    "response.output_text.done", "response.content_part.done", "response.function_call_arguments.delta",
    "response.function_call_arguments.done", "response.output_item.done", "response.completed",
}  # fmt: skip


def script(pieces: list[Piece] | None = None, **values: Any) -> Script:
    dialect = values.pop("dialect", None) or OpenAIResponses(b"key")
    model: Any = THINKING_MODEL
    model.answer_tokens, model.tokenizer = 512, None
    return Script(dialect, WHOLE if pieces is None else pieces, model, **values)


def ask(made: Script, **values: Any) -> responses.Response:
    return made.openai().responses.create(**{"model": "tiny", "input": "hi", **values})


def refused(**values: Any) -> str:
    """Return the parameter that a refusal names."""
    with pytest.raises(openai.BadRequestError) as caught:
        ask(script(), **values)
    body: Any = caught.value.body
    assert body["type"] == "invalid_request_error" and body["message"]
    return body["param"]


def plain(item: Any) -> Json:
    """Return an item without its id, and without what the client's helper adds."""
    values = item.to_dict()
    for part in values.get("content", []):
        part.pop("parsed", None)
    return {k: v for k, v in values.items() if k not in ("id", "parsed_arguments")}


@pytest.mark.parametrize("steps", [1, 3, 100])
def test_a_stream_and_a_whole_answer_are_the_same_response(steps: int) -> None:
    made = script(steps=steps)
    whole = ask(made)
    with made.openai().responses.stream(model="tiny", input="hi") as stream:
        kinds = {event.type for event in stream}
        streamed = stream.get_final_response()
    assert kinds == KINDS
    assert [item.type for item in whole.output] == ["reasoning", "message", "function_call", "function_call"]
    assert whole.output_text == streamed.output_text == "Hello"
    assert [plain(item) for item in streamed.output] == [plain(item) for item in whole.output]
    assert whole.output[2].to_dict()["arguments"] == '{"a": 1}' and whole.status == streamed.status == "completed"
    assert whole.usage == streamed.usage and whole.usage is not None
    assert (whole.usage.input_tokens, whole.usage.output_tokens, whole.usage.total_tokens) == (10, 9, 19)
    assert whole.usage.input_tokens_details.cached_tokens == 4
    assert whole.usage.output_tokens_details.reasoning_tokens == 2


def raw_events(pieces: list[Piece], fails: ApiError | None = None) -> list[Json]:
    body = orjson.dumps({"model": "tiny", "input": "hi", "stream": True})
    response = script(pieces, fails=fails).openai()._client.post("/responses", content=body)
    parts = [part.split(b"\n") for part in response.content.split(b"\n\n") if part and not part.startswith(b":")]
    events = [orjson.loads(lines[1].removeprefix(b"data: ")) for lines in parts]
    assert [lines[0].decode() for lines in parts] == [f"event: {event['type']}" for event in events]
    return events


some_pieces = st.lists(
    st.one_of(
        st.text(max_size=3).map(lambda text: [Text(text=text)]),
        st.text(max_size=3).map(lambda text: [Thought(text=text)]),
        st.text(max_size=3).map(
            lambda text: [ToolCallBegun(id="call_1", name="add"), *(ToolArguments(text=letter) for letter in text)]
        ),
    ),
    max_size=8,
)


@settings(max_examples=tries(60), deadline=None)
@given(some_pieces)
def test_events_are_numbered_items_nested_and_deltas_add_up(made: list[list[Piece]]) -> None:
    events = raw_events([PromptRead(), *(piece for pieces in made for piece in pieces), Ended(), USED])
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    open_item, deltas, done = None, "", []
    for event in events[2:-1]:
        kind = event["type"]
        responses_event = event | {"type": kind}
        assert responses_event["output_index"] == len(done)
        if kind == "response.output_item.added":
            assert open_item is None
            open_item, deltas = event["item"]["id"], ""
        elif kind == "response.output_item.done":
            assert event["item"]["id"] == open_item
            whole = event["item"].get("arguments", (event["item"].get("content") or [{}])[0].get("text"))
            assert whole == deltas
            done.append(event["item"])
            open_item = None
        else:
            assert event["item_id"] == open_item
            deltas += event.get("delta", "")
    assert open_item is None and events[-1]["response"]["output"] == done


@pytest.mark.parametrize("reason", typing.get_args(EndReason))
def test_every_end(reason: Any) -> None:
    expected = {"length": "max_output_tokens", "context": "max_output_tokens", "content_filter": "content_filter",
                "cancelled": "steered"}.get(reason)  # fmt: skip
    made = script([PromptRead(), Text(text="a"), Ended(reason=reason), USED])
    whole = ask(made)
    kinds = [event.type for event in made.openai().responses.create(model="tiny", input="hi", stream=True)]
    assert kinds[-1] == ("response.completed" if expected is None else "response.incomplete")
    assert whole.status == ("completed" if expected is None else "incomplete")
    found = whole.incomplete_details.reason if whole.incomplete_details is not None else None
    assert found == expected


def test_an_error_in_mid_stream_is_two_events_and_an_end() -> None:
    kinds = raw_events([PromptRead(), Text(text="a")], ApiError("api_error", "broken"))
    assert [event["type"] for event in kinds[-2:]] == ["response.failed", "error"]
    responses.ResponseFailedEvent.model_validate(kinds[-2])
    assert responses.ResponseErrorEvent.model_validate(kinds[-1]).message == "broken"
    assert kinds[-2]["response"]["status"] == "failed" and kinds[-2]["response"]["error"]["message"] == "broken"


def test_log_probabilities() -> None:
    token = TokenLogprob(7, -0.5, ((7, -0.5), (8, -1.0)))
    made = script([PromptRead(), Text(text="a", token_ids=(7,), logprobs=(token,)), Ended(), USED])
    answer = ask(made, top_logprobs=2, include=["message.output_text.logprobs"])
    part: Any = answer.output[0].to_dict()["content"]
    assert part[0]["logprobs"][0]["logprob"] == -0.5 and len(part[0]["logprobs"][0]["top_logprobs"]) == 2
    assert made.calls[0].sampling.logprobs == 2


# ---- what is asked ----


def test_a_response_goes_on_from_another_with_the_tokens_that_were_generated() -> None:
    made = script()
    first = ask(made, input=[{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "hi"}],
                instructions="Add.", tools=[TOOL])  # fmt: skip
    assert made.calls[0].prompts[0].system == "Add.Be brief."
    outputs: Any = [{"type": "function_call_output", "call_id": f"call_{n}", "output": str(n)} for n in (2, 1)]
    ask(made, input=outputs, previous_response_id=first.id)
    conversation = made.calls[1].prompts[0]
    assert conversation.system == "Be brief.", "instructions are not inherited"
    assert conversation.turns == (
        UserTurn(content="hi"),
        AssistantTurn(
            content="Hello",
            thinking="hm ok",
            tool_calls=(ToolCall(name="add", arguments={"a": 1}, id="call_1"), ToolCall(name="now", id="call_2")),
            generated_ids=(5, 6, 7),
        ),
        ResultTurn(content="1", name="add", call_id="call_1"),
        ResultTurn(content="2", name="now", call_id="call_2"),
    )
    assert made.calls[1].previous == first.id


def test_a_response_is_its_tenants_alone_and_may_not_be_stored() -> None:
    made = script([PromptRead(), Text(text="a"), Ended(), USED])
    stored, unstored = ask(made), ask(made, store=False)
    for id, headers in ((unstored.id, {}), (stored.id, {"x-tenant": "another"})):
        with pytest.raises(openai.NotFoundError) as caught:
            ask(made, previous_response_id=id, extra_headers=headers)
        assert caught.value.code == "response_not_found"
    ask(made, previous_response_id=stored.id)


def test_a_deleted_response_is_gone_and_a_large_one_is_not_kept() -> None:
    store = ResponseStore(max_bytes=8_000)
    for id, text in (("a", "x"), ("b", "y"), ("c", "z" * 3_000)):
        store.keep(StoredResponse("t", (), (), {"id": id, "text": text}, []))
    store.delete("a", "t")
    assert store.get("b", "t").response["text"] == "y"
    for id, tenant in (("a", "t"), ("c", "t"), ("b", "another")):
        with pytest.raises(ApiError, match="no response"):
            store.get(id, tenant)


def test_turns_and_generated_tokens_of_a_response_count() -> None:
    """A response that is short in JSON may hold many turns, each with its tokens."""
    short, long = AssistantTurn(content="x"), "x" * 1_000
    for number, turn in enumerate(
        (
            AssistantTurn(content="x", generated_ids=tuple(range(100))),
            AssistantTurn(content="x", thinking=long),
            UserTurn(content=long),
            AssistantTurn(tool_calls=(ToolCall(name="add", arguments={"a": long}),)),
        )
    ):
        store, id = ResponseStore(max_bytes=32_000), f"resp_{number}"
        store.keep(StoredResponse("t", (), (turn, short), {"id": id}, []))
        assert store.get(id, "t").turns == (turn, short)
        store.keep(StoredResponse("t", (), (turn,) * 2, {"id": "twice"}, []))
        with pytest.raises(ApiError, match="no response"):
            store.get("twice", "t")


def test_a_servers_settings_bound_what_is_kept() -> None:
    settings = ServerSettings(response_bytes=8_000, response_seconds=1e-9)
    made = script(dialect=load_dialects(b"key", settings)["openai.responses"])
    with pytest.raises(openai.NotFoundError):
        ask(made, previous_response_id=ask(made).id)


def test_items_of_an_answer_are_one_turn_and_thoughts_come_back_sealed() -> None:
    made = script()
    answer = ask(made, include=["reasoning.encrypted_content"], store=False)
    items: list[Any] = [item.to_dict() for item in answer.output]
    outputs = [{"type": "function_call_output", "call_id": f"call_{n}", "output": "x"} for n in (1, 2)]
    user = {"role": "user", "content": [{"type": "input_text", "text": "hi"}]}
    hidden = {k: v for k, v in items[0].items() if k != "content"}
    for first in (items[0], hidden):
        ask(made, input=[user, first, *items[1:], *outputs])
        turn = made.calls[-1].prompts[0].turns[1]
        assert (turn.thinking, turn.content, len(turn.tool_calls)) == ("hm ok", "Hello", 2)
    changed = {**hidden, "encrypted_content": first_letter_changed(items[0]["encrypted_content"])}
    assert refused(input=[user, changed]) == "input.1.encrypted_content"


def test_sampling_formats_efforts_and_choices() -> None:
    made = script()
    schema = {"type": "object"}
    ask(
        made, temperature=0, top_p=0.5, max_output_tokens=7, tools=[TOOL], parallel_tool_calls=False,
        tool_choice={"type": "function", "name": "add"}, reasoning={"effort": "none"},
        text={"format": {"type": "json_schema", "name": "x", "schema": schema}},
    )  # fmt: skip
    call = made.calls[0]
    assert (call.sampling.temperature, call.sampling.top_p, call.sampling.max_tokens) == (0, 0.5, 7)
    assert call.sampling.response_format.json_schema == schema and call.sampling.thinking.budget_tokens == 0
    assert (call.tool_choice, call.parallel_tool_calls) == ("add", False)
    for choice in ("none", "auto", "required"):
        ask(made, tools=[TOOL], tool_choice=choice)
        assert made.calls[-1].tool_choice == choice
    ask(made, text={"format": {"type": "json_object"}}, reasoning={"effort": "high"})
    assert made.calls[-1].sampling.response_format.json_schema == {"type": "object"}
    assert made.calls[-1].sampling.thinking.budget_tokens > 0


def test_breakpoints_and_diagnostics() -> None:
    kept = {"mode": "explicit", "ttl": "12h"}
    parts: Any = [{"type": "input_text", "text": "a", "prompt_cache_breakpoint": kept}]
    made = script(notes={"cache_miss": CacheMiss("tools_changed", 9)})
    items: Any = [{"role": role, "content": parts} for role in ("system", "user")]
    compared: Any = {"comparison_response_id": "resp_1"}
    answer = ask(made, instructions="x", input=items, prompt_cache_options=compared)
    assert made.calls[0].breakpoints == (Breakpoint("system", len("xa"), 43200.0), Breakpoint("turn", 0, 43200.0))
    assert made.calls[0].previous == "resp_1" and answer.prompt_cache_diagnostics is not None
    assert answer.prompt_cache_diagnostics.to_dict()["reason"] == "tools_changed"
    for miss, kind in (
        (None, "cache_hit"),
        (CacheMiss("previous_not_found"), "comparison_response_not_found"),
        (CacheMiss("evicted", 3, 3), "unavailable"),
        (CacheMiss("system_changed", 3), "cache_miss"),
    ):
        answer = ask(script(notes={"cache_miss": miss}), prompt_cache_options={"comparison_response_id": "resp_1"})
        assert answer.prompt_cache_diagnostics is not None and answer.prompt_cache_diagnostics.type == kind
    kept = script([PromptRead(), Text(text="a"), Ended(), replace(USED, from_kept_answer=True)])
    answer = ask(kept, prompt_cache_options={"comparison_response_id": "resp_1"})
    assert answer.prompt_cache_diagnostics is not None and answer.prompt_cache_diagnostics.type == "unavailable"
    assert ask(made, prompt_cache_options={"prewarm": True}).output == []


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input.0.content.0"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0"),
        ({"input": [{"type": "function_call_output", "call_id": "x", "output": "y"}]}, "input.0.call_id"),
        ({"input": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, "input"),
        ({"tools": [{"type": "web_search"}]}, "tools.0"),
        ({"tool_choice": {"type": "mcp", "server_label": "x"}}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"conversation": "c"}, "conversation"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"extra_body": {"tempratur": 1}}, "tempratur"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
    ],
)
def test_what_is_refused_names_its_field(values: Json, param: str) -> None:
    assert refused(**values) == param


# ---- every field of the protocol ----


def test_every_field_of_the_clients_types_is_carried_out_ignored_or_refused() -> None:
    pairs = [
        (response_create_params.ResponseCreateParamsStreaming, responses_body.ResponsesBody),
        (input_token_count_params.InputTokenCountParams, responses_body.InputTokensBody),
        (responses.EasyInputMessageParam, responses_body.MessageItem),
        (response_input_item_param.Message, responses_body.MessageItem),
        (responses.ResponseOutputMessageParam, responses_body.MessageItem),
        (responses.ResponseFunctionToolCallParam, responses_body.FunctionCallItem),
        (response_input_item_param.FunctionCallOutput, responses_body.FunctionOutputItem),
        (responses.ResponseReasoningItemParam, responses_body.ReasoningItem),
        (responses.ResponseInputTextParam, responses_body.TextPart),
        (responses.ResponseOutputTextParam, responses_body.TextPart),
        (responses.FunctionToolParam, responses_body.FunctionTool),
        (responses.ResponseTextConfigParam, responses_body.TextConfig),
        (responses.ResponseFormatTextJSONSchemaConfigParam, responses_body.TextFormat),
        (shared_params.Reasoning, responses_body.Reasoning),
        (response_create_params.PromptCacheOptions, responses_body.PromptCacheOptions),
        (response_create_params.StreamOptions, responses_body.ResponseStreamOptions),
    ]
    for theirs, ours in pairs:
        body: Any = ours
        known = {field.alias or name for name, field in body.model_fields.items()} | {*body.REFUSED} | {*body.IGNORED}
        assert {*typing.get_type_hints(theirs)} <= known, theirs.__name__


def test_every_type_of_item_and_tool_is_known() -> None:
    kinds = {literal_of(each, "type") for each in typing.get_args(responses.ResponseInputItemParam)}
    assert kinds == {*responses_body.ITEMS} | {*responses_body.REFUSED_ITEMS}
    for kind in responses_body.REFUSED_ITEMS:
        assert refused(input=[{"type": kind}]) == "input.0"
    for each in typing.get_args(responses.ToolParam):
        if (kind := literal_of(each, "type")) != "function":
            assert refused(tools=[{"type": kind}]) == "tools.0"
    for each in typing.get_args(response_create_params.ToolChoice):
        if isinstance(each, type) and (kind := literal_of(each, "type")) != "function":
            assert refused(tool_choice={"type": kind}) == "tool_choice"
