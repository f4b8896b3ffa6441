"""Chats of the openai client: plain and streamed answers say the same, and every field does what it says."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

from tests.event_loop import run_async
from tests.patience import until
from tests.serve.serving import CALCULATE, Json, RecordingGate
from workbench.engine.runner import Runner
from workbench.engine.runner_thread import RunnerThread
from workbench.prompt.conversation import Conversation
from workbench.serve.server import Server

MODEL = "demo-chat"
QUESTION = [{"role": "user", "content": "What is 312 times 41?"}]


def chat(client: openai.OpenAI, messages: Any = QUESTION, **options: Any) -> Any:
    return client.chat.completions.create(
        model=MODEL, messages=messages, **{"temperature": 0, "max_tokens": 40, **options}
    )


def joined(chunks: list[Any]) -> dict[int, Json]:
    """Join the chunks of a stream by choice."""
    found: dict[int, Json] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            one = found.setdefault(choice.index, {"content": "", "calls": {}, "ends": [], "thought": ""})
            one["content"] += choice.delta.content or ""
            one["thought"] += getattr(choice.delta, "reasoning_content", None) or ""
            for call in choice.delta.tool_calls or ():
                kept = one["calls"].setdefault(call.index, {"id": call.id, "name": call.function.name, "arguments": ""})
                kept["arguments"] += call.function.arguments or ""
            one["ends"] += [choice.finish_reason] if choice.finish_reason else []
    return found


def test_an_answer_is_what_the_runner_gives(client: openai.OpenAI, chat_runner: Runner) -> None:
    whole = chat(client)
    talk = Conversation(turns=[QUESTION[0]["content"]])
    events = chat_runner.stream(talk, temperature=0, max_tokens=40)
    assert whole.choices[0].message.content == "".join(event.text for event in events)
    assert whole.choices[0].finish_reason == "stop" and whole.model == MODEL
    used = whole.usage
    assert used.prompt_tokens == len(chat_runner.assemble(talk).ids)
    assert used.total_tokens == used.prompt_tokens + used.completion_tokens


def test_an_answer_goes_on_from_where_the_last_message_ends(client: openai.OpenAI, chat_runner: Runner) -> None:
    whole = chat(client).choices[0].message.content
    begun = [*QUESTION, {"role": "assistant", "content": whole[:8]}]
    found = chat(client, begun, extra_body={"continue_final_message": True, "add_generation_prompt": False})
    prompt = Conversation(turns=[QUESTION[0]["content"]]).answer(whole[:8]).prompt(
        chat_runner, continue_final_message=True
    )  # fmt: skip
    assert found.usage.prompt_tokens == len(prompt.ids) and prompt.text.endswith(whole[:8])
    assert whole.startswith(whole[:8] + found.choices[0].message.content[:4])


def test_ignore_eos_ignores_the_templates_ends_too(client: openai.OpenAI) -> None:
    """Load generators ask for answers of one length."""
    answer = chat(client, max_tokens=64, extra_body={"ignore_eos": True})
    assert answer.choices[0].finish_reason == "length" and answer.usage.completion_tokens == 64


@pytest.mark.parametrize(
    "options",
    [
        {}, {"n": 3, "temperature": 1.0, "seed": 5}, {"max_tokens": 3}, {"stop": ["2 *", "zz"]},
        {"tools": [CALCULATE]}, {"tools": [CALCULATE], "tool_choice": "required", "max_tokens": 80},
        {"reasoning_effort": "low", "max_tokens": 80},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {
            "type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}}}},
    ],
    ids=["plain", "n", "length", "stop", "tools", "required", "thought", "schema"],
)  # fmt: skip
def test_a_stream_joins_to_the_plain_answer(client: openai.OpenAI, options: Json) -> None:
    whole = chat(client, **options)
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}, **options))
    found = joined(chunks)
    assert sorted(found) == [choice.index for choice in whole.choices]
    for choice in whole.choices:
        one, message = found[choice.index], choice.message
        assert one["content"] == (message.content or "")
        assert one["ends"] == [choice.finish_reason]
        assert one["thought"] == (getattr(message, "reasoning_content", None) or "")
        calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
        assert [(call["name"], call["arguments"]) for _, call in sorted(one["calls"].items())] == calls
    *others, last = chunks
    assert last.choices == [] and last.usage == whole.usage
    assert all(chunk.usage is None for chunk in others)
    assert others[0].choices[0].delta.role == "assistant" and len({chunk.id for chunk in chunks}) == 1


def test_choices_begin_in_their_order(client: openai.OpenAI) -> None:
    chunks = list(chat(client, n=5, stream=True, temperature=1.0, seed=1))
    order = list(dict.fromkeys(choice.index for chunk in chunks for choice in chunk.choices))
    assert order == [0, 1, 2, 3, 4]


def test_usage_comes_only_where_it_is_asked_for(client: openai.OpenAI) -> None:
    assert all(chunk.usage is None and chunk.choices for chunk in chat(client, stream=True))
    chunks = list(chat(client, stream=True, extra_body={"stream_options": {"continuous_usage_stats": True}}))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] > 3


def test_a_forced_call_keeps_its_schema_and_has_an_id(client: openai.OpenAI) -> None:
    named = {"type": "function", "function": {"name": "calculate"}}
    answer = chat(client, tools=[CALCULATE], tool_choice=named, max_tokens=80).choices[0]
    (call,) = answer.message.tool_calls
    assert answer.finish_reason == "tool_calls" and call.id.startswith("call_")
    assert set(json.loads(call.function.arguments)) == {"expression"}
    longer = [
        *QUESTION, answer.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "12792"},
    ]  # fmt: skip
    assert chat(client, longer, tools=[CALCULATE]).choices[0].message.content


def test_the_clients_own_helper_reads_the_stream(client: openai.OpenAI) -> None:
    asked: Json = {"messages": QUESTION, "tools": [CALCULATE], "tool_choice": "required"}
    with client.chat.completions.stream(model=MODEL, **asked, max_tokens=80, temperature=0) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.done" in kinds
    calls = final.choices[0].message.tool_calls
    assert calls and calls[0].function.name == "calculate"


def test_logprobs_are_of_the_shown_tokens(client: openai.OpenAI, chat_runner: Runner) -> None:
    answer = chat(client, logprobs=True, top_logprobs=3).choices[0]
    tokens = answer.logprobs.content
    assert "".join(each.token for each in tokens) == answer.message.content
    assert bytes(byte for each in tokens for byte in each.bytes).decode() == answer.message.content
    assert all(len(each.top_logprobs) == 3 for each in tokens)
    assert all(each.logprob == max(top.logprob for top in each.top_logprobs) for each in tokens)  # greedy
    chunks = chat(client, logprobs=True, top_logprobs=3, stream=True)
    streamed = [each for chunk in chunks for c in chunk.choices if c.logprobs for each in c.logprobs.content]
    assert streamed == tokens


def test_a_seed_repeats_an_answer(client: openai.OpenAI) -> None:
    texts = [chat(client, temperature=1.2, seed=seed).choices[0].message.content for seed in (3, 3, 4, 5)]
    assert texts[0] == texts[1] and len(set(texts)) > 1


def test_a_stop_string_never_shows_and_is_named(client: openai.OpenAI) -> None:
    answer = chat(client, stop=["1279"]).choices[0]
    assert "1" in answer.message.content and "1279" not in answer.message.content
    plain = chat(client).choices[0].message.content
    place = plain.find("= ")
    stopped = chat(client, stop=[plain[place : place + 4]]).choices[0]
    assert stopped.message.content == plain[:place] and stopped.finish_reason == "stop"
    assert stopped.stop_reason == plain[place : place + 4]
    pieces = [c.choices[0].delta.content or "" for c in chat(client, stop=[plain[place : place + 4]], stream=True)]
    assert "".join(pieces) == plain[:place]


def test_vllms_fields(client: openai.OpenAI) -> None:
    ids = chat(client, max_tokens=12, extra_body={"ignore_eos": True, "return_token_ids": True})
    assert len(ids.choices[0].token_ids) == 12 and len(ids.prompt_token_ids) == ids.usage.prompt_tokens
    scored = chat(client, extra_body={"prompt_logprobs": 1})
    assert scored.prompt_logprobs[0] is None and len(scored.prompt_logprobs) == scored.usage.prompt_tokens
    only = chat(client, extra_body={"structured_outputs": {"choice": ["yes", "no"]}})
    assert only.choices[0].message.content in ("yes", "no")


def test_a_malformed_request_is_refused_by_name(client: openai.OpenAI) -> None:
    cases: list[tuple[Json, str]] = [
        ({"temperature": "1"}, "temperature"), ({"n": 0}, "n"), ({"n": True}, "n"), ({"stream": 1}, "stream"),
        ({"audio": {}}, "audio"), ({"min_tokens": 3}, "min_tokens"), ({"top_logprobs": 1}, "top_logprobs"),
        ({"tool_choice": "required"}, "tool_choice"), ({"max_tokens": 10**30}, "max_tokens"),
        ({"logit_bias": {"a": 1}}, "logit_bias"), ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "a b c " * 3000}]}, "messages"),
        ({"tools": [{"type": "custom"}]}, "tools.0.type"), ({"cache_salt": "x"}, "cache_salt"),
    ]  # fmt: skip
    for values, param in cases:
        with pytest.raises(openai.BadRequestError) as caught:
            body = {"messages": QUESTION, "model": MODEL, **values}
            client.post("/chat/completions", body=body, cast_to=object)
        assert caught.value.param == param, values
        assert param.split(".")[0] in str(caught.value.message)
    assert client.post(
        "/chat/completions", cast_to=object, body={"messages": QUESTION, "model": MODEL, "n": 1.0, "stop": None}
    )
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="demo-chta", messages=QUESTION)  # type: ignore[arg-type] (plain dicts)
    assert missing.value.code == "model_not_found" and "demo-chat" in missing.value.message


def test_system_messages_and_parts(client: openai.OpenAI) -> None:
    messages = [
        {"role": "system", "content": "Be short."},
        {"role": "developer", "content": [{"type": "text", "text": "Now."}]},
        {"role": "user", "content": [{"type": "text", "text": "What is 2 + 3?",
                                      "prompt_cache_breakpoint": {"mode": "explicit", "ttl": "30m"}}]},
    ]  # fmt: skip
    assert chat(client, messages).choices[0].message.content


def test_calls_at_once_from_the_async_client(server: Server, gate: RecordingGate, chat_runner: Runner) -> None:
    async def ask(client: openai.AsyncOpenAI, number: int) -> str:
        stream = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": f"What is {number} times 41?"}],
            temperature=0, max_tokens=30, stream=True,
        )  # fmt: skip
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="a", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, number) for number in range(20, 32)))

    before = len(gate.outcomes)
    texts = run_async(all_of_them())
    until(lambda: len(gate.outcomes) == before + 12)
    for number, text in zip(range(20, 32), texts, strict=True):
        talk = Conversation(turns=[f"What is {number} times 41?"])
        alone = RunnerThread.attach(chat_runner).stream(talk, temperature=0, max_tokens=30)
        assert text == "".join(event.text for event in alone)
    assert all(outcome.ended == "finished" for _, outcome in gate.outcomes[before:])
