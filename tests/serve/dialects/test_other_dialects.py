"""Messages and Responses with the vendors' clients over a server: what the engine says reaches both protocols."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
from anthropic.resources.messages import Messages
from openai.types.responses import ResponseFunctionToolCall

from workbench.engine.load import load
from workbench.prompt.cache_miss import BEHIND_WHAT_STAYS
from workbench.serve.server import Server, serve

MODEL = "demo-chat"
QUESTION: list[Any] = [{"role": "user", "content": "What is 12 + 30?"}]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 99}, "b": {"type": "integer", "maximum": 99}},
    "required": ["a", "b"],
}
ADD: Any = {"name": "add", "description": "Add two numbers.", "input_schema": {**SCHEMA, "additionalProperties": False}}


@pytest.fixture
def messages(server: Server) -> Iterator[Messages]:
    with anthropic.Anthropic(base_url=server.url, api_key="any", max_retries=0) as made:
        yield made.messages


def test_a_round_of_tools_with_a_thought(messages: Messages) -> None:
    thinking: Any = {"type": "enabled", "budget_tokens": 20}
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 80, "tools": [ADD], "thinking": thinking}
    with messages.stream(**asked, messages=QUESTION, tool_choice={"type": "any"}) as stream:
        first = stream.get_final_message()
    assert first.stop_reason == "tool_use" and first.content[0].type == "thinking"
    calls = [block for block in first.content if block.type == "tool_use"]
    assert calls and all({*call.input} == {"a", "b"} for call in calls)
    results: Any = [{"type": "tool_result", "tool_use_id": call.id, "content": "42"} for call in calls]
    history = [*QUESTION, first.to_param(), {"role": "user", "content": results}]
    second = messages.create(**asked, messages=history)
    assert second.stop_reason in ("end_turn", "max_tokens", "tool_use")
    counted = messages.count_tokens(model=MODEL, messages=history, tools=[ADD], thinking=thinking)
    usage = second.usage
    assert counted.input_tokens == (
        usage.input_tokens + (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
    )
    forged: Any = first.to_param()
    forged["content"][0] = {"type": "thinking", "thinking": "42", "signature": first.content[0].signature}
    with pytest.raises(anthropic.BadRequestError, match="signature"):
        messages.create(**asked, messages=[*QUESTION, forged, history[-1]])


def test_stop_sequences_and_bounds_of_an_answer(messages: Messages) -> None:
    greedy: Any = {"temperature": 0}
    whole = messages.create(model=MODEL, max_tokens=40, messages=QUESTION, extra_body=greedy)
    (block,) = whole.content
    assert block.type == "text" and len(block.text) > 4 and whole.stop_reason == "end_turn"
    stop = block.text[3]
    stopped = messages.create(
        model=MODEL, max_tokens=40, messages=QUESTION, stop_sequences=[stop], extra_body=greedy
    )  # fmt: skip
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", stop)
    assert "".join(each.text for each in stopped.content if each.type == "text") == block.text.partition(stop)[0]
    cut = messages.create(model=MODEL, max_tokens=1, messages=QUESTION)
    assert cut.stop_reason == "max_tokens" and cut.usage.output_tokens == 1
    assert messages.create(model=MODEL, max_tokens=0, messages=QUESTION).content == []


def test_errors_have_the_shape_of_their_route(server: Server, messages: Messages) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        messages.create(model="x", max_tokens=1, messages=QUESTION)
    body: Any = missing.value.body
    assert body["error"]["type"] == "not_found_error" and body["request_id"]
    with httpx.Client(base_url=server.url) as http:
        for path in ("/v1/messages", "/v1/messages/count_tokens", "/v1/messages/batches"):
            assert http.post(path, content=b"no").json()["type"] == "error", path
        for path in ("/v1/responses", "/v1/responses/input_tokens", "/v1/batches", "/v1/embeddings", "/tokenize"):
            assert "message" in http.post(path, content=b"no").json()["error"], path


def test_models_in_both_shapes(server: Server, client: openai.OpenAI) -> None:
    with anthropic.Anthropic(base_url=server.url, api_key="any") as made:
        (found,) = made.models.list().data
        assert found.id == MODEL and found.capabilities is not None and found.capabilities.thinking.supported
        assert made.models.retrieve(MODEL) == found
    assert [each.id for each in client.models.list().data] == [MODEL]


def test_a_response_goes_on_and_is_streamed_kept_and_deleted(client: openai.OpenAI) -> None:
    first = client.responses.create(model=MODEL, input="What is 12 + 30?", max_output_tokens=40, temperature=0)
    assert first.status == "completed" and first.output_text and first.usage is not None
    tool: Any = {"type": "function", "name": "add", "description": "Add.", "parameters": SCHEMA, "strict": True}
    with client.responses.stream(
        model=MODEL, input="And 13 + 30?", previous_response_id=first.id, tools=[tool], tool_choice="required",
        max_output_tokens=60, reasoning={"effort": "minimal"}, temperature=0,
    ) as stream:  # fmt: skip
        second = stream.get_final_response()
    called = second.output[-1]
    assert isinstance(called, ResponseFunctionToolCall)
    assert second.usage is not None and second.usage.input_tokens > first.usage.input_tokens
    again = client.responses.retrieve(second.id).output[-1]
    assert isinstance(again, ResponseFunctionToolCall) and again.id == called.id
    assert len(client.responses.input_items.list(second.id).data) == 1
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model=MODEL, input="x", previous_response_id=first.id)
    counted = client.responses.input_tokens.count(model=MODEL, input="What is 12 + 30?")
    assert counted.input_tokens == first.usage.input_tokens


def test_a_response_that_is_cut_is_incomplete(client: openai.OpenAI) -> None:
    cut = client.responses.create(model=MODEL, input="hi", max_output_tokens=1)
    assert cut.status == "incomplete" and cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens"


def test_both_protocols_and_the_trace_name_the_price_of_a_miss() -> None:
    """A day at the front of a long system prompt, asked on Monday and on Sunday."""
    one, two = (f"It is {day}. " + "Answer in one short sentence, and name your source. " * 4 for day in ("Mon", "Sun"))
    runner = load("demo-chat", backend="eager", prefix="radix", page_size=8)
    with (
        serve(runner) as server,
        anthropic.Anthropic(base_url=server.url, api_key="any", max_retries=0) as client,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as other,
    ):
        asked: dict[str, Any] = {"model": MODEL, "max_tokens": 2, "messages": QUESTION}
        first = client.messages.create(**asked, system=one)
        body = {"diagnostics": {"previous_message_id": first.id}}
        message = client.messages.create(**asked, system=two, extra_body=body)
        again = client.messages.create(
            **asked, system=two, extra_body={"diagnostics": {"previous_message_id": message.id}}
        )
        notes = httpx.get(f"{server.url}/v1/traces/{message.id}").json()["notes"]["cache_miss"]
        ask: dict[str, Any] = {"model": MODEL, "max_output_tokens": 16, "input": "What is 12 + 30?"}
        kept = other.responses.create(**ask, instructions=two.replace("Sun", "Sat"))
        options: Any = {"comparison_response_id": kept.id}
        answer = other.responses.create(**ask, instructions=one.replace("Mon", "Fri"), prompt_cache_options=options)
    assert message.diagnostics is not None and message.diagnostics.cache_miss_reason is not None
    assert again.diagnostics is not None and again.diagnostics.cache_miss_reason is None  # a hit has no price
    reason = message.diagnostics.cache_miss_reason.to_dict()
    assert answer.prompt_cache_diagnostics is not None
    for found in (reason, answer.prompt_cache_diagnostics.to_dict()):
        price: Any = found["workbench"]
        missed = found.get("cache_missed_input_tokens", found.get("cache_missed_tokens"))
        assert price["missed_tokens"] == missed and price["elsewhere"] == BEHIND_WHAT_STAYS
        assert 0 <= price["elsewhere_tokens"] < missed and price["missed_seconds"] > price["elsewhere_seconds"] >= 0
    assert reason["workbench"]["missed_tokens"] <= message.usage.input_tokens
    assert {name: notes[name] for name in reason["workbench"]} == reason["workbench"]  # type: ignore[attr-defined] (its own)
    assert f"with {BEHIND_WHAT_STAYS} it had been" in notes["text"]
