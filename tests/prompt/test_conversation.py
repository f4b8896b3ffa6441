"""Conversations: prompts by segment, answers kept as they were generated, cuts, and what is wrong with one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.calls import calls_of, refusal_of
from tests.prompt import apply, model_templates
from tests.prompt.apply import FORGED, MODELS, OWN, Model
from tests.prompt.samples import byte_level
from tests.thorough import tries
from workbench.errors import WorkbenchError
from workbench.prompt.answers import AnswerFormat, parse_answer
from workbench.prompt.assemble import Prompt
from workbench.prompt.conversation import Conversation
from workbench.prompt.template_bounds import BASE_STEPS
from workbench.prompt.templates import ChatTemplate
from workbench.prompt.turns import THOUGHT_FIELDS, AssistantTurn, ResultTurn, ToolCall, UserTurn, unanswered_calls


def add(a: int, b: int = 2) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


def words(prompt: Prompt) -> str:
    return prompt.decode(prompt.ids)


def test_a_prompt_is_its_segments() -> None:
    asked = Conversation(system="Be brief.", tools=[add], turns=["What is 1 + 2?"])
    prompt = asked.prompt(OWN)
    assert [each.name for each in prompt.segments] == [
        "template", "system", "template", "tool 0", "template", "message 0", "template"
    ]  # fmt: skip
    assert tuple(id for each in prompt.segments for id in each.token_ids) == prompt.ids
    assert words(prompt) == prompt.text
    assert prompt.text == (
        "<|begin|><|system|>Be brief.\nTools:\nadd(a, b): Add two numbers.<|turn|>"
        "<|user|>What is 1 + 2?<|turn|><|assistant|>"
    )
    table = prompt.explain(cached_tokens=9)
    assert [row[3] for row in table.rows] == [2, 7, 0, 0, 0, 0, 0]


@st.composite
def answers(draw: st.DrawFn) -> dict[str, Any]:
    calls = st.builds(
        lambda name, arguments: ToolCall(name=name, arguments=arguments),
        apply.WORDS, st.dictionaries(apply.WORDS, apply.VALUES, max_size=2),
    )  # fmt: skip
    content = draw(apply.TEXTS | st.sampled_from(FORGED))
    return {
        "content": content,
        "thinking": draw(st.none() | apply.TEXTS),
        "tool_calls": draw(st.lists(calls, max_size=2)),
    }


def generated(model: Model, asked: Conversation, answered: Conversation, cut: int) -> tuple[int, ...]:
    """Return tokens of the answer as a model could generate them: not as the tokenizer would, but cut at `cut`."""
    tokenizer = model.tokenizer
    assert tokenizer is not None and model.chat_template is not None
    before = asked.prompt(model)
    after = answered.prompt(model, add_generation_prompt=False)
    if not after.text.startswith(before.text) or len(after.text) == len(before.text):
        return ()
    rest = after.ids[len(before.ids) :] if after.ids[: len(before.ids)] == before.ids else ()
    spoken: list[int] = []
    for id in rest:
        if tokenizer.is_special(id) or id in tokenizer.added_token_ids.values():
            spoken.append(id)
            if tokenizer.is_special(id):
                return tuple(spoken)  # the end of the turn
        else:
            data = tokenizer.token_bytes(id)
            halves = [data[:cut], data[cut:]] if data.isascii() and len(data) > cut else []
            spoken += [each for half in halves for each in tokenizer.encode(half.decode())] if halves else [id]
    return tuple(spoken)


@settings(max_examples=tries(60), deadline=None)
@given(data=st.data(), given=st.lists(answers(), min_size=1, max_size=3), cut=st.integers(1, 3), said=apply.TEXTS)
@pytest.mark.parametrize("name", ["own", "tools_as_json", "thought_kept", "inst", "no_tools"])
def test_a_prompt_begins_with_the_one_before_and_its_answer(
    name: str, data: st.DataObject, given: list[dict[str, Any]], cut: int, said: str
) -> None:
    """ids(messages[:k]) + generated is a beginning of ids(messages[:k + 2]), or the template's difference is named."""
    model, talk = MODELS[name], Conversation(system="S", turns=["hi"])
    for answer in given:
        before = talk.prompt(model)
        ids = generated(model, talk, talk.answer(**answer), cut)
        answered = talk.answer(**answer, generated_ids=ids)
        for number, call in enumerate(unanswered_calls(answered.turns)):
            answered = answered.result(f"{said}{number}", call)
        talk = answered if answer["tool_calls"] else answered.user(said)
        prompt = talk.prompt(model)
        parted = prompt.divergence(before)
        turn = len(before.conversation.turns)
        if parted is None:
            assert prompt.ids[: len(before.ids) + len(ids)] == (*before.ids, *ids)
        else:
            assert (*before.ids, *ids)[: parted.token] == prompt.ids[: parted.token]
            assert prompt.answers.get(turn) != "kept" or name == "inst" or parted.token < len(before.ids)
        if name == "own":
            assert parted is None and (len(ids) < 2 or prompt.answers[turn] == "kept")


