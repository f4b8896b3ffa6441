"""The conversations of demo-chat: results are the tools', sides are apart, the template is append-only."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from experiments import chat_phrases
from experiments.chat_conversations import DECLARATIONS, KINDS, NO_CALLS, ChatSample, draw
from experiments.chat_draw import HELD_OUT_NUMBER, Draw, Side, functions, is_held_out
from experiments.chat_exchanges import TOOLS, columns, run_tool
from experiments.chat_format import chat_tokenizer, encode, segments
from tests.thorough import tries
from tools.training.train_demo import DEMO
from workbench.agents.calls import call_tool
from workbench.prompt.assemble import Prompt
from workbench.prompt.conversation import Conversation
from workbench.prompt.own_template import ASSISTANT, THINK, TURN, own_template
from workbench.prompt.templates import ChatTemplate
from workbench.prompt.tokenization.tokenizer import Tokenizer
from workbench.prompt.tools import declare
from workbench.prompt.turns import ToolCall

SIDES = st.sampled_from(["training", "held_out"])
SEEDS = st.integers(0, 10**9)
INNER = chat_tokenizer(DEMO / "target" / "tokenizer.json")


@dataclass
class Model:
    """Stand in for demo-chat without its weights."""

    tokenizer: Tokenizer
    chat_template: ChatTemplate | None


TOKENIZER = Tokenizer(INNER)
MODEL = Model(TOKENIZER, own_template(TOKENIZER))


def prompt(sample: ChatSample, turns: int | None = None, thinking: bool = False) -> Prompt:
    """Return the prompt of the first `turns` messages, where the assistant begins; by default the whole, ended."""
    tools = [TOOLS[name] for name in sample.tools]
    talk = Conversation.from_messages(
        sample.messages()[:turns], tools, template_arguments={"enable_thinking": thinking}
    )
    return talk.prompt(MODEL, add_generation_prompt=turns is not None)


@settings(max_examples=tries(60))
@given(SIDES, SEEDS)
def test_every_conversation_is_learned_as_the_library_assembles_it(side: Side, seed: int) -> None:
    """With thoughts, cut ones too, calls and results: the same ids."""
    sample = draw(side, seed)
    ids, learned = encode(INNER, segments(sample.messages(), sample.declarations, sample.kept < 1))
    assert tuple(ids) == prompt(sample).ids
    assert len(learned) == len(ids)


@settings(max_examples=tries(60))
@given(SIDES, SEEDS)
def test_an_old_turn_renders_as_when_it_was_new(side: Side, seed: int) -> None:
    """A prompt for an assistant's turn, thinking or not, and what the model then writes, begin every later prompt."""
    sample = draw(side, seed)
    messages = sample.messages()
    whole = prompt(sample).text
    for place, message in enumerate(messages):
        if message["role"] == "assistant":
            before = prompt(sample, place, bool(message.get("reasoning_content"))).text
            assert whole.startswith(before)
            assert whole[len(before) :].split(TURN)[0].strip()


@settings(max_examples=tries(60))
@given(SIDES, SEEDS)
def test_the_model_learns_exactly_what_it_will_write(side: Side, seed: int) -> None:
    """All of an assistant's turn but its opening; nothing else. A thought that was cut ends without being learned."""
    sample = draw(side, seed)
    ids, learned = encode(INNER, segments(sample.messages(), sample.declarations, sample.kept < 1))
    open_ids = {INNER.token_to_id(name) for name in (ASSISTANT, THINK)}
    end, close = INNER.token_to_id(TURN), INNER.token_to_id("<|/think|>")
    inside = False
    for id, learns in zip(ids, learned, strict=True):
        if id in open_ids:
            assert not learns
            inside = True
        elif id == close and sample.kept < 1:
            assert not learns
        else:
            assert learns == inside
            inside = inside and id != end


