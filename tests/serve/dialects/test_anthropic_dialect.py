"""Answers of Anthropic's Messages as its own client reads them, over scripted pieces."""

from __future__ import annotations

import itertools
import typing
from typing import Any

import anthropic
import orjson
import pytest
from anthropic import types
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.serve.dialects.scripted import (
    HI,
    HOUR,
    READ,
    THINKING_MODEL,
    USED,
    WHOLE,
    Script,
    ask,
    first_letter_changed,
    refused,
)
from tests.thorough import tries
from workbench.errors import WorkbenchError
from workbench.prompt.turns import AssistantTurn, ToolCall
from workbench.serve.answers.pieces import (
    Ended,
    Piece,
    Text,
    Thought,
    ToolArguments,
    ToolCallBegun,
)
from workbench.serve.dialects.anthropic.answer import STOP_REASONS
from workbench.serve.dialects.anthropic.messages import AnthropicMessages
from workbench.serve.dialects.thought_signature import ThoughtSigner
from workbench.serve.errors import STATUS, ApiError

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


@settings(max_examples=tries(40), deadline=None)
@example([Thought(text="a"), Text(text="b"), Thought(text="c")], 1)
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
        {**thinking, "signature": first_letter_changed(thinking["signature"])},
        {**thinking, "signature": ""},
        {**thinking, "thinking": ""},
        {"type": "redacted_thinking", "data": thinking["signature"]},
    ):
        blocks: Any = [changed, *(block.to_dict() for block in answer.content[1:])]
        with pytest.raises(anthropic.BadRequestError, match=r"messages\.1\.content\.0\.(signature|data)"):
            ask(script, messages=[*HI, {"role": "assistant", "content": blocks}, {"role": "user", "content": results}])


@settings(max_examples=tries(60), deadline=None)
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