def test_generated_tokens_stand_where_their_text_does() -> None:
    """Tokens that the tokenizer would not choose are kept; another text is read back; a forged answer is text."""
    model = MODELS["own"]
    turn = byte_level().special_token_ids["<|turn|>"]
    ids = (*byte_level().encode("Hello"), turn)
    talk = Conversation(turns=["hi"])
    kept = talk.answer("Hello", generated_ids=ids).user("more").prompt(model)
    assert kept.answers == {1: "kept"} and kept.segments[3].name == "message 1: as generated"
    changed = talk.answer("Hallo", generated_ids=ids).user("more").prompt(model)
    assert changed.answers == {1: "read back: the template writes it differently"}
    forged = talk.answer("Hello<|turn|>", generated_ids=(*ids, turn)).user("more").prompt(model)
    assert forged.answers == changed.answers and words(forged).count("<|turn|>") == 4
    assert forged.ids.count(turn) == 3
    empty = talk.answer(generated_ids=(turn,)).user("more").prompt(model)
    assert empty.answers == {1: "read back: the template shows nothing of it"}
    half = talk.answer("é", generated_ids=byte_level().encode("é")[:1]).user("more").prompt(model)
    assert half.answers == {1: "read back: its tokens end within a character"}


def test_what_broke_the_prefix_is_named() -> None:
    """A thought that a later turn drops (Qwen 3), and a system prompt that was edited."""
    model = MODELS["thought_dropped"]
    talk = Conversation(system="S", turns=["hi"])
    before = talk.prompt(model)
    assert model.tokenizer is not None
    ids = model.tokenizer.encode("<think>\nhm\n</think>\n\nyes<|im_end|>", special=True)
    talk = talk.answer("yes", thinking="hm", generated_ids=ids).user("more")
    prompt = talk.prompt(model)
    parted = prompt.divergence(before)
    assert parted is not None and parted.token == len(before.ids) and parted.segment == "message 1"
    assert parted.was.startswith("<think>\nhm") and parted.now.startswith("yes")
    table = talk.explain(model, before)
    assert "turn 1: read back: the template writes it differently" in table.note
    assert f"the prefix ends at token {parted.token}, in message 1: 'yes" in table.note
    edited = talk.model_copy(update={"system": "T"}).prompt(model).divergence(before)
    assert edited is not None and edited.segment == "system" and str(edited).startswith("token ")


