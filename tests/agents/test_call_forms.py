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

from experiments import demo_tokenizer
from tests.prompt import model_templates
from tests.thorough import tries
from workbench.agents.call_format import CallFormat
from workbench.agents.choice import answer_grammar
from workbench.constrained.grammar import Grammar, GrammarVocabulary
from workbench.prompt.answers import AnswerFormat, parse_answer, parse_calls
from workbench.prompt.call_texts import flat_schemas, kinds_of
from workbench.prompt.conversation import Conversation
from workbench.prompt.templates import ChatTemplate
from workbench.prompt.tokenization.tokenizer import Tokenizer
from workbench.prompt.tools import Tool, declare
from workbench.prompt.turns import ToolCall
from workbench.request import Request, SamplingParameters
from workbench.serve.answers.answer_pieces import AnswerPieces
from workbench.serve.answers.pieces import Ended, Text, ToolArguments, ToolCallBegun
from workbench.serve.call import Call
from workbench.serve.served_model import PreparedPrompt
from workbench.trace.events import Decoded, Event, Finished

CONTROLS = (
    "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[INST]", "[/INST]", "</s>",
    "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "<|python_tag|>", "[CALL_ID]",
    "<own:call>", "</own:call>", "<minimax:tool_call>", "</minimax:tool_call>", "<|calls|>", "<|call|>", "<|sep|>",
    "<|/call|>", "<|/calls|>",
)  # fmt: skip
TEMPLATES = {
    "Qwen 2.5": model_templates.TOOLS_AS_JSON, "Qwen3-Coder": model_templates.IN_FUNCTION_TAGS,
    "GLM": model_templates.IN_KEY_TAGS, "Llama 3": model_templates.BARE, "Mistral": model_templates.SHORT_IDS,
    "Mistral, named": model_templates.NAMED, "Mistral, with ids": model_templates.WITH_IDS,
    "Seed": model_templates.IN_OWN_MARKS, "MiniMax": model_templates.IN_GROUP, "DeepSeek": model_templates.FENCED,
}  # fmt: skip
PROPERTIES = {
    "s": {"type": "string"}, "n": {"type": "integer"}, "b": {"type": "boolean"}, "l": {"type": "array"},
    "o": {"type": ["object", "null"]}, "e": {"enum": ["a b", "</c>"]},
}  # fmt: skip
BRANCHED = declare({"name": "h", "parameters": {
    "$ref": "#/$defs/d", "$defs": {"d": {"properties": {"n": {"type": "integer"}}, "required": ["n"]}},
    "anyOf": [{"properties": {k: {"const": k}}, "required": [k], "additionalProperties": False} for k in "ab"],
}})  # fmt: skip
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


class Model:
    """A tokenizer and a chat template, as prompts and forms of calls need them."""

    def __init__(self, template: str):
        self.tokenizer, self.chat_template = tokenizer(), ChatTemplate(template, {"bos_token": "", "eos_token": "</s>"})


@cache
def model(name: str) -> Model:
    return Model(TEMPLATES[name])


def format_of(name: str, tools: tuple[Tool, ...] = TOOLS) -> AnswerFormat:
    return AnswerFormat.from_template(model(name).chat_template, tokenizer(), None, tools)


def written(name: str, calls: list[ToolCall]) -> list[int]:
    """Return the tokens of an answer as the template writes it, without what ends it."""
    asked = Conversation(turns=["q"], tools=TOOLS)
    whole = asked.answer("", None, calls).prompt(model(name), add_generation_prompt=False)
    ids = list(whole.ids[len(asked.prompt(model(name)).ids) :])
    return ids[: next(n for n, id in enumerate([*ids, *whole.end_token_ids]) if id in whole.end_token_ids)]


