"""Calls and instructions of a history in a prompt: ids as the template takes them, names, later turns."""

from __future__ import annotations

import re
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.prompt import model_templates
from tests.prompt.apply import MODELS, NAMES
from tests.thorough import tries
from workbench.errors import WorkbenchError
from workbench.prompt.assemble import Prompt
from workbench.prompt.conversation import Conversation
from workbench.prompt.templates import ChatTemplate
from workbench.prompt.turns import ResultTurn, ToolCall
from workbench.serve.answers.answer_pieces import new_call_id

IDS = st.sampled_from(["", "call_1", "toolu_01A09q90", "abcdefghi", "AbC123xyz", "é", "x" * 200]) | st.text(max_size=12)
SHORT, LONG = (ChatTemplate(text, NAMES) for text in (model_templates.SHORT_IDS, model_templates.TOOLS_AS_JSON))


class Model:
    """A tokenizer of the tests with a template."""

    def __init__(self, template: ChatTemplate):
        self.tokenizer, self.chat_template = MODELS["tools_as_json"].tokenizer, template


def test_a_template_says_which_ids_it_takes_and_where_it_writes_calls() -> None:
    texts = (model_templates.NAMED, model_templates.LONG_IDS, model_templates.BARE, model_templates.NO_TOOLS)
    named, least, bare, none = (ChatTemplate(text, NAMES) for text in texts)
    habits = [tuple(each.call_habits()) for each in (SHORT, named, least, LONG, bare, none)]
    short, one = (True, False, False), (False, True, True)
    assert habits == [short, short, short, (False, False, False), one, (False, True, False)]
    assert [len(new_call_id(short)) for short in (True, False)] == [9, 29] and new_call_id(True).isalnum()


@settings(max_examples=tries(25), deadline=None)
@given(st.lists(st.lists(IDS, min_size=1, max_size=2, unique=True), min_size=1, max_size=2))
def test_any_history_is_rendered_with_ids_that_the_template_takes(rounds: list[list[str]]) -> None:
    """A call and its result have one id; one that fits stays, another is always mapped to the same."""
    talk = Conversation(turns=["q"])
    for ids in rounds:
        calls = [ToolCall(name="f", arguments={"n": n}, id=id) for n, id in enumerate(ids)]
        talk = talk.answer("", None, calls)
        for call in calls:
            talk = talk.result("r", call)
    text = talk.prompt(Model(SHORT)).text
    made, results = re.findall(r'"id": "([^"]*)"', text), re.findall(r'"call_id": "([^"]*)"', text)
    given = [id for ids in rounds for id in ids]
    assert made == results and all(re.fullmatch("[A-Za-z0-9]{9}", id) for id in made)
    for id, other in zip(given, made, strict=True):
        assert other == id or not re.fullmatch("[A-Za-z0-9]{9}", id)
        assert not id or {m for g, m in zip(given, made, strict=True) if g == id} == {other}
    assert talk.prompt(Model(SHORT)).text == text


@settings(max_examples=tries(25), deadline=None)
@given(st.lists(IDS, min_size=1, max_size=4, unique=True), st.randoms(use_true_random=False))
def test_several_calls_are_several_answers_where_the_template_takes_one(ids: list[str], random: Random) -> None:
    """Each call stands before its own result, in whatever order results came; the text is written once."""
    calls = [ToolCall(name="f", arguments={"n": n}, id=id) for n, id in enumerate(ids)]
    talk, mixed = Conversation(turns=["q"]).answer("so", None, calls), [*calls]
    random.shuffle(mixed)
    for call in calls if "" in ids else mixed:
        talk = talk.with_turn(ResultTurn(content=f"r{call.arguments['n']}", call_id=call.id))
    template = model_templates.BARE.replace("[0].function %}", "[0].function %}{{ m.content }}")
    text = talk.user("then").prompt(Model(ChatTemplate(template, NAMES))).text
    said = [each for pair in re.findall(r'"parameters": {"n": (\d)}|r(\d)<', text) for each in pair if each]
    assert said[::2] == said[1::2] and sorted(said[::2]) == [str(n) for n in range(len(ids))]
    assert text.count("so") == 1


def later(template: str, role: str, *after: dict[str, Any]) -> Prompt:
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    talk = Conversation.from_messages([*said, {"role": role, "content": "Be brief."}, *after])
    return talk.prompt(Model(ChatTemplate(template, NAMES)))


@pytest.mark.parametrize("role", ["system", "developer"])
@pytest.mark.parametrize("after", [[], [{"role": "user", "content": "c"}]])
def test_an_instruction_after_the_first_turn_is_read_where_the_template_shows_it(
    role: str, after: list[dict[str, Any]]
) -> None:
    for template in (model_templates.TOOLS_AS_JSON, model_templates.BARE, model_templates.IN_FUNCTION_TAGS):
        assert re.search("system\n+Be brief.<", later(template, role, *after).text)
    for template in (model_templates.FOLDED, model_templates.SHORT_IDS):
        with pytest.raises(WorkbenchError, match=r"refuses them .*no system message after the first turn"):
            later(template, role, *after)
    silent = "{% for m in messages if m.role != 'system' %}{{ m.role + m.content }}{% endfor %}"
    with pytest.raises(WorkbenchError, match="shows no system message after the first turn; say it in the system"):
        later(silent, role, *after)


def test_every_message_may_have_a_name() -> None:
    shown = ChatTemplate("{% for m in messages %}{{ m.role }}={{ m.name }};{% endfor %}", NAMES)
    messages = [
        {"role": role, "content": role, "name": name}
        for role, name in (("user", "anna"), ("assistant", "bot"), ("system", "ops"), ("user", "bob"))
    ]
    text = Conversation.from_messages(messages).prompt(Model(shown)).text
    assert text == "user=anna;assistant=bot;system=ops;user=bob;"
