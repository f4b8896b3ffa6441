"""Calls in the forms that models' own templates write: read back as they were made, whole and in pieces, and admitted
by the grammar of the form."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

import workbench
from experiments import demo_tokenizer
from tests.engine.tiny import layer, model_of, runner_of
from tests.prompt import model_templates
from tests.thorough import tries
from workbench.agents.call_format import CallFormat
from workbench.agents.choice import answer_grammar
from workbench.engine.runner import Runner
from workbench.errors import WorkbenchError
from workbench.model.spec import ModelSpec
from workbench.prompt.answers import AnswerFormat, parse_answer, parse_calls
from workbench.prompt.conversation import Conversation
from workbench.prompt.templates import ChatTemplate
from workbench.prompt.tokenization.tokenizer import Tokenizer
from workbench.prompt.tools import Tool, declare
from workbench.prompt.turns import AssistantTurn, ToolCall
from workbench.request import Request, SamplingParameters
from workbench.sampling.grammar import Grammar, GrammarVocabulary
from workbench.serve.answers.answer_pieces import AnswerPieces
from workbench.serve.answers.pieces import Ended, Text, ToolArguments, ToolCallBegun
from workbench.serve.call import Call
from workbench.serve.served_model import PreparedPrompt
from workbench.trace.events import Decoded, Event, Finished

CONTROLS = (
    "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[INST]", "[/INST]", "</s>",
    "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "<|python_tag|>",
)  # fmt: skip
NAMES = {"bos_token": "", "eos_token": "</s>"}
TEMPLATES = {
    "Qwen 2.5": model_templates.TOOLS_AS_JSON, "Qwen3-Coder": model_templates.IN_FUNCTION_TAGS,
    "GLM": model_templates.IN_KEY_TAGS, "Llama 3": model_templates.BARE, "Mistral": model_templates.SHORT_IDS,
    "Mistral, named": model_templates.NAMED,
}  # fmt: skip
PROPERTIES = {
    "s": {"type": "string"}, "n": {"type": "integer"}, "b": {"type": "boolean"}, "l": {"type": "array"},
    "o": {"type": ["object", "null"]}, "e": {"enum": ["a b", "</c>"]},
}  # fmt: skip
TOOLS = tuple(
    declare({"name": name, "parameters": {"type": "object", "properties": PROPERTIES}}) for name in ("f", "g-2.x")
)
WORDS = st.text(st.sampled_from("aé1 \n<>/{}\"'\\="), max_size=8) | st.sampled_from(["3", "true", "null", "None", "{}"])
VALUES = {
    "s": WORDS, "n": st.integers(-99, 99), "b": st.booleans(), "l": st.lists(WORDS | st.integers(0, 9), max_size=2),
    "o": st.none() | st.dictionaries(st.sampled_from("xy"), WORDS, max_size=1), "e": st.sampled_from(["a b", "</c>"]),
}  # fmt: skip
CALLS = st.lists(
    st.builds(
        lambda name, values, kept: ToolCall(name=name, arguments={k: values[k] for k in PROPERTIES if k in kept}),
        st.sampled_from([tool.name for tool in TOOLS]), st.fixed_dictionaries(VALUES),
        st.sets(st.sampled_from("snbloe")),
    ),
    min_size=1, max_size=2,
)  # fmt: skip


@cache
def tokenizer() -> Tokenizer:
    inner: tokenizers.Tokenizer = demo_tokenizer.bytes_only()
    inner.add_special_tokens([AddedToken(each, normalized=False) for each in CONTROLS])
    return Tokenizer(inner)


@cache
def model() -> Any:
    spec = ModelSpec(
        name="tiny", vocab_size=tokenizer().vocab_size, hidden_size=8, layers=(layer(),), tie_word_embeddings=True,
        max_position_embeddings=4096, eos_token_ids=(1,),
    )  # fmt: skip
    return model_of(spec)


@cache
def runner(name: str) -> Runner:
    made = runner_of(model(), tokenizer=tokenizer(), prefix="radix", pages=600, max_num_batched_tokens=512)
    made.loaded_model.__dict__["chat_template"] = ChatTemplate(TEMPLATES[name], NAMES, "test")
    return made


def format_of(name: str, tools: tuple[Tool, ...] = TOOLS) -> AnswerFormat:
    template = runner(name).chat_template
    assert template is not None
    return AnswerFormat.from_template(template, tokenizer(), None, tools)


def written(name: str, calls: list[ToolCall], content: str = "") -> list[int]:
    """Return the tokens of an answer as the template writes it, without what ends it."""
    asked = Conversation(turns=["q"], tools=TOOLS)
    whole = asked.answer(content, None, calls).prompt(runner(name), add_generation_prompt=False)
    ids = list(whole.ids[len(asked.prompt(runner(name)).ids) :])
    return ids[: next(n for n, id in enumerate([*ids, *whole.end_token_ids]) if id in whole.end_token_ids)]


def pieces_of(name: str, ids: list[int], sizes: list[int], format: AnswerFormat | None = None) -> tuple[str, list[Any]]:
    """Return the text and the calls (name, arguments, id) that a client is shown of an answer's tokens."""
    call = Call("c", "openai.chat", "m", ((1,),), SamplingParameters())
    reader = AnswerPieces(call, [PreparedPrompt(Request("c", (1,)), format or format_of(name))], tokenizer())
    events: list[Event] = [Decoded(0.0, "c", token_id=id, index=n) for n, id in enumerate(ids)]
    events.append(Finished(0.0, "c", reason="stop", token_ids=tuple(ids), ended_by="eos"))
    text, calls = "", []
    while events:
        size = sizes.pop() if sizes else len(events)
        for piece in reader.push(events[:size]):
            if isinstance(piece, Text):
                text += piece.text
            elif isinstance(piece, ToolCallBegun):
                calls.append([piece.name, "", piece.id])
            elif isinstance(piece, ToolArguments):
                calls[piece.index][1] += piece.text
            elif isinstance(piece, Ended):
                assert piece.reason == ("tool_calls" if calls else "stop")
        events = events[size:]
    return text, [(n, ToolCall.parse(n, a).arguments, id) for n, a, id in calls]


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=tries(12), deadline=None)
@given(calls=CALLS, sizes=st.lists(st.integers(1, 40), max_size=6))
def test_what_a_template_writes_is_read_back_whole_and_in_pieces(
    name: str, calls: list[ToolCall], sizes: list[int]
) -> None:
    calls = calls[:1] if name == "Llama 3" else calls  # its template takes one
    ids = written(name, calls)
    turn = parse_answer(ids, tokenizer(), format_of(name))
    assert (turn.content.strip(), list(turn.tool_calls)) == ("", calls)
    text, shown = pieces_of(name, ids, sizes)
    assert text.strip() == "" and [each[:2] for each in shown] == [(call.name, call.arguments) for call in calls]
    assert all((len(id) == 9 and id.isalnum()) == name.startswith("Mistral") for _, _, id in shown)


