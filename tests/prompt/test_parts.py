"""Texts in parts: the prompt of a text is the same however it is cut, and nothing of it is lost."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.prompt import apply, chats, model_templates
from tests.prompt.samples import byte_level
from tests.prompt.test_apply_chat_template import FORGED
from tests.prompt.test_conversation import MODELS, OWN, Model
from tests.thorough import tries
from workbench.errors import WorkbenchError
from workbench.prompt.conversation import Conversation
from workbench.prompt.templates import ChatTemplate

ALONE = ChatTemplate(model_templates.PARTS_ALONE, apply.NAMES)
READERS = {
    **MODELS,
    **{name: Model(chats.tokenizer(), ChatTemplate(each.text, apply.NAMES)) for name, each in chats.TEMPLATES.items()},
    "parts_alone": Model(apply.ours("bpe"), ALONE),
    "as_data": Model(byte_level(), ChatTemplate("{% for m in messages %}{{ m.content | tojson }}{% endfor %}", {})),
}
ROLES = ("system", "developer", "user", "assistant", "tool")
NOT_SHOWN = {
    ("folded", "tool"): "roles must alternate",
    ("keys", "every role"): "it shows no content",
}  # what templates do to a whole text too


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


def outcome(model: Model, role: str, content: Any) -> tuple[int, ...] | str:
    """The ids of the prompt, or why it is refused."""
    try:
        return Conversation.from_messages(messages(role, content)).prompt(model).ids
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
    expected = outcome(model, role, whole)
    assert outcome(model, role, [{"type": "text", "text": each} for each in parts]) == expected
    assert outcome(model, role, [{"type": "text", "text": whole}]) == expected
    assert "Traced" not in str(expected)
    if role == "system" and not isinstance(expected, str):
        assert Conversation(system=parts, turns=["q"]).prompt(model).ids == expected
    if role == "user" and not isinstance(expected, str):
        assert Conversation().user(tuple(parts)).prompt(model).ids == expected  # type: ignore[arg-type] (it is joined)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("name", READERS)
def test_every_part_is_read(name: str, role: str) -> None:
    """In the prompt's tokens; also where a template reads strings alone, or parts alone."""
    talk = Conversation.from_messages(messages(role, [{"type": "text", "text": each} for each in ("one ", "two")]))
    if (name, "every role") in NOT_SHOWN:
        return
    if why := NOT_SHOWN.get((name, role)):
        with pytest.raises(WorkbenchError, match=why):
            talk.prompt(READERS[name])
        return
    prompt = talk.prompt(READERS[name])
    assert "one two" in prompt.text and "one two" in prompt.decode(prompt.ids)


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
    for text in ("{{ messages[0].content + 3 }}", "{{ messages[0].content.nope.nope }}"):
        with pytest.raises(WorkbenchError, match=r"the chat template refuses them \(.*'str( object)?'"):
            Conversation(turns=["a"]).prompt(Model(OWN.tokenizer, ChatTemplate(text, {})))
