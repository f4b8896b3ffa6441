"""tool_choice in every format of calls: the trigger is a control token, arguments keep the schema, streams parse."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken

import workbench
from experiments import demo_tokenizer
from tests.agents.script import Json, add, call, pages_in_use, runner, say, script
from tests.engine.tiny import layer, model_of, runner_of
from tests.prompt import model_templates
from workbench.agents.arguments import find_fault
from workbench.agents.call_format import CallFormat
from workbench.agents.choice import answer_grammar
from workbench.agents.result import AgentResult
from workbench.constrained.closing import EndSearch, NodeBudget
from workbench.constrained.grammar import GrammarVocabulary
from workbench.engine.runner import Runner
from workbench.errors import WorkbenchError
from workbench.model.spec import ModelSpec
from workbench.prompt.answers import AnswerFormat, parse_calls, parse_partial_json
from workbench.prompt.conversation import Conversation
from workbench.prompt.templates import ChatTemplate
from workbench.prompt.tokenization.tokenizer import Tokenizer
from workbench.prompt.tools import declare
from workbench.prompt.turns import AssistantTurn
from workbench.response_format import Choices, Lark
from workbench.trace.agent_events import AgentFinished, AnswerPiece

LISTED = (
    "{% if tools %}[TOOLS]{{ tools | tojson }}[/TOOLS]{% endif %}{% for m in messages %}{% if m.role == 'user' %}"
    "[INST]{{ m.content }}[/INST]{% elif m.tool_calls %}[TOOL_CALLS][{% for c in m.tool_calls %}"
    '{{ \'{"name": "\' ~ c.function.name ~ \'", "arguments": \' ~ c.function.arguments | tojson ~ \', "id": "\' ~ c.id '
    "~ '\"}' }}{{ ', ' if not loop.last }}{% endfor %}]</s>{% elif m.role == 'tool' %}"
    '[TOOL_RESULTS]{"content": {{ m.content | tojson }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]'
    "{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
)
PYTHON_TAG = (
    "{% if tools %}<|tools|>{{ tools | tojson }}{% endif %}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    '{% for c in m.tool_calls or [] %}{{ raise_exception("one call") if loop.length > 1 }}<|python_tag|>'
    '{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}{% endfor %}'
    "<|eot|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
FORMATS = {
    "tags": (model_templates.TOOLS_AS_JSON, ["<|im_start|>", "<|im_end|>"], ["<tool_call>", "</tool_call>"]),
    "listed": (
        LISTED,
        ["[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOLS]", "[/TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "</s>"], [],
    ),
    "no_tools": (model_templates.NO_TOOLS, ["<|im_start|>", "<|im_end|>"], []),
    "python_tag": (PYTHON_TAG, ["<|python_tag|>", "<|tools|>", "<|eot|>"], []),
}  # fmt: skip


def answer_of(result: AgentResult) -> AssistantTurn:
    turn = result.conversation.turns[1]
    assert isinstance(turn, AssistantTurn)
    return turn


def pick(unit: str, count: int = 1, labels: list[str] | None = None) -> str:
    """Pick."""
    return f"{unit} {count} {labels}"


@cache
def loaded(name: str) -> tuple[Any, Tokenizer, ChatTemplate]:
    text, special, added = FORMATS[name]
    inner = demo_tokenizer.bytes_only()
    inner.add_special_tokens([AddedToken(each, normalized=False) for each in special])
    inner.add_tokens([AddedToken(each, normalized=False) for each in added])
    tokenizer = Tokenizer(inner)
    spec = ModelSpec(
        name="tiny", vocab_size=tokenizer.vocab_size, hidden_size=8, layers=(layer(),), max_position_embeddings=4096,
        tie_word_embeddings=True, eos_token_ids=(1,),
    )  # fmt: skip
    return model_of(spec), tokenizer, ChatTemplate(text, {}, "test")


def runner_for(name: str) -> Runner:
    if name == "own":
        return runner()
    model, tokenizer, template = loaded(name)
    on = runner_of(model, tokenizer=tokenizer, prefix="radix", pages=600, max_num_batched_tokens=512)
    on.loaded_model.__dict__["chat_template"] = template
    return on


@pytest.mark.parametrize("name", ["own", *FORMATS])
@pytest.mark.parametrize("seed", [1, 2])
def test_a_forced_call_keeps_its_schema_and_parses_at_every_cut(name: str, seed: int) -> None:
    on = runner_for(name)
    agent = workbench.agent(
        on, [pick, add], tool_choice="required", temperature=2.0, seed=seed, max_tokens=160, limits={"rounds": 1}
    )
    events = list(agent.stream("q"))
    assert isinstance(events[-1], AgentFinished) and events[-1].result is not None
    result = events[-1].result
    turn = answer_of(result)
    assert turn.tool_calls and result.stop_reason in ("max_rounds", "max_tokens"), result
    for made in turn.tool_calls:
        tool = next(each for each in agent.tools if each.name == made.name)
        assert find_fault(made.arguments, tool.parameters) == ""
    pieces = [each for each in events if isinstance(each, AnswerPiece) and each.channel == "call"]
    texts = ["".join(each.text for each in pieces if each.index == n) for n in range(pieces[-1].index + 1)]
    assert [(c.name, c.arguments) for text in texts for c in parse_calls(text)] == [
        (c.name, c.arguments) for c in turn.tool_calls
    ]
    for text in texts:
        whole = json.loads(text)
        for cut in range(1, len(text) + 1):
            partial = parse_partial_json(text[:cut])
            assert partial is None or begins(partial, whole), text[:cut]
    assert pages_in_use(on) == 0 and result.conversation.prompt(on).ids


def begins(part: Any, whole: Any) -> bool:
    """Return whether a value is a beginning of another: fewer items or letters, the last of them perhaps unfinished."""
    if isinstance(part, dict) and isinstance(whole, dict):
        names = list(whole)[: len(part)]
        return list(part) == names and all(
            begins(part[name], whole[name]) if name == names[-1] else part[name] == whole[name] for name in names
        )
    if isinstance(part, list) and isinstance(whole, list):
        last = len(part) - 1
        return last < len(whole) and all(
            begins(each, whole[n]) if n == last else each == whole[n] for n, each in enumerate(part)
        )
    if isinstance(part, str) and isinstance(whole, str):
        return whole.startswith(part)
    if isinstance(part, int | float) and isinstance(whole, int | float):
        return True  # a number may go on
    return part == whole


@pytest.mark.parametrize("name", ["own", *FORMATS])
def test_what_a_template_writes_of_calls_is_what_the_grammar_says(name: str) -> None:
    """A call that the template shows is one that the grammar admits, token by token."""
    on = runner_for(name)
    assert on.tokenizer is not None and on.chat_template is not None
    tools = [declare(pick), declare(add)]
    format = AnswerFormat.from_template(on.chat_template, on.tokenizer, None, tools)
    calls = CallFormat.from_model(on, format)
    assert (
        calls is not None
        and calls.several == (name not in ("python_tag", "no_tools"))
        and calls.is_list == (name == "listed")
    )
    wanted = answer_grammar(tools, "auto" if calls.opening else "required", True, calls)
    assert wanted is not None
    grammar = on.tracker.compiling._compiler.vocabulary().compile(wanted)
    talk = Conversation(tools=tools, turns=["q"])
    made = [{"function": {"name": "add", "arguments": {"a": 1, "b": -2}}}]
    made += [{"function": {"name": "pick", "arguments": {"unit": 'é"', "count": 2, "labels": ["a", "b"]}}}]
    messages = [*talk.messages(), {"role": "assistant", "content": "", "tool_calls": made[: 1 + calls.several]}]
    whole = Conversation.from_messages(messages, tools=tools).prompt(on, add_generation_prompt=False)
    before = talk.prompt(on).ids
    ids = [id for id in whole.ids[len(before) :] if id not in whole.end_token_ids]
    if name == "listed":  # its template adds ids to calls, which models do not write
        text = on.tokenizer.decode(ids, special=True)
        ids = on.tokenizer.encode(text.replace(', "id": ""', ""), special=True)
    if ids[-1:] == on.tokenizer.encode("\n"):
        ids = ids[:-1]
    matcher = grammar.tokens.deep_copy()
    assert matcher.validate_tokens(ids) == len(ids), on.tokenizer.decode(ids, special=True)
    matcher.consume_tokens(ids)
    assert matcher.is_accepting()
    spelt = on.tokenizer.encode(calls.opening)
    assert grammar.tokens.deep_copy().validate_tokens(spelt) == len(spelt)  # as text, which is no call


@pytest.mark.parametrize("name", FORMATS)
def test_the_end_of_a_forced_call_is_found_whatever_its_arguments(name: str) -> None:
    """A grammar that begins with a control token is walked in few steps: what must follow is taken at once."""
    on = runner_for(name)
    assert on.tokenizer is not None and on.chat_template is not None
    tools = [declare(add)]
    form = CallFormat.from_model(on, AnswerFormat.from_template(on.chat_template, on.tokenizer, None, tools))
    vocabulary = GrammarVocabulary(on.tokenizer)
    kinds = {"n": {"type": "number"}, "s": {"type": "string"}, "b": {"type": "boolean"}, "l": {"type": "array"}}
    for count in (1, 4, 12):
        properties = {f"{kind}{number}": kinds[kind] for number in range(count) for kind in kinds}
        schema = {"type": "object", "properties": properties, "required": [*properties]}
        wanted = answer_grammar([declare({"name": "f", "parameters": schema})], "required", True, form)
        assert wanted is not None
        search = EndSearch(vocabulary.compile(wanted).symbols, vocabulary.end_symbol)
        budget = NodeBudget(1000)
        assert search.run(budget) and search.way is not None and budget.left > 1000 - 12 * len(properties)


def test_choices_one_by_one() -> None:
    on = runner()
    free = {"temperature": 3.0, "max_tokens": 90, "limits": {"rounds": 1}}
    bias = {on.tokenizer.special_token_ids["<|tool|>"]: 60.0} if on.tokenizer else {}
    none = workbench.agent(on, [pick, add], tool_choice="none", logit_bias=bias, **free).run("q")
    assert not answer_of(none).tool_calls and none.rounds[0].calls == ()
    several = workbench.agent(on, [add], logit_bias=bias, **free).run("q")
    one = workbench.agent(on, [add], parallel_tool_calls=False, logit_bias=bias, **free).run("q")
    assert len(answer_of(one).tool_calls) == 1 <= len(answer_of(several).tool_calls)
    named = workbench.agent(on, [pick, add], tool_choice="add", **free).run("q")
    assert [call.name for call in answer_of(named).tool_calls] == ["add"]
    again = workbench.agent(on, [say], tool_choice="say", temperature=0, max_tokens=60, limits={"rounds": 2}).run("q")
    assert len(again.rounds) == 2  # the second answer is free
    for choice in ("required", "say"):
        freed = workbench.agent(runner(), [say], tool_choice=choice, **script(call("say"), "so")).run("q")
        assert (freed.answer, freed.stop_reason, len(freed.rounds)) == ("so", "end_turn", 2)


TWO_CALLS = [
    ({}, 2), ({"parallel_tool_calls": False}, 1), ({"tool_choice": "required"}, 2), ({"tool_choice": "add"}, 1),
    ({"tool_choice": "none"}, 0),
]  # fmt: skip


@pytest.mark.parametrize(("values", "count"), TWO_CALLS)
def test_a_model_that_calls_twice_is_held_to_the_choice(values: Json, count: int) -> None:
    twice = 2 * call("add", a=1, b=2)
    done = workbench.agent(runner(), [pick, add], limits={"rounds": 1}, **script(twice), **values).run("q")
    assert [each.name for each in done.rounds[0].calls] == count * ["add"]


def test_a_choice_that_needs_a_grammar_is_refused_where_none_can_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    on = runner()
    monkeypatch.setattr(on.tokenizer, "byte_rule", None)
    assert workbench.agent(on, [add], **script("a")).run("q").answer == "a"
    refused: list[Json] = [{"tool_choice": "none"}, {"parallel_tool_calls": False}, {"tool_choice": "add"}]
    for values in refused:
        with pytest.raises(WorkbenchError, match="a grammar needs"):
            workbench.agent(on, [add], **script("a"), **values).run("q")


@pytest.mark.parametrize(
    "text", [Choices(choices=("yes", "no")), Lark(lark='start: "y" start | "z"')], ids=["choices", "lark"]
)  # fmt: skip
def test_a_call_or_an_answer_of_a_format(text: Any) -> None:
    on = runner()
    num_calls = 0
    for seed in range(6):
        bias = {on.tokenizer.special_token_ids["<|tool|>"]: 4.0} if on.tokenizer else {}
        done = workbench.agent(
            on, [add], response_format=text, temperature=1.0, seed=seed, logit_bias=bias, max_tokens=60,
            limits={"rounds": 1},
        ).run("q")  # fmt: skip
        num_calls += len(done.rounds[0].calls)
        if not done.rounds[0].calls:
            assert done.answer in ("yes", "no") or done.answer.strip("y") == "z"
    assert num_calls > 0


def test_a_model_that_cannot_says_so() -> None:
    model, tokenizer, _ = loaded("tags")
    plain = "{% for m in messages %}<|im_start|>{{ m.role }}{{ m.content }}<|im_end|>{% endfor %}<|im_start|>"
    on = runner_of(model, tokenizer=tokenizer, prefix="radix", pages=200)
    on.loaded_model.__dict__["chat_template"] = ChatTemplate("<|im_start|>", {}, "test")
    with pytest.raises(WorkbenchError, match="shows neither tools nor a list of them in a message"):
        workbench.agent(on, [add], max_tokens=4).run("q")
    bare = demo_tokenizer.bytes_only()
    keep = json.loads(bare.to_str())
    keep["added_tokens"] = [each for each in keep["added_tokens"] if each["content"] != "<|tool|>"]
    on = runner_of(model, tokenizer=Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(keep))), pages=200)
    on.loaded_model.__dict__["chat_template"] = ChatTemplate("{{ tools }}" + plain, {}, "test")
    with pytest.raises(WorkbenchError, match="no control token that begins a call"):
        workbench.agent(on, [add], tool_choice="required")
    assert workbench.agent(on, [add], max_tokens=4).run("q").stop_reason