@cache
def grammar(name: str, choice: str) -> Grammar:
    form = CallFormat.from_model(runner(name), format_of(name))
    assert form is not None
    wanted = answer_grammar(TOOLS, choice, True, form)
    assert wanted is not None
    return GrammarVocabulary(tokenizer()).compile(wanted)


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=tries(6), deadline=None)
@given(calls=CALLS)
def test_what_a_template_writes_is_what_the_grammar_admits(name: str, calls: list[ToolCall]) -> None:
    calls = calls[:1] if name == "Llama 3" else calls
    text = tokenizer().decode(written(name, calls), special=True).strip("\n")
    text = re.sub(r', "id": "\w{9}"(?=})', "", text)  # which models do not write
    ids = tokenizer().encode(text, special=True)
    matcher = grammar(name, "required").tokens.deep_copy()
    taken = matcher.validate_tokens(ids)
    assert taken == len(ids), tokenizer().decode(ids[:taken], special=True)
    matcher.consume_tokens(ids)
    assert matcher.is_accepting()


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_forced_call_is_read_as_a_call(name: str) -> None:
    result = workbench.agent(
        runner(name), [tool.model_copy(update={"function": None}) for tool in TOOLS], tool_choice="g-2.x",
        temperature=2.0, seed=3, max_tokens=200, limits={"rounds": 1},
    ).run("q")  # fmt: skip
    turn = result.conversation.turns[1]
    assert isinstance(turn, AssistantTurn) and [call.name for call in turn.tool_calls] == ["g-2.x"]
    assert "unparsed" not in turn.tool_calls[0].arguments


