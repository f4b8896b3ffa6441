"""Prompts are those of `transformers.apply_chat_template`, id by id; control tokens in any text are text."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.prompt import apply, model_templates
from tests.prompt.apply import FORGED, TEMPLATES
from tests.thorough import tries
from workbench.errors import WorkbenchError
from workbench.prompt.templates import ChatTemplate

NOON = SimpleNamespace(now=lambda: datetime(2024, 2, 29, 12))


@pytest.fixture(autouse=True, scope="module")
def noon() -> Iterator[None]:
    """Stop both clocks: no midnight falls between a prompt of ours and theirs."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("workbench.prompt.templates", "transformers.utils.chat_template_utils"):
            patch.setattr(f"{module}.datetime", NOON)
        yield


def split(given: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the messages, and the arguments of `render`."""
    known = {name: given[name] for name in ("tools", "documents") if name in given}
    rest = {name: value for name, value in given.items() if name not in ("conversation", *known)}
    return given["conversation"], {**known, "arguments": rest}


def theirs(kind: str, name: str, given: dict[str, Any], **options: Any) -> Any:
    """Return what transformers makes of it; None where the template refuses."""
    options = {"add_generation_prompt": True, "return_dict": False, **options}
    try:
        return apply.theirs(kind).apply_chat_template(chat_template=model_templates.ALL[name], **given, **options)
    except Exception:  # a template can raise whatever Python can
        return None


@settings(max_examples=tries(160), deadline=None)
@given(given=apply.conversations(), kind=st.sampled_from(list(apply.KINDS)), begun=st.booleans())
@pytest.mark.parametrize("name", model_templates.ALL)
def test_ids_are_those_of_transformers(name: str, given: dict[str, Any], kind: str, begun: bool) -> None:
    expected = theirs(kind, name, given, add_generation_prompt=begun)
    messages, options = split(given)
    if expected is None:
        with pytest.raises(WorkbenchError, match="the chat template refuses them"):
            TEMPLATES[name].render(messages, add_generation_prompt=begun, **options)
        return
    text = TEMPLATES[name].render(messages, add_generation_prompt=begun, **options)
    assert text == theirs(kind, name, given, add_generation_prompt=begun, tokenize=False)
    assert [token.id for token in TEMPLATES[name].encode(text, apply.ours(kind))] == expected


@settings(max_examples=tries(80), deadline=None)
@given(given=apply.conversations(), kind=st.sampled_from(list(apply.KINDS)), last=apply.TEXTS)
@pytest.mark.parametrize("name", model_templates.ALL)
def test_a_last_message_is_continued_as_by_transformers(name: str, given: dict[str, Any], kind: str, last: str) -> None:
    given["conversation"] = [*given["conversation"][:2], {"role": "assistant", "content": last}]
    expected = theirs(kind, name, given, add_generation_prompt=False, continue_final_message=True)
    messages, options = split(given)
    if expected is None:
        with pytest.raises(WorkbenchError):
            TEMPLATES[name].render(messages, add_generation_prompt=False, continue_final_message=True, **options)
        return
    text = TEMPLATES[name].render(messages, add_generation_prompt=False, continue_final_message=True, **options)
    assert [token.id for token in TEMPLATES[name].encode(text, apply.ours(kind))] == expected


@settings(max_examples=tries(60), deadline=None)
@given(given=apply.conversations())
def test_what_is_generated_is_marked_as_by_transformers(given: dict[str, Any]) -> None:
    options = {"add_generation_prompt": False, "return_dict": True, "return_assistant_tokens_mask": True}
    expected = theirs("bpe", "thought_kept", given, **options)["assistant_masks"]
    messages, options = split(given)
    text = TEMPLATES["thought_kept"].render(messages, add_generation_prompt=False, **options)
    marked = [origin.generated for length, origin in text._runs for _ in range(length)]
    tokens = TEMPLATES["thought_kept"].encode(text, apply.ours("bpe"))
    assert [int(any(marked[token.first : token.last])) for token in tokens] == expected


def test_the_date_is_this_moments_or_the_one_given() -> None:
    messages = [{"role": "user", "content": "hi"}]
    assert "29 Feb 2024" in TEMPLATES["dated"].render(messages)
    assert "01 Feb 2003" in TEMPLATES["dated"].render(messages, now=datetime(2003, 2, 1))


def forging(control: str) -> dict[str, Any]:
    """A conversation that spells a control token in every field that there is."""
    call = {
        "type": "function",
        "id": control,
        "function": {"name": control, "arguments": {control: [control, {control: control}]}},
    }
    return {
        "conversation": [
            {"role": "system", "content": control},
            {"role": "user", "content": f"a{control}b", "name": control},
            {"role": "assistant", "content": control, "reasoning_content": control, "tool_calls": [call]},
            {"role": "tool", "content": control, "name": control, "tool_call_id": control},
            {"role": "assistant", "content": [{"type": "text", "text": control}]},
            {"role": "user", "content": control},
        ],
        "tools": [
            {
                "type": "function",
                "function": {"name": control, "description": control, "parameters": {control: control}},
            }
        ],
        "documents": [{"title": control, "text": control}],
        "date_string": control,
    }


@pytest.mark.parametrize("kind", apply.KINDS)
@pytest.mark.parametrize("name", model_templates.ALL)
def test_every_control_token_is_text_in_every_field(name: str, kind: str) -> None:
    """As many control tokens as with a harmless word in its place, the same ones, and every character is there."""
    tokenizer, template = apply.ours(kind), TEMPLATES[name]
    written = {tokenizer.added_token_ids[each] for each in apply.WRITTEN if each in template.text}

    def controls(word: str) -> list[int] | None:
        messages, options = split(forging(word))
        if name == "folded":  # roles alternate there
            messages = [messages[1], messages[4], messages[5]]
        elif name == "tools_as_json":
            messages[4] = {"role": "assistant", "content": word}
        text = template.render(messages, **options)
        ids = [token.id for token in template.encode(text, tokenizer)]
        if kind == "bpe":
            assert tokenizer.decode(ids, special=True) == text
        return [id for id in ids if tokenizer.is_special(id) and id != tokenizer.unknown_id or id in written]

    for control in FORGED:
        expected = controls("zz")
        if name == "thought_dropped" and control == "</think>":  # the template cuts a content there
            assert set(controls(control) or ()) == set(expected or ())
        else:
            assert controls(control) == expected, control


def test_several_templates_by_name() -> None:
    texts = {
        "default": "{{ messages[0].content }}",
        "tool_use": "T{{ tools|length }}",
        "rag": "R{{ documents[0].text }}",
    }
    template, messages = ChatTemplate(texts, {}), [{"role": "user", "content": "hi"}]
    assert template.render(messages) == "hi" and template.render(messages, tools=[{}]) == "T1"
    assert template.render(messages, template="rag", documents=[{"text": "x"}]) == "Rx"
    with pytest.raises(
        WorkbenchError, match="no chat template is named 'rak'; did you mean 'rag'.; it has default, tool"
    ):
        template.render(messages, template="rak")
    with pytest.raises(WorkbenchError, match="no chat template is named 'default'"):
        ChatTemplate({"rag": "x"}, {}).render(messages)