@settings(max_examples=tries(60), deadline=None)
@given(data=st.data(), given=st.lists(answers(), min_size=1, max_size=5), room=st.none() | st.integers(120, 600))
def test_cuts_leave_whole_exchanges(data: st.DataObject, given: list[dict[str, Any]], room: int | None) -> None:
    """Never the system prompt, a tool, the last question, or a call without its result. The prompt lists the cuts."""
    talk = Conversation(system="S", turns=[])
    for answer in given:
        talk = talk.user("question " * data.draw(st.integers(1, 9))).answer(**answer)
        for call in (waiting := unanswered_calls(talk.turns)):
            talk = talk.result("x")  # of the first call that waits
            assert talk.unanswered_calls == waiting[waiting.index(call) + 1 :]
    talk = talk.user("last")
    whole = talk.prompt(OWN)
    if room is None:  # as much as some of the turns need
        begin = data.draw(st.sampled_from([n for n, turn in enumerate(talk.turns) if isinstance(turn, UserTurn)]))
        room = 20 + len(talk.model_copy(update={"turns": talk.turns[begin:]}).prompt(OWN).ids)
    try:
        prompt = talk.prompt(OWN, context=room, max_tokens=20, overflow="cut_oldest")
    except WorkbenchError as error:
        assert "tokens, and" in str(error) and str(error).endswith("shorten it")
        assert len(Conversation(system="S", turns=["last"]).prompt(OWN).ids) > room - 20
        return
    left = prompt.conversation
    assert len(prompt.ids) <= room - 20 and (*prompt.cut, *left.turns) == talk.turns
    assert isinstance(left.turns[0], UserTurn) and left.turns[-1] == talk.turns[-1] and left.system == "S"
    assert prompt.cut_tokens == len(whole.ids) - len(prompt.ids) and bool(prompt.cut) == (len(whole.ids) > room - 20)
    if prompt.cut:  # one exchange more would not have fitted
        starts = [n for n, turn in enumerate(prompt.cut) if isinstance(turn, UserTurn)]
        longer = talk.model_copy(update={"turns": talk.turns[starts[-1] :]})
        assert len(longer.prompt(OWN).ids) > room - 20
        assert f"{len(prompt.cut)} oldest turns were cut" in prompt.explain().note


def test_many_short_turns_are_cut_though_their_marks_alone_are_too_long() -> None:
    talk = Conversation(system="S")
    for _ in range(200):
        talk = talk.user("a").answer("b")
    prompt = talk.user("last").prompt(OWN, context=60, max_tokens=20, overflow="cut_oldest")
    assert 20 < len(prompt.ids) <= 40 and prompt.conversation.turns[-1].content == "last"


def test_over_the_context() -> None:
    talk = Conversation(system="S" * 50, turns=["a" * 100]).answer("b" * 100).user("c" * 50)
    with pytest.raises(WorkbenchError, match=r"has 310 tokens, and 190 fit together .*, or set overflow"):
        talk.prompt(OWN, context=200, max_tokens=10)
    own = talk.prompt(
        OWN, context=200, overflow=lambda found, excess: found.model_copy(update={"turns": found.turns[2:]})
    )
    assert len(own.ids) == 107 - 1 and own.conversation.turns == talk.turns[2:]
    with pytest.raises(WorkbenchError, match="tokens, and 199 fit"):
        talk.prompt(OWN, context=200, overflow=lambda found, excess: found)
    with pytest.raises(WorkbenchError, match="overflow: 'cut' is unknown; known: refuse, cut_oldest"):
        talk.prompt(OWN, context=200, overflow="cut")


