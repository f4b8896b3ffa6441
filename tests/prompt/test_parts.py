"""Texts in parts: the prompt of a text is the same however it is cut, and nothing of it is lost."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.prompt import apply, chats, model_templates
from tests.prompt.apply import FORGED, MODELS, OWN, Model
from tests.prompt.samples import byte_level
from tests.thorough import tries
from workbench.errors import WorkbenchError
from workbench.prompt.conversation import Conversation
from workbench.prompt.template_bounds import BASE_STEPS, STEPS_PER_TURN
from workbench.prompt.templates import ChatTemplate

ALONE = ChatTemplate(model_templates.PARTS_ALONE, apply.NAMES)
READERS = {
    **MODELS,
    **{name: Model(chats.tokenizer(), ChatTemplate(each.text, apply.NAMES)) for name, each in chats.TEMPLATES.items()},
    "parts_alone": Model(apply.ours("bpe"), ALONE),
    **{
        name: Model(apply.ours("bpe"), ChatTemplate(text, apply.NAMES))
        for name, text in model_templates.PARTS_WHERE.items()
    },
    "as_data": Model(byte_level(), ChatTemplate("{% for m in messages %}{{ m.content | tojson }}{% endfor %}", {})),
}
ROLES = ("system", "developer", "user", "assistant", "tool")
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
OPTIONS: dict[str, dict[str, Any]] = {
    "with_tools": {"tools": [TOOL]}, "by_argument": {"template_arguments": {"as_parts": True}},
}  # fmt: skip
NOT_SHOWN = {("keys", "every role"): "it shows no content"}  # what templates do to a whole text too


def messages(role: str, content: Any) -> list[dict[str, Any]]:
    """A conversation in which a message of this role has this content."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    talk: list[dict[str, Any]] = {
        "system": [{}, {"role": "user", "content": "q"}],
        "developer": [{}, {"role": "user", "content": "q"}],
        "user": [{}],
        "assistant": [{"role": "user", "content": "q"}, {}, {"role": "user", "content": "r"}],
        "tool": [
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"tool_call_id": "c"},
        ],
    }[role]
    return [each if "role" in each else {**each, "role": role, "content": content} for each in talk]


def outcome(name: str, role: str, content: Any) -> tuple[int, ...] | str:
    """The ids of the prompt, or why it is refused."""
    try:
        talk = Conversation.from_messages(messages(role, content), **OPTIONS.get(name, {}))
        return talk.prompt(READERS[name]).ids
    except WorkbenchError as error:
        return str(error)


@st.composite
def cut(draw: st.DrawFn) -> list[str]:
    """The parts of a text: some are empty, some hold half of a control token or of a tokenizer's word."""
    text = draw(st.lists(apply.TEXTS | st.sampled_from(FORGED), max_size=3).map("".join))
    places = [0, *sorted(draw(st.lists(st.integers(0, len(text)), max_size=3))), len(text)]
    return [text[first:last] for first, last in zip(places, places[1:], strict=False)]


@settings(max_examples=tries(40), deadline=None)
@given(parts=cut(), role=st.sampled_from(ROLES))
@pytest.mark.parametrize("name", READERS)
def test_the_ids_are_those_of_the_whole_text_however_it_is_cut(name: str, parts: list[str], role: str) -> None:
    model, whole = READERS[name], "".join(parts)
    expected = outcome(name, role, whole)
    assert outcome(name, role, [{"type": "text", "text": each} for each in parts]) == expected
    assert outcome(name, role, [{"type": "text", "text": whole}]) == expected
    assert "Traced" not in str(expected)
    if role == "system" and not isinstance(expected, str):
        assert Conversation(system=parts, turns=["q"], **OPTIONS.get(name, {})).prompt(model).ids == expected
    if role == "user" and not isinstance(expected, str):
        talk = Conversation(**OPTIONS.get(name, {}))
        assert talk.user(tuple(parts)).prompt(model).ids == expected  # type: ignore[arg-type] (it is joined)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("name", READERS)
def test_every_part_is_read(name: str, role: str) -> None:
    """In the prompt's tokens; also where a template reads strings alone, or parts alone."""
    parts = [{"type": "text", "text": each} for each in ("one ", "two")]
    talk = Conversation.from_messages(messages(role, parts), **OPTIONS.get(name, {}))
    if (name, "every role") in NOT_SHOWN:
        return
    if why := NOT_SHOWN.get((name, role)):
        with pytest.raises(WorkbenchError, match=why):
            talk.prompt(READERS[name])
        return
    prompt = talk.prompt(READERS[name])
    assert "one two" in prompt.text and "one two" in prompt.decode(prompt.ids)


@pytest.mark.parametrize("has_system", [True, False])
@pytest.mark.parametrize("name", ["parts_alone", *model_templates.PARTS_WHERE])
def test_all_that_is_said_is_read_in_a_talk_of_all_roles(name: str, has_system: bool) -> None:
    talk = [
        *[{"role": "system", "content": "be brief"}] * has_system,
        {"role": "user", "content": "first words"},
        *messages("tool", "what it returned")[1:],
        {"role": "assistant", "content": "an answer"},
        {"role": "user", "content": "another question"},
    ]
    text = Conversation.from_messages(talk, **OPTIONS.get(name, {})).prompt(READERS[name]).text
    assert all(each.get("content", "") in text for each in talk) and "'type'" not in text


