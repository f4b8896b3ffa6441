"""Keys of kept answers: every field that may change an answer is in them, of calls and of the protocols' bodies."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.gateway.calls import BOB, Json, chat
from workbench.engine.runner import Runner
from workbench.gateway.answer_cache import NOT_IN_KEY, exact_key, passes_by, semantic_key
from workbench.prompt.conversation import Conversation
from workbench.request import CustomPart, SamplingParameters
from workbench.response_format import JSONSchema, Regex, Thinking
from workbench.serve.app import load_dialects
from workbench.serve.bodies.fields import IgnoredFields, read_body
from workbench.serve.call import Breakpoint, Call, Caller
from workbench.serve.served_model import ServedModel

IDS = ((1, 2, 3),)
TOOL = {"name": "look", "description": "", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}}
CALL_FIELDS: Json = {  # another value of every field
    "id": "another", "dialect": "openai.completions", "model": "other", "prompts": ("a text",),
    "sampling": SamplingParameters(temperature=0, max_tokens=3), "has_seed": True, "has_max_tokens": False,
    "tool_choice": "none",
    "parallel_tool_calls": False, "stream": True, "echo": True, "prompt_logprobs": 0,
    "breakpoints": (Breakpoint("system"),), "only_warms": True, "previous": "chatcmpl-1", "priority": 3,
    "background": True, "deadline": 9.0, "purpose": "embed", "caller": BOB, "ignored": {"user": "no account"},
    "notes": {"a": 1}, "options": {"include_usage": True},
}  # fmt: skip
SAMPLING_FIELDS: Json = {
    "temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "repetition_penalty": 1.5, "presence_penalty": 1.0,
    "frequency_penalty": 1.0, "logit_bias": {3: 1.0}, "filters": (CustomPart(path="a:B"),),
    "sampler": CustomPart(path="a:B"), "ranking": CustomPart(path="a:B"),
    "search": CustomPart(path="a:B"), "seed": 5, "n": 2, "best_of": 3, "beams": 2, "length_penalty": 0.5,
    "early_stopping": True, "stop": ("x",), "stop_token_ids": (3,), "max_tokens": 5, "ignore_eos": True, "logprobs": 0,
    "logprobs_of": "filtered", "prompt_logprobs": 0, "response_format": Regex(regex="a"),
    "constraint": CustomPart(path="a:B"), "thinking": Thinking(budget_tokens=3),
}  # fmt: skip
CONVERSATION_FIELDS: Json = {  # None: the ids differ
    "system": None, "documents": None, "turns": None,
    "tools": [TOOL], "template": "tool_use", "template_arguments": {"enable_thinking": False},
    "continues": True,
}  # fmt: skip


def keys(call: Call) -> tuple[str, str]:
    return exact_key(call, "demo@1", IDS), semantic_key(call, "demo@1")


@pytest.mark.parametrize("name", [each.name for each in dataclasses.fields(Call)])
def test_each_field_of_a_call_is_in_the_key_or_has_a_reason_not_to_be(name: str) -> None:
    call = chat("Hi")
    other = dataclasses.replace(call, **{name: CALL_FIELDS[name]})
    has_effect = name not in NOT_IN_KEY or name in ("prompts", "sampling", "caller")
    assert (keys(call)[0] != keys(other)[0]) == has_effect
    assert bool(passes_by(other)) == (name in ("breakpoints", "only_warms"))


@pytest.mark.parametrize("name", SamplingParameters.model_fields)
def test_each_sampling_parameter_is_in_the_key(name: str) -> None:
    call = dataclasses.replace(chat("Hi"), sampling=SamplingParameters())
    changed = call.sampling.model_copy(update={name: SAMPLING_FIELDS[name]})
    other = dataclasses.replace(call, sampling=changed)
    assert all(a != b for a, b in zip(keys(call), keys(other), strict=True))


@pytest.mark.parametrize("name", Conversation.model_fields)
def test_a_conversation_is_in_the_key_by_its_ids_and_all_else_by_itself(name: str) -> None:
    call = chat("Hi")
    (conversation,) = call.prompts
    assert isinstance(conversation, Conversation)
    if (value := CONVERSATION_FIELDS[name]) is None:
        assert exact_key(call, "", IDS) != exact_key(call, "", ((1, 2),))
        return
    other = dataclasses.replace(call, prompts=(Conversation(**{**dict(conversation), name: value}),))
    assert all(a != b for a, b in zip(keys(call), keys(other), strict=True))


def test_a_text_and_a_conversation_of_the_same_ids_are_two() -> None:
    call = chat("Hi")
    text, ids = (dataclasses.replace(call, prompts=(each,)) for each in ("<|user|>Hi", (1, 2, 3)))
    assert keys(call)[0] != keys(text)[0] == keys(ids)[0]


def test_the_order_of_a_schema_is_in_the_key() -> None:
    """The properties of an object are generated in the order of the schema."""
    one, other = (
        JSONSchema(json_schema={"type": "object", "properties": {name: {"type": "string"} for name in names}})
        for names in ("ab", "ba")
    )
    calls = [chat("Hi", sampling={"temperature": 0, "response_format": each}) for each in (one, other)]
    assert keys(calls[0])[0] != keys(calls[1])[0]


TOOLS = {
    "openai.chat": [{"type": "function", "function": TOOL}],
    "openai.responses": [{"type": "function", "name": "look", "parameters": TOOL["parameters"], "strict": False}],
    "anthropic.messages": [{"name": "look", "input_schema": TOOL["parameters"]}],
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
NO_EFFECT = None  # of a field that changes how an answer is written, or what it costs
FIRST: dict[str, Json] = {
    "openai.chat": {"messages": [{"role": "user", "content": "Hi"}]},
    "openai.completions": {"prompt": "Hi"},
    "openai.responses": {"input": "Hi"},
    "anthropic.messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4_096},
}


class In:
    """A value of a field, in a body that has other fields besides."""

    def __init__(self, value: Any, **others: Any):
        self.value, self.others = value, others


OPENAI: Json = {
    "n": 2, "temperature": 0.7, "top_p": 0.5, "frequency_penalty": 1, "presence_penalty": 1, "logit_bias": {"3": 1},
    "seed": In(2, temperature=0.5, seed=1), "stop": ["x"], "top_k": 3, "min_p": 0.1, "repetition_penalty": 1.5,
    "ignore_eos": True, "stop_token_ids": [3], "prompt_logprobs": 0, "structured_outputs": {"regex": "a+"},
    "max_tokens": 5, "model": NO_EFFECT, "stream": NO_EFFECT, "stream_options": NO_EFFECT,
    "return_token_ids": NO_EFFECT, "return_tokens_as_token_ids": NO_EFFECT, "priority": NO_EFFECT,
    "deadline": NO_EFFECT,
}  # fmt: skip
BODY_FIELDS: dict[str, Json] = {  # another value of every field of a body
    "openai.chat": OPENAI | {
        "messages": [{"role": "user", "content": "Ho"}], "max_completion_tokens": 5, "logprobs": True,
        "top_logprobs": In(2, logprobs=True), "tools": TOOLS["openai.chat"],
        "tool_choice": In("none", tools=TOOLS["openai.chat"]), "parallel_tool_calls": False,
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
        "reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False},
        "continue_final_message": True, "add_generation_prompt": NO_EFFECT,
    },
    "openai.completions": OPENAI | {"prompt": "Ho", "best_of": 3, "echo": True, "logprobs": 0},
    "openai.responses": {
        "input": "Ho", "instructions": "Rhyme.", "tools": TOOLS["openai.responses"],
        "tool_choice": In("required", tools=TOOLS["openai.responses"]), "parallel_tool_calls": False,
        "reasoning": {"effort": "low"}, "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}},
        "max_output_tokens": 5, "temperature": 0.7, "top_p": 0.5, "top_logprobs": 2,
        "include": ["message.output_text.logprobs"], "previous_response_id": NO_EFFECT, "stream": NO_EFFECT,
        "stream_options": NO_EFFECT, "store": NO_EFFECT, "metadata": NO_EFFECT, "model": NO_EFFECT,
        "prompt_cache_options": NO_EFFECT,
    },
    "anthropic.messages": {
        "messages": [{"role": "user", "content": "Ho"}], "system": "Rhyme.", "tools": TOOLS["anthropic.messages"],
        "tool_choice": In({"type": "any"}, tools=TOOLS["anthropic.messages"]),
        "thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 5, "stop_sequences": ["x"],
        "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}, "temperature": 0.7, "top_p": 0.5,
        "top_k": 3, "cache_control": NO_EFFECT, "stream": NO_EFFECT, "metadata": NO_EFFECT, "model": NO_EFFECT,
        "diagnostics": NO_EFFECT, "context_management": NO_EFFECT,
    },
}  # fmt: skip


OTHER_PURPOSES = {"openai.embeddings", "vllm.tokenize", "vllm.detokenize"}  # no answer of theirs is kept
DIALECTS = {name: each for name, each in load_dialects().items() if name not in OTHER_PURPOSES}


@pytest.mark.parametrize(
    ("dialect", "field"), [(name, field) for name, each in DIALECTS.items() for field in each.body.model_fields]
)
def test_each_field_of_a_body_is_in_the_key_or_listed_as_of_no_effect(
    chat_runner: Runner, dialect: str, field: str
) -> None:
    """A field that is added later fails here until it is listed: its key is seen to change, or it has no effect."""
    value = BODY_FIELDS[dialect][field]
    if value is NO_EFFECT:
        return
    model, spoken = ServedModel("demo-chat", chat_runner), load_dialects()[dialect]
    given = value if isinstance(value, In) else In(value)
    first = FIRST[dialect] | {"model": model.name, "temperature": 0} | given.others

    def key(body: Json) -> str:
        call = spoken.parse(*_read(spoken.body, body, model), Caller())
        ids = [each.request.prompt_ids for each in model.prepare(call)]
        return exact_key(call, model.fingerprint, ids)

    assert key(first) == key(dict(first)) != key(first | {field: given.value})


def _read(kind: Any, body: Json, model: ServedModel) -> tuple[Any, ServedModel, IgnoredFields]:
    read, ignored = read_body(kind, body)
    return read, model, ignored


def test_a_seed_is_the_clients_in_the_protocols_that_have_one(chat_runner: Runner) -> None:
    model = ServedModel("demo-chat", chat_runner)
    for name, spoken in DIALECTS.items():
        body = FIRST[name] | {"model": model.name, "temperature": 0.5}
        assert not spoken.parse(*_read(spoken.body, body, model), Caller()).is_seeded
        assert spoken.parse(*_read(spoken.body, body | {"temperature": 0}, model), Caller()).is_seeded
        if "seed" in spoken.body.model_fields:
            assert spoken.parse(*_read(spoken.body, body | {"seed": 0}, model), Caller()).is_seeded