@settings(max_examples=tries(100))
@given(SIDES, SEEDS, st.sampled_from([None, *KINDS]))
def test_results_are_the_tools_and_answers_hold_them(side: Side, seed: int, kind: str | None) -> None:
    sample = draw(side, seed, kind)
    assert sample.exchanges
    for exchange in sample.exchanges:
        assert exchange.tools <= set(sample.tools)
        assert len(exchange.thoughts) == len(exchange.rounds) + 1 and all(exchange.thoughts)
        assert exchange.wanted and all(text in exchange.answer for text in exchange.wanted)
        assert "{" not in exchange.question + exchange.answer
        for call in (call for calls in exchange.rounds for call in calls):
            parameters = DECLARATIONS[call.name]["function"]["parameters"]
            assert list(call.arguments) == parameters["required"] == list(parameters["properties"])
            assert call.result == run_tool(call.name, call.arguments) and call.result.isascii()
            asked = ToolCall(name=call.name, arguments=call.arguments)
            assert call_tool(declare(TOOLS[call.name]), asked, 8000).result == call.result  # as the library's agent
    results = [message["content"] for message in sample.messages() if message["role"] == "tool"]
    assert results == [call.result for each in sample.exchanges for calls in each.rounds for call in calls]
    if kind is not None:
        assert sample.exchanges[-1].kind == kind or (kind == "follow_up" and len(sample.exchanges) == 1)
        assert bool(sample.exchanges[-1].rounds) == (kind not in NO_CALLS)


def _numbers(text: str) -> Iterator[str]:
    return (found for found in re.findall(r"\d+(?:\.\d+)?", text) if len(found) > 1)


@settings(max_examples=tries(150))
@given(SIDES, SEEDS)
def test_the_sides_share_no_number_and_no_function(side: Side, seed: int) -> None:
    """Of more than one digit, a question's numbers and documented names are all on its side."""
    for exchange in draw(side, seed).exchanges:
        calls = [call for calls in exchange.rounds for call in calls]
        names = [call.arguments["name"] for call in calls if call.name == "lookup"]
        assert not {name for name in names if name not in functions()[side]} & set(functions()["training"])
        assert not {name for name in names if name not in functions()[side]} & set(functions()["held_out"])
        if not names and exchange.kind not in ("no_tool", "refused", "talk"):
            for number in _numbers(exchange.question):
                assert is_held_out(number, HELD_OUT_NUMBER) == (side == "held_out"), exchange.question


def test_held_out_are_arrangements_of_words_that_training_has() -> None:
    """But for refusals: those are of anything. Lists of names and styles are not split."""
    names = {"WHO", "THINGS", "PLACES", "GOODS", "WORDS", "NAMES", "PERSONAS", "NAMED", "ASSISTANTS", "BRIEF"}
    values = {name: each for name, each in vars(chat_phrases).items() if name.isupper() and name not in names}
    groups = [(name, value) for name, value in values.items() if isinstance(value, tuple)]
    groups += [(name, each) for name, value in values.items() if isinstance(value, dict) for each in value.values()]
    assert len(groups) > 35
    for name, phrases in groups:
        assert len(set(phrases)) == len(phrases)
        training, held_out = chat_phrases.split(phrases)
        assert training and held_out and sorted((*training, *held_out)) == sorted(phrases)
        if name != "REFUSED":
            known = set().union(*map(chat_phrases.words, training))
            assert set().union(*map(chat_phrases.words, held_out)) <= known, (name, held_out)
    assert {side: len(names) > 100 for side, names in functions().items()} == {"training": True, "held_out": True}


@given(st.integers(0, 99_999), st.integers(0, 99_999), st.integers(0, 9))
def test_columns_are_the_sum_written_out(a: int, b: int, digit: int) -> None:
    """Each step is right, and has one more digit of the result than the step before it."""
    low, high = sorted((a, b))
    sums = ((a, b, "+", a + b), (high, low, "-", high - low), (a, digit, "*", a * digit))
    for first, second, operation, wanted in sums:
        before = ""
        for step in columns(str(first), str(second), operation).split(", "):
            left, total, found = re.split("[=:]", step)
            assert eval(left) == int(total)  # digits and signs alone
            assert found.endswith(before) and found[: len(found) - len(before)] in (total, total[-1])
            before = found
        assert int(before) == wanted


def test_a_conversation_is_the_same_for_its_seed_alone() -> None:
    assert draw("training", 5) == draw("training", 5) != draw("training", 6)
    assert draw("held_out", 5) != draw("training", 5)
    assert Draw("training", "1").number() == Draw("training", "1").number()