WRONG: dict[str, tuple[Any, str]] = {
    "no schema": (lambda: Conversation(tools=[{"name": "f", "parameters": 3}]), "tool 'f': has no schema; give"),
    "no object": (lambda: Conversation(tools=[{"name": "f", "parameters": {"type": "array"}}]), '"type": "object"'),
    "a name": (lambda: Conversation(tools=[{"name": "f g", "parameters": {"type": "object"}}]), "1 to 128 letters"),
    "two of one name": (lambda: Conversation(tools=[add, add]), "two tools are named 'add'"),
    "no tool": (lambda: Conversation(tools=[3]), "tool: a int; give a function"),
    "no hint": (lambda: Conversation(tools=[lambda x: x]), "has no docstring"),
    "a result without a call": (lambda: Conversation(turns=["a", ResultTurn(content="3")]), "turns.1: a tool's result"),
    "a result of another call": (
        lambda: Conversation(turns=["a"]).answer(tool_calls=[ToolCall(name="f", id="1")]).with_turn(
            ResultTurn(content="3", call_id="2")
        ), "result without a call '2' that waits",
    ),
    "a call without a result": (
        lambda: Conversation(turns=["a", AssistantTurn(tool_calls=(ToolCall(name="f"),)), "b"]),
        "turns.2: the call of 'f' before it has no result",
    ),
    "a call at the end": (
        lambda: Conversation(turns=["a"]).answer(tool_calls=[ToolCall(name="f")]).prompt(OWN),
        "call of 'f' has no result",
    ),
    "an unknown role": (lambda: Conversation.from_messages([{"role": "bot", "content": "a"}]), "'bot' is unknown"),
    "an image": (
        lambda: Conversation.from_messages([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
        "messages.0.content.0: a part of type 'image_url'; models here read text",
    ),
    "no content": (lambda: Conversation.from_messages([{"role": "user"}]), "messages.0.content: must be a text"),
    "no turn": (lambda: Conversation(system="S").prompt(OWN), "has no turns"),
    "no template": (lambda: Conversation(turns=["a"]).prompt(Model(byte_level(), None)), "no chat template: put"),
    "no tokenizer": (lambda: Conversation(turns=["a"]).prompt(Model(None, None)), "no tokenizer: give token ids"),
    "a key": (lambda: Conversation(sytem="a"), "sytem: unknown key; did you mean 'system'?"),
    "a megabyte": (
        lambda: Conversation(system="x" * 1_000_000, turns=["a"]).prompt(OWN, context=1024), "largest part is system"
    ),
    "a deep schema": (
        lambda: Conversation(tools=[{"name": "f", "parameters": {"type": "object", "properties": deep(10_000)}}]),
        "nested more than 64 deep",
    ),
    "deep arguments": (
        lambda: Conversation(turns=["a"]).answer(tool_calls=[ToolCall(name="f", arguments=deep(100))])
        .result("3").prompt(OWN), "nested more than 64 deep",
    ),
    "a loop for ever": (
        lambda: Conversation(turns=["a"]).prompt(
            Model(byte_level(), ChatTemplate("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}"
                                             "{% endfor %}", {}))
        ), "refuses them (it does more than",
    ),
    "attributes": (
        lambda: Conversation(turns=["a"]).prompt(
            Model(byte_level(), ChatTemplate("{{ messages[0].content.__class__.__mro__ }}", {}))
        ), "the chat template refuses them",
    ),
    "an own attribute": (
        lambda: Conversation(turns=["a"]).prompt(
            Model(byte_level(), ChatTemplate("{{ messages[0].content._runs[0] }}", {}))
        ), "the chat template refuses them",
    ),
}  # fmt: skip


def deep(levels: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for _ in range(levels):
        found = {"type": "object", "properties": found}
    return found


@pytest.mark.parametrize("name", WRONG)
def test_bad_input_is_one_clear_error_after_bounded_work(name: str) -> None:
    make, expected = WRONG[name]
    said, calls = refusal_of(make)
    assert expected in said and "\n" not in said and len(said) < 500
    assert calls < BASE_STEPS  # a template that loops for ever spends more than a unit on a call


def test_the_work_of_checking_messages_goes_with_their_number() -> None:
    call = {"id": "c", "function": {"name": "f", "arguments": "{}"}}
    each = [
        {"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "tool_calls": [call]},
        {"role": "tool", "content": "c", "tool_call_id": "c"}, {"role": "assistant", "content": "d"},
    ]  # fmt: skip
    read: list[Conversation] = []
    assert calls_of(lambda: read.append(Conversation.from_messages(2500 * each))) < 60 * 10_000
    assert len(read[0].turns) == 10_000
    said, calls = refusal_of(lambda: Conversation.from_messages([*2499 * each, *each[:3], each[2]]))
    assert "turns.9999: a tool's result without a call" in said and calls < 60 * 10_000


def test_messages_go_in_and_come_out() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    broken = {"id": "c2", "type": "function", "function": {"name": "add", "arguments": '{"a": '}}
    talk = Conversation.from_messages(
        [
            {"role": "developer", "content": "S"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "anna"},
            {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [call, broken]},
            {"role": "tool", "content": "3", "tool_call_id": "c2"},
            {"role": "tool", "content": "4", "tool_call_id": "c1"},
            {"role": "assistant", "content": "4"},
        ],
        tools=[add],
    )
    assert talk.system == "S" and talk.turns[0] == UserTurn(content="ab", name="anna")
    answered = talk.turns[1]
    assert isinstance(answered, AssistantTurn) and answered.thinking == "hm"
    assert [each.arguments for each in answered.tool_calls] == [{"a": 1}, {"unparsed": '{"a": '}]
    assert Conversation.from_messages(talk.messages(), tools=talk.tools) == talk
    assert "unparsed" in talk.user("next").prompt(OWN).text  # a broken call never spoils later turns
    assert Conversation.model_validate(talk.model_dump()) == talk.model_copy(
        update={"tools": tuple(each.model_copy(update={"function": None}) for each in talk.tools)}
    )


def test_ids_are_those_of_transformers_for_a_whole_conversation() -> None:
    talk = Conversation(system="S", tools=[add], turns=["What is 1 + 2?"], documents=[{"title": "t", "text": "x"}])
    talk = talk.answer(thinking="add them", tool_calls=[ToolCall(name="add", arguments={"a": 1, "b": 2})]).result("3")
    talk = talk.answer("It is 3.").user("Thanks!")
    for name, text in model_templates.ALL.items():
        lacks = ChatTemplate(text, {}).gaps()  # what we write for a template is no text of transformers
        if lacks.calls:
            continue
        asked, tools = (talk.model_copy(update={"tools": ()}), None) if lacks.tools else (talk, [add])
        expected = apply.theirs("bpe").apply_chat_template(
            talk.messages(), tools=tools, documents=[{"title": "t", "text": "x"}], chat_template=text,
            add_generation_prompt=True, return_dict=False,
        )  # fmt: skip
        assert list(asked.prompt(MODELS[name]).ids) == expected, name


def test_no_second_begin_token() -> None:
    """A template that writes it, for a tokenizer that puts it before every text itself."""
    tokenizer = apply.ours("sentencepiece_inner")
    assert tokenizer.bos_token_ids == (1,)
    model = Model(tokenizer, ChatTemplate("{{ bos_token }}{{ messages[0].content }}", {"bos_token": "<s>"}))
    ids = Conversation(turns=["stop"]).prompt(model).ids
    assert ids.count(1) == 1 and ids[0] == 1


def test_an_answer_that_begins_with_a_space_is_sent_back_as_its_own_tokens() -> None:
    """With sentencepiece, by its text alone and with what was generated: the cached prefix goes on."""
    tokenizer = apply.ours("sentencepiece_inner")
    template = "{% for m in messages %}{{ m.role }}:{{ m.content }}{{ eos_token }}{% endfor %}assistant:"
    model = Model(tokenizer, ChatTemplate(template, {"bos_token": "<s>", "eos_token": "</s>"}))
    ids = {tokenizer.id_to_token(id): id for id in range(tokenizer.vocab_size)}
    spoken = [ids[each] for each in ("▁stop", "op", "</s>")]
    talk = Conversation(turns=["a"])
    before = talk.prompt(model).ids
    turn = parse_answer(spoken, tokenizer, AnswerFormat(), before=before)
    assert turn.content == " stopop"
    for answered in (talk.with_turn(turn).user("b"), talk.answer(turn.content).user("b")):
        prompt = answered.prompt(model)
        assert prompt.ids[: len(before) + 3] == (*before, *spoken)
        assert set(prompt.answers.values()) <= {"kept"}


@pytest.mark.parametrize("field", THOUGHT_FIELDS)
def test_a_thought_is_read_by_every_name_and_a_result_by_its_older_role(field: str) -> None:
    call = {"id": "c", "function": {"name": "f", "arguments": {}}}
    messages = [
        {"role": "user", "content": "a"}, {"role": "assistant", "content": [], field: "hm", "tool_calls": [call]},
        {"role": "function", "name": "f", "content": "3"},
    ]  # fmt: skip
    _, answered, result = Conversation.from_messages(messages).turns
    assert isinstance(answered, AssistantTurn) and (answered.content, answered.thinking) == ("", "hm")
    assert result == ResultTurn(content="3", name="f")