BARE = {
    '{"name": "f", "parameters": {"n": 1}}': [("f", {"n": 1})],
    ' \n{"type": "function", "name": "f", "parameters": {"n": 1}}': [("f", {"n": 1})],
    '{"name": "f", "parameters": {}}; {"name": "g-2.x", "parameters": {"s": "a"}}': [("f", {}), ("g-2.x", {"s": "a"})],
    '[{"name": "f", "arguments": {"n": 1}}]': [("f", {"n": 1})],
    '<|python_tag|>{"name": "f", "parameters": {"n": 1}}': [("f", {"n": 1})],
    '{"name": "Anna", "age": 3}': [], '{"x": {"name": "f"}}': [], "[1, 2]": [], "{": [], " \n": [], "see {": [],
    'a {"name": "f", "parameters": {}}': [],
}  # fmt: skip


@pytest.mark.parametrize("text", BARE)
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_an_answer_that_begins_with_json_is_a_call_if_it_names_a_tool(text: str, size: int) -> None:
    ids = tokenizer().encode(text, special=True)
    shown, calls = pieces_of("Llama 3", ids, [size] * len(ids))
    assert [each[:2] for each in calls] == BARE[text] and (calls or shown.strip() == text.strip())
    turn = parse_answer(ids, tokenizer(), format_of("Llama 3"))
    assert [(call.name, call.arguments) for call in turn.tool_calls] == BARE[text]
    for format in (format_of("Llama 3", ()), format_of("Qwen 2.5")):  # no call is possible; it has a token for calls
        if "<|python_tag|>" not in text:
            assert pieces_of("", ids, [size] * len(ids), format)[1] == []


OTHER = {
    "<function=f>\n<parameter=n>\n1\n</parameter>\n</function>": [("f", {"n": 1})],
    "<function=f>\n</function>": [("f", {})],
    "<function=f></function>\n<function=g-2.x></function>": [("f", {}), ("g-2.x", {})],
    "<function=f><parameter=s>a</parameter><parameter=b>True</parameter></function>": [("f", {"s": "a", "b": True})],
    '<invoke name="f">\n<parameter name="s">1</parameter>\n</invoke>\n': [("f", {"s": "1"})],
    "f<arg_key>n</arg_key><arg_value>1</arg_value>": [("f", {"n": 1})], "f": [("f", {})], "f\n": [("f", {})],
    "f\n<arg_key>new</arg_key>\n<arg_value>{\"a\": 1}</arg_value>\n": [("f", {"new": {"a": 1}})],
    'f{"n": 1}': [("f", {"n": 1})], 'f{"n": 1}g-2.x{}': [("f", {"n": 1}), ("g-2.x", {})],
    'f0a1b2c3d4{"n": 1}': [("f", {"n": 1})], "hello": [], "f(1)": [], "a f": [], "<function>": [], "f{} and": [],
}  # fmt: skip


@pytest.mark.parametrize("text", OTHER)
def test_calls_of_other_forms(text: str) -> None:
    assert [(call.name, call.arguments) for call in parse_calls(text, TOOLS)] == OTHER[text]


@pytest.mark.parametrize(
    "text",
    ["<function=f>\n<parameter=n>\n1", '<invoke name="f">\n<par', "f<arg_key>n</arg_key><arg", 'f{"n": '],
)
def test_a_call_that_is_cut_off_is_kept_unparsed(text: str) -> None:
    (call,) = parse_calls(text, TOOLS)
    assert call.name == "f" and call.arguments.keys() == {"unparsed"} and call.arguments["unparsed"] in text


def test_no_grammar_has_calls_where_their_form_is_not_known() -> None:
    text = model_templates.TOOLS_AS_JSON.replace("{{- tool_call.name }}", "{{- tool_call.name | upper }}")
    on = runner_of(model(), tokenizer=tokenizer(), prefix="radix", pages=200)
    on.loaded_model.__dict__["chat_template"] = ChatTemplate(text, NAMES, "test")
    assert on.chat_template is not None
    format = AnswerFormat.from_template(on.chat_template, tokenizer(), None, TOOLS)
    assert format.call is not None and CallFormat.from_model(on, format) is None
    assert answer_grammar(TOOLS, "auto", True, None) is None
    with pytest.raises(WorkbenchError, match="how the model writes a call is not known"):
        workbench.agent(on, TOOLS, tool_choice="required")
    assert workbench.agent(on, TOOLS, max_tokens=4).run("q").stop_reason
