"""Tools for templates that show none: listed before the model, called as JSON, answered as a user; else left alone."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.prompt import apply, model_templates
from tests.prompt.apply import FORGED, NAMES, ours
from tests.thorough import tries
from workbench.prompt.answers import AnswerFormat, parse_answer
from workbench.prompt.conversation import Conversation
from workbench.prompt.default_tools import NOTE, Gaps
from workbench.prompt.templates import ChatTemplate
from workbench.prompt.tools import Tool, declare_all
from workbench.prompt.turns import ToolCall

SILENT = "{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.role }}:{{ m.content }}<|im_end|>{% endfor %}"
STRICT = (
    "{% if tools %}{{ raise_exception('no tools') }}{% endif %}{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('in turns') }}{% endif %}"
    "<|im_start|>{{ m.role }}:{{ m.content }}<|im_end|>{% endfor %}"
)
BEGUN = "{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
FILLED = {
    "no_tools": model_templates.NO_TOOLS, "folded": model_templates.FOLDED, "parts": model_templates.PARTS_ALONE,
    "silent": SILENT + BEGUN, "strict": STRICT + BEGUN,
}  # fmt: skip
SHOWN = {name: model_templates.ALL[name] for name in ("tools_as_json", "dated")} | {"bare": model_templates.BARE}
TEMPLATES = {name: ChatTemplate(text, NAMES) for name, text in (FILLED | SHOWN).items()}
TEXTS = apply.TEXTS | st.sampled_from(FORGED)
CALLS = st.builds(
    lambda name, arguments: ToolCall(name=name, arguments=arguments),
    apply.WORDS.filter(str.isascii), st.dictionaries(apply.WORDS, apply.VALUES | st.sampled_from(FORGED), max_size=2),
)  # fmt: skip


def model(name: str) -> apply.Model:
    return apply.Model(ours("bpe"), TEMPLATES[name])


def tools_for(calls: list[ToolCall], words: str = "Does it.") -> tuple[Tool, ...]:
    names = dict.fromkeys(["find", *(call.name for call in calls)])
    schema = {"type": "object", "properties": {"x": {"type": "string", "description": words}}}
    return declare_all({"name": name, "description": words, "parameters": schema} for name in names)


def test_what_a_template_lacks_is_found_by_trying() -> None:
    lacks = {name: TEMPLATES[name].gaps() for name in TEMPLATES}
    assert lacks == dict.fromkeys(SHOWN, Gaps()) | {
        "no_tools": Gaps(True, True, True), "folded": Gaps(True, True, True), "silent": Gaps(True, True, True, True),
        "strict": Gaps(True, True, True, True), "parts": Gaps(True, False, False),
    }  # fmt: skip
    by_name = ChatTemplate({"default": model_templates.NO_TOOLS, "tool_use": model_templates.TOOLS_AS_JSON}, NAMES)
    asked = Conversation(tools=tools_for([]), turns=["q"]).prompt(apply.Model(ours("bpe"), by_name))
    assert "<tools>" in asked.text and asked.notes == ()


@settings(max_examples=tries(12), deadline=None)
@given(calls=st.lists(CALLS, max_size=3), words=TEXTS, system=st.none() | st.just("Be brief."), asks=TEXTS)
@pytest.mark.parametrize("name", FILLED)
def test_every_tool_stands_before_the_model(
    name: str, calls: list[ToolCall], words: str, system: str | None, asks: str
) -> None:
    """A control token that a tool spells is written as text."""
    tools = tools_for(calls, words)
    plain = Conversation(system=system if name != "strict" else None, turns=[asks])
    asked = plain.model_copy(update={"tools": tools}).prompt(model(name))
    for tool in tools:
        assert json.dumps(tool.declaration()["function"], ensure_ascii=False) in asked.text
        example = json.dumps({"name": tool.name, "arguments": {}})
        assert ("as here:\n" in asked.text and example in asked.text) == TEMPLATES[name].gaps().calls
    assert asked.notes == (NOTE,) and NOTE in (asked.explain().note or "")
    listed = tools_for(calls, "")
    assert _controls(asked.ids) == _controls(plain.model_copy(update={"tools": listed}).prompt(model(name)).ids)
    messages = plain.messages()
    assert plain.prompt(model(name)).text == TEMPLATES[name].render(messages)  # without tools nothing is added


def _controls(ids: tuple[int, ...]) -> list[int]:
    return [id for id in ids if ours("bpe").is_special(id)]


@settings(max_examples=tries(20), deadline=None)
@given(calls=st.lists(CALLS, min_size=1, max_size=3), results=st.lists(TEXTS, min_size=3, max_size=3), then=TEXTS)
@pytest.mark.parametrize("name", [name for name in FILLED if name != "parts"])
def test_calls_are_read_as_they_are_written_and_results_are_shown(
    name: str, calls: list[ToolCall], results: list[str], then: str
) -> None:
    on = model(name)
    assert on.tokenizer is not None and on.chat_template is not None
    talk = Conversation(tools=tools_for(calls), turns=["q"])
    called = talk.answer(tool_calls=calls)
    before, after = talk.prompt(on), called.prompt(on, add_generation_prompt=False)
    assert after.ids[: len(before.ids)] == before.ids
    said = [id for id in after.ids[len(before.ids) :] if id not in before.end_token_ids]
    format = AnswerFormat.from_template(on.chat_template, on.tokenizer, None, talk.tools)
    turn = parse_answer(said, on.tokenizer, format, before=before.ids)
    assert [(each.name, each.arguments) for each in turn.tool_calls] == [(c.name, c.arguments) for c in calls]
    for call, result in zip(calls, results, strict=False):
        called = called.result(result, call)
    for longer in (called, called.user(then), called.answer(then).user("more")):
        text = longer.prompt(on).text
        shown = [f"{c.name} returned: {result}".rstrip() for c, result in zip(calls, results, strict=False)]
        assert all(each in text for each in shown)
        joins = longer.turns[-1].role == "user" and longer.turns[-2].role == "tool"
        assert ("\nAnswer my question" in text) != joins


@pytest.mark.parametrize("name", SHOWN)
def test_a_template_that_shows_tools_is_left_to_itself(name: str) -> None:
    tools = tools_for([])
    talk = Conversation(tools=tools, turns=["q"]).answer(tool_calls=[ToolCall(name="find", arguments={"x": "1"})])
    talk = talk.result("1", talk.unanswered_calls[0])
    own = TEMPLATES[name].render(talk.messages(), tools=[each.declaration() for each in tools])
    assert (talk.prompt(model(name)).text, talk.prompt(model(name)).notes) == (own, ())


KINDS = {"s": {"type": "string"}, "n": {"type": "integer"}, "e": {"enum": ["day"]}, "l": {"type": ["array"]}, "t": True}
SCHEMAS: list[tuple[Any, str]] = [
    ({}, "{}"), ({"properties": [1], "required": ["x", 1, None]}, '{"x": "..."}'),
    ({"properties": KINDS, "required": [*KINDS]}, '{"s": "...", "n": 0, "e": "day", "l": "...", "t": "..."}'),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "expected"), SCHEMAS)
def test_an_example_has_the_required_arguments(schema: Any, expected: str) -> None:
    tools = declare_all([{"name": "f", "parameters": {"type": "object", **schema}}])
    text = Conversation(tools=tools, turns=["q"]).prompt(model("no_tools")).text
    assert f'as here:\n{{"name": "f", "arguments": {expected}}}\n' in text