def pieces_of(ids: list[int], size: int, format: AnswerFormat) -> tuple[str, list[Any]]:
    """Return the text and the calls (name, arguments, id) that a client is shown of an answer's tokens."""
    call = Call("c", "openai.chat", "m", ((1,),), SamplingParameters())
    reader = AnswerPieces(call, [PreparedPrompt(Request("c", (1,)), format)], tokenizer())
    events: list[Event] = [Decoded(0.0, "c", token_id=id, index=n) for n, id in enumerate(ids)]
    events.append(Finished(0.0, "c", reason="stop", token_ids=tuple(ids), ended_by="eos"))
    text, calls = "", []
    for first in range(0, len(events), size):
        for piece in reader.push(events[first : first + size]):
            if isinstance(piece, Text):
                text += piece.text
            elif isinstance(piece, ToolCallBegun):
                calls.append([piece.name, "", piece.id])
            elif isinstance(piece, ToolArguments):
                calls[piece.index][1] += piece.text
            elif isinstance(piece, Ended):
                assert piece.reason == ("tool_calls" if calls else "stop")
    return text, [(n, ToolCall.parse(n, a).arguments, id) for n, a, id in calls]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("size", [1, 2, 99])
def test_an_answer_without_a_call_keeps_its_last_lines(name: str, size: int) -> None:
    """A line end before a call separates it; one that nothing follows is text."""
    for words in ("a\n", "a\n\n", "\n", "a\nb"):
        assert pieces_of(tokenizer().encode(words), size, format_of(name)) == (words, [])


@cache
def grammar(name: str) -> Grammar:
    form = CallFormat.from_model(model(name), format_of(name))
    wanted = answer_grammar(TOOLS, "required", True, form)
    assert form is not None and wanted is not None
    return GrammarVocabulary(tokenizer()).compile(wanted)


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=tries(8), deadline=None)
@given(calls=CALLS, size=st.integers(1, 40))
def test_what_a_template_writes_is_read_back_and_is_what_its_grammar_admits(
    name: str, calls: list[ToolCall], size: int
) -> None:
    """Read whole, in pieces of any size, and with the ids that the template takes."""
    calls = calls[:1] if name == "Llama 3" else calls  # its template takes one
    ids = written(name, calls)
    assert list(parse_answer(ids, tokenizer(), format_of(name)).tool_calls) == calls
    text, shown = pieces_of(ids, size, format_of(name))
    assert text.strip() == "" and [each[:2] for each in shown] == [(call.name, call.arguments) for call in calls]
    assert all((len(id) == 9 and id.isalnum()) == name.startswith("Mistral") for _, _, id in shown)
    said = re.sub(r', "id": "\w{9}"(?=})', "", tokenizer().decode(ids, special=True).strip("\n"))  # models write none
    spelt, matcher = tokenizer().encode(said, special=True), grammar(name).tokens.deep_copy()
    assert matcher.consume_tokens(spelt) and matcher.is_accepting(), said


F, G = ("f", {"n": 1}), ("g-2.x", {})
TEXTS: dict[str, list[Any]] = {
    '{"name": "f", "parameters": {"n": 1}}': [F], ' \n{"type": "function", "name": "f", "parameters": {"n": 1}}': [F],
    '{"name": "f", "parameters": {"n": 1}}; {"name": "g-2.x", "parameters": {}}': [F, G],
    '[{"name": "f", "arguments": {"n": 1}}]': [F], '<|python_tag|>{"name": "f", "parameters": {"n": 1}}': [F],
    '{"name": "Anna", "age": 3}': [], '{"x": {"name": "f"}}': [], "[1, 2]": [], "{": [], " \n": [], "see {": [],
    '{"type": "function", "function": {"name": "f", "parameters": {"n": 1}}}': [F],
    '[{"type": "function", "function": {"name": "f", "arguments": "{\\"n\\": 1}"}}]': [F],
    '{"name": "g-2.x"} {"type": "function", "function": {"name": "f", "arguments": {"n": 1}}}': [G, F],
    '{"type": "function", "function": {"name": "h", "parameters": {"n": 1}}}': [],
    'a {"name": "f", "parameters": {}}': [], '<|think|>a<|/think|>\n{"name": "f", "parameters": {"n": 1}}': [F],
}  # fmt: skip


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("size", [1, 7])
def test_an_answer_that_begins_with_json_is_a_call_if_it_names_a_tool(text: str, size: int) -> None:
    ids = tokenizer().encode(text, special=True)
    shown, calls = pieces_of(ids, size, format_of("Llama 3"))
    assert [each[:2] for each in calls] == TEXTS[text] and (calls or shown.strip() == text.strip())
    turn = parse_answer(ids, tokenizer(), format_of("Llama 3"))
    assert [(call.name, call.arguments) for call in turn.tool_calls] == TEXTS[text]
    if "<|python_tag|>" not in text:  # no tool, or a token for calls: then it is text
        assert not pieces_of(ids, size, format_of("Llama 3", ()))[1]
        assert not pieces_of(ids, size, format_of("Qwen 2.5"))[1]