def rendered(text: str, *contents: str, **options: Any) -> str:
    talk = [{"role": "assistant" if n % 2 else "user", "content": each} for n, each in enumerate(contents)]
    return str.__str__(ChatTemplate(text, {}).render(talk, **options))


def test_what_a_template_shows_in_neither_form_stays_a_text() -> None:
    """Whatever it does to the others. A part is never shown as data."""
    cut = "{% for m in messages %}{% if '</t>' in m.content %}[{{ m.content.split('</t>')[-1] }}]{% else %}"
    assert rendered(cut + "{{ m.content }}{% endif %}{% endfor %}", "one", "a thought</t>") == "one[]"
    assert rendered(cut + "{{ m.content | tojson }}{% endif %}{% endfor %}", "one", "a thought</t>") == '"one"[]'
    users = "{% if m.role == 'user' %}{% for c in m.content %}{{ c.text }}{% endfor %}{% else %}{{ m.content }}"
    assert rendered(cut + users + "{% endif %}{% endif %}{% endfor %}", "one", "a thought</t>") == "one[]"
    ignored = "{% for m in messages %}{{ '.' if m.content is string else '!' }}{% endfor %}"
    assert rendered(ignored, "one", "two") == ".."


def test_a_templates_refusal_of_a_text_stays_one() -> None:
    refusing = "{% for m in messages %}{% if m.content is string and 'x' in m.content %}{{ raise_exception('no x') }}"
    for shown in ("{{ m.content }}", "{{ m.content | tojson }}", "{{ m.content if m.content is string }}"):
        with pytest.raises(WorkbenchError, match="no x"):
            rendered(refusing + "{% endif %}" + shown + "{% endfor %}", "one", "x")


def test_both_renderings_have_one_bound() -> None:
    """A text is not lost because the second is too expensive: the messages are refused."""

    def busy(turns: int) -> ChatTemplate:
        loop = f"{{% for n in range({turns}) %}}{{% endfor %}}"
        return ChatTemplate(loop + "{% for c in messages[0].content %}{{ c.text }}{% endfor %}", {})

    turns = BASE_STEPS // STEPS_PER_TURN
    assert busy(turns * 9 // 10).render([{"role": "user", "content": [{"type": "text", "text": "one"}]}]) == "one"
    assert busy(turns * 4 // 10).render([{"role": "user", "content": "one"}]) == "one"
    with pytest.raises(WorkbenchError, match="it does more than messages of this length can need"):
        busy(turns * 9 // 10).render([{"role": "user", "content": "one"}])


def test_a_first_part_alone_is_continued() -> None:
    template = model_templates.PARTS_WHERE["first_part"]
    for begun in ("It is", ""):
        text = rendered(template, "one", begun, add_generation_prompt=False, continue_final_message=True)
        assert text == "<user>one<assistant>" + begun


def test_answers_are_kept_and_continued_where_a_template_reads_parts_alone() -> None:
    model, tokenizer = READERS["parts_alone"], apply.ours("bpe")
    before = Conversation(system="S", turns=["hi"])
    ids = tuple(tokenizer.encode("h") + tokenizer.encode("i<|im_end|>", special=True))
    prompt = before.answer("hi", generated_ids=ids).user("more").prompt(model)
    assert prompt.answers == {1: "kept"} and prompt.divergence(before.prompt(model)) is None
    assert [each.turn for each in prompt.segments if each.turn is not None] == [0, 1, 2]
    begun = before.answer("It is").prompt(model, continue_final_message=True)
    assert begun.text.endswith("assistant:It is") and begun.end_token_ids == prompt.end_token_ids != ()


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant"])
def test_a_batch_reads_as_much_as_a_conversation(role: str) -> None:
    """Messages without a `Conversation`, as the lines of a batch have them."""
    talk, tokenizer = messages(role, "one two"), apply.ours("bpe")
    assert "one two" in tokenizer.decode(ALONE.ids(talk, tokenizer))


def test_a_template_that_joins_a_text_to_something_else_is_refused_in_its_authors_words() -> None:
    """The names of classes here say nothing to who wrote the template, or the request."""
    for text, words in {
        "{{ messages[0].content + 3 }}": "'str'",
        "{{ messages[0].content.nope.nope }}": "'str object' has no attribute",
        "{{ messages[0].content[9].nope }}": "str object has no element 9",
    }.items():
        with pytest.raises(WorkbenchError, match=rf"the chat template refuses them \(.*{words}"):
            Conversation(turns=["a"]).prompt(Model(OWN.tokenizer, ChatTemplate(text, {})))


def test_no_parts_beside_calls_are_no_text() -> None:
    """As where the content is null; an answer needs one of them."""
    talk = messages("tool", "r")
    said = [Conversation.from_messages([talk[0], {**talk[1], "content": each}, talk[2]]) for each in ([], None, "")]
    assert said[0] == said[1] == said[2]
    with pytest.raises(WorkbenchError, match=r"messages\.1\.content: must be a text"):
        Conversation.from_messages([talk[0], {"role": "assistant", "content": []}])