BEHIND = (
    "", " and some words", "\n\nf", ' "a" {b} [c', "}", "; see [1]", ' {"x": 1}', ' {"name": "h"} {"name": "f"}',
    " [1]",
)  # fmt: skip
CALLED = (
    '{"name": "f", "parameters": {"n": 1}}', '[{"name": "f", "parameters": {"n": 1}}]',
    '{"type": "function", "function": {"name": "f", "parameters": {"n": 1}}}',
    '{"name": "g-2.x"}; {"name": "f", "parameters": {"n": 1}}',
)  # fmt: skip


@pytest.mark.parametrize("call", CALLED)
@pytest.mark.parametrize("size", [1, 7, 99])
def test_a_call_ends_where_its_json_ends_and_what_stands_behind_it_is_text(call: str, size: int) -> None:
    wanted = [G, F] if "g-2.x" in call else [F]
    for behind in BEHIND:
        ids = tokenizer().encode(call + behind, special=True)
        text, calls = pieces_of(ids, size, format_of("Llama 3"))
        assert [each[:2] for each in calls] == wanted and text.strip(" ;\n") == behind.strip(" ;\n"), behind
        turn = parse_answer(ids, tokenizer(), format_of("Llama 3"))
        assert [(call.name, call.arguments) for call in turn.tool_calls] == wanted
        assert turn.content.strip(" ;\n") == behind.strip(" ;\n")


CUT: list[Any] = [("f", "unparsed")]
OTHER: dict[str, list[Any]] = {
    "<function=f>\n<parameter=n>\n1\n</parameter>\n</function>": [F], "<function=g-2.x></function>": [G],
    "<function=f><parameter=n>1</parameter></function>\n<function=g-2.x>\n</function>": [F, G],
    "<function=f>\n<parameter=n>\n1\n</function>": [F],
    "<function=f><parameter=n>1</function><function=g-2.x></function>": [F, G],
    "<function=f>\n<parameter=s>\na\nb\n<parameter=n>\n1\n</parameter>\n</function>": [("f", {"s": "a\nb", "n": 1})],
    "<function=f><parameter=s>a</p></parameter>\n<parameter=n>1<parameter=b>true</function>": [
        ("f", {"s": "a</p>", "n": 1, "b": True})
    ],
    '<invoke name="f">\n<parameter name="n">1</parameter>\n</invoke>\n<invoke name="g-2.x"></invoke>\n': [F, G],
    "f<arg_key>n</arg_key><arg_value>1</arg_value>": [F], "\ng-2.x\n": [G], 'f{"n": 1}g-2.x{}': [F, G],
    'f0a1b2c3d4{"n": 1}': [F], "hello": [], "f(1)": [], "a f": [], "<function>": [], "f{} and": [],
    "<function=f>\n<parameter=n>\n1": CUT, '<invoke name="f">\n<par': CUT, "f<arg_key>n</arg_key><arg": CUT,
    'f{"n": ': CUT, '{"function": {"name": "h", "parameters": {}}}': [], '{"function": {"name": "g-2.x"}}': [G],
}  # fmt: skip


@pytest.mark.parametrize("text", OTHER)
def test_calls_of_other_forms(text: str) -> None:
    calls = parse_calls(text, TOOLS)
    if OTHER[text] is CUT:
        assert [(call.name, *call.arguments) for call in calls] == CUT
    else:
        assert [(call.name, call.arguments) for call in calls] == OTHER[text]


@pytest.mark.parametrize("name", ["Qwen3-Coder", "GLM"])
def test_arguments_in_tags_keep_the_branches_of_a_schema(name: str) -> None:
    wanted = answer_grammar([BRANCHED], "required", True, CallFormat.from_model(model(name), format_of(name)))
    assert wanted is not None
    start = GrammarVocabulary(tokenizer()).compile(wanted).tokens
    for arguments in ({"n": 1, "a": "a"}, {"n": 1, "b": "b"}, {"n": 1}, {"a": "a"}, {"n": 1, "a": "a", "b": "b"}, {}):
        said = tokenizer().decode(written(name, [ToolCall(name="h", arguments=arguments)]), special=True).strip("\n")
        ids, matcher = tokenizer().encode(said, special=True), start.deep_copy()
        assert (matcher.validate_tokens(ids) == len(ids)) == (len(arguments) == 2), said


@pytest.mark.parametrize("target", ["#/properties/n", "#/$defs/a~1b/anyOf/0", "#/definitions/m"])
def test_arguments_in_tags_may_refer_to_any_part_of_their_schema(target: str) -> None:
    number: Any = {"type": "integer", "maximum": 9}
    schema = {"type": "object", "properties": {"n": number, "l": {"type": "array", "items": {"$ref": target}}},
              "$defs": {"a/b": {"anyOf": [number]}}, "definitions": {"m": {"$ref": "#/properties/n"}}}  # fmt: skip
    schema["properties"]["m"] = {"$ref": target}
    wanted = answer_grammar([Tool(name="h", parameters=schema)], "auto", True,
                            CallFormat.from_model(model("GLM"), format_of("GLM")))  # fmt: skip
    assert wanted is not None
    start = GrammarVocabulary(tokenizer()).compile(wanted).tokens
    for value in (3, 12):
        for arguments in ({"l": [value]}, {"m": value}):
            call = ToolCall(name="h", arguments=arguments)
            said = tokenizer().decode(written("GLM", [call]), special=True).strip("\n")
            ids, matcher = tokenizer().encode(said, special=True), start.deep_copy()
            assert (matcher.validate_tokens(ids) == len(ids)) == (value == 3), said


def test_schemas_that_refer_twice_at_every_level_are_looked_at_once() -> None:
    """Two to the power of the levels otherwise, in the server's own process; and a long row of them is no recursion."""
    levels = 2000
    defined: dict[str, Any] = {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(levels)}
    defined[f"d{levels}"] = {"type": "string", "properties": {"x": {}}, "required": ["x"]}
    root = {"$ref": "#/$defs/d0", "$defs": defined}
    assert kinds_of(root, root) == {"string"}
    near = {"$ref": f"#/$defs/d{levels - 20}", "$defs": defined}
    assert flat_schemas(near, near) == [{"properties": {"x": {}}, "required": {"x"}}]
    assert len(flat_schemas(root, root)) == 1


def test_no_grammar_has_calls_where_their_form_is_not_known() -> None:
    shout = model_templates.TOOLS_AS_JSON.replace("{{- tool_call.name }}", "{{- tool_call.name | upper }}")
    pythonic = model_templates.IN_KEY_TAGS.replace("\n<tool_call>' + c.name", "<|call|>' + c.name").replace(
        "<arg_key>' ~ k ~ '</arg_key>\n<arg_value>", "' ~ k ~ '="
    ).replace("</arg_value>", ";").replace("\n</tool_call>", "<|/call|>")  # fmt: skip
    for text in (shout, pythonic):  # the vocabulary has a token for calls that the template does not write
        on = Model(text)
        format = AnswerFormat.from_template(on.chat_template, tokenizer(), None, TOOLS)
        assert format.call is not None and CallFormat.from_model(on, format) is None
    assert answer_grammar(TOOLS, "auto", True, None) is None


@pytest.mark.parametrize("name", TEMPLATES)
def test_with_auto_an_answer_may_be_of_one_token_or_begin_with_a_thought(name: str) -> None:
    """A pattern of the grammar was tried as the way to its end: max_tokens of 4 was refused. A thought of its own
    may stand first, and only there."""
    form = CallFormat.from_model(model(name), format_of(name))
    wanted = answer_grammar(TOOLS, "auto", True, form)
    assert form is not None and (wanted is None) == (not form.opening)
    if wanted is not None:
        grammar = GrammarVocabulary(tokenizer()).compile(wanted)
        assert len(grammar.shortest) <= 1
        for text, is_said in (("<|think|>a\n<|/think|>b", True), ("a", True), ("a<|think|>b", False)):
            ids = tokenizer().encode(text, special=True)
            assert (grammar.tokens.deep_copy().validate_tokens(ids) == len(ids)) == is_said
