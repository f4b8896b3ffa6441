"""The chat: answers as they come, branches on the cached prefix, tools that fail or hang; nothing of it is markup."""

from __future__ import annotations

import html
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import workbench
from tests.helpers.widgets import words
from tests.patience import until
from tests.widgets.canned import is_golden
from workbench import stop_button
from workbench.engine.load import load
from workbench.engine.runner import Runner
from workbench.prompt.conversation import Conversation
from workbench.prompt.turns import ToolCall
from workbench.trace.agent_events import (
    AgentEvent,
    AgentFinished,
    AnswerPiece,
    CallFinished,
    CallStarted,
    RoundFinished,
    RoundStarted,
)
from workbench.trace.events import Stepped
from workbench.widgets import Chat
from workbench.widgets.chat.data import ChatTree, Exchange
from workbench.widgets.chat.picture import draw_chat

WORDS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)
TAGS = {"style", "div", "span", "button", "details", "summary", "code", "small", "i"}
SYSTEM = "You answer questions about Python in one short sentence, and say so if you do not know. " * 3


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    runner = load("demo", backend="eager", prefix="radix", page_size=16)
    yield runner
    runner.set_owner(None)
    runner.set_listener(None)


@pytest.fixture
def chat(runner: Runner) -> Iterator[Chat]:
    chat = Chat(runner, system=SYSTEM, max_tokens=6, temperature=0, ignore_eos=True)
    yield chat
    chat.close()
    chat.wait()


def exchange_of(question: str, thought: str, text: str, call: str, result: str, error: str) -> Exchange:
    """Return an exchange as an agent's events make it: a thought, a call with its result, and an answer."""
    made = ChatTree(Conversation()).add(question)
    talk = Conversation(turns=[question]).answer("", thought, [ToolCall(name=call, arguments={call: text})])
    talk = talk.result(result).answer(text)
    events: list[AgentEvent] = [
        RoundStarted(0.0, prompt_tokens=9),
        *(AnswerPiece(0.0, text=each, channel="thought") for each in thought),
        AnswerPiece(0.0, text='{"name": ', channel="call"),
        RoundFinished(0.0, prompt_tokens=9, cached_tokens=4, computed_tokens=5, output_tokens=7, thinking_tokens=2),
        CallStarted(0.0, name=call, arguments={call: text}),
        CallFinished(0.0, name=call, result=result, error=error, printed=text, seconds=0.5),
        RoundStarted(0.0, round=1, prompt_tokens=20),
        *(AnswerPiece(0.0, round=1, text=each) for each in text),
        RoundFinished(0.0, round=1, prompt_tokens=20, cached_tokens=16, computed_tokens=4, output_tokens=3, ttft=0.1),
        AgentFinished(0.0, stop_reason="end_turn", result=type("Result", (), {"conversation": talk})()),
    ]
    for event in events:
        made.add_event(event)
    return made


@given(WORDS, WORDS, WORDS, WORDS, WORDS, st.sampled_from(["", "<b>broke</b>\nand more"]))
@example("<script>", "</details>", '"><img>', "<i>", "</code><b>", "")
def test_every_text_is_escaped_and_none_is_lost(
    question: str, thought: str, text: str, call: str, result: str, error: str
) -> None:
    made = exchange_of(question, thought, text, call, result, error)
    assert [part.kind for part in made.parts] == ["thought", "call", "text"]
    assert [made.parts[0].text, made.parts[2].text, made.parts[1].name] == [thought, text, call]
    drawn = draw_chat([made])
    inside = re.sub(r"<style>.*?</style>", "", drawn, flags=re.S)
    assert set(re.findall(r"</?([a-zA-Z!]\w*)", inside)) <= TAGS
    regions = re.findall(r'data-grows="[^"]*">(.*?)</div>', inside, re.S)
    assert [words(each, "") for each in regions] == [thought, text] and question in words(drawn, "")
    assert "prompt 9 = 4 cached + 5 computed" in words(drawn, "") and "round 2" in words(drawn, "")
    assert all(each.cached_tokens + each.computed_tokens == each.prompt_tokens for each in made.rounds)
    assert ("✗" in words(inside.replace(html.escape(question), ""), "")) >= bool(error)


def test_a_picture_of_an_exchange_folds_its_thought() -> None:
    assert is_golden("chat", draw_chat([exchange_of("a", "b", "c", "d", "e", "<b>broke</b>")]))


def test_it_streams_what_the_agent_gives(chat: Chat, runner: Runner) -> None:
    sent: list[Any] = []
    chat.talk.send = lambda message, *_: sent.append(message)  # type: ignore[method-assign] (what goes to the browser)
    chat.send("What is a list?")
    assert chat.running and chat.composer.running
    assert chat.wait() and not chat.running
    alone = workbench.agent(runner, system=SYSTEM, max_tokens=6, temperature=0, ignore_eos=True)
    result = alone.run("What is a list?")
    assert chat.last is not None and chat.last.parts[0].text == result.answer
    assert chat.conversation == result.conversation and chat.last.stop_reason == "max_tokens"
    assert result.answer in words(chat.talk.content, "") and result.answer in words(chat.picture(), "")
    assert all(piece in chat.talk.content for message in sent for piece in message["pieces"])
    assert "6 tokens generated" in words(chat.talk.content, "")


def test_the_second_turn_computes_what_is_new_and_no_more(chat: Chat, runner: Runner) -> None:
    """Counted in the engine's steps, not in what the chat says of itself."""
    steps: list[int] = []
    runner.set_listener(lambda event: steps.append(event.prefill_tokens) if isinstance(event, Stepped) else None)
    known = 0
    for question in ("What is a queue?", "And a stack?", "And a heap?"):
        steps.clear()
        chat.send(question)
        assert chat.wait() and chat.last is not None
        (used,) = chat.last.rounds
        assert sum(steps) == used.computed_tokens == used.prompt_tokens - used.cached_tokens
        assert used.cached_tokens >= (known - 1) // 16 * 16 and sum(steps) < used.prompt_tokens - known + 32
        known = used.prompt_tokens + used.output_tokens


def test_a_branch_begins_on_the_cached_prefix_before_the_edit(chat: Chat, runner: Runner) -> None:
    chat.send("What is a list?")
    assert chat.wait()
    chat.send("What is a tuple?")
    assert chat.wait()
    first = chat.conversation
    second = chat.last
    assert second is not None and second.rounds[0].cached_tokens >= 16
    chat.edit(second.number, "What is a set?")
    assert chat.wait()
    other = chat.last
    assert other is not None and other.branch == (1, 2) and chat.conversation.turns[:2] == first.turns[:2]
    shared = [a == b for a, b in zip(first.prompt(runner).ids, chat.conversation.prompt(runner).ids, strict=False)]
    edit = shared.index(False)
    assert other.rounds[0].cached_tokens >= edit // 16 * 16 - 16 and other.rounds[0].cached_tokens <= edit
    assert "2/2" in words(chat.picture(), "")
    chat._pick(f"branch:{other.number}:0")
    assert chat.last is second and chat.conversation == first and "1/2" in words(chat.picture(), "")
    chat.again(second.number)
    assert chat.wait() and chat.last is not None and chat.last.branch == (2, 3)
    assert chat.last.question == second.question
    chat._pick("branch:1:7")  # there is none: nothing happens
    assert chat.last.branch == (2, 3)


def test_again_draws_with_a_seed_of_its_own(runner: Runner) -> None:
    settings = {"max_tokens": 6, "temperature": 1.5, "ignore_eos": True}
    chat = Chat(runner, seed=7, **settings)
    answers = []
    for ask in (lambda: chat.send("What is a list?"), lambda: chat.again(1), lambda: chat.again(1)):
        ask()
        assert chat.wait() and chat.last is not None
        answers.append(chat.last.parts[0].text)
    drawn = [workbench.agent(runner, seed=seed, **settings).run("What is a list?").answer for seed in (7, 8, 9)]
    assert answers == drawn and len(set(drawn)) == 3
    chat.close()


def test_an_edit_is_written_in_the_field_and_can_be_left(chat: Chat) -> None:
    chat._on_message({"last": True})  # there is none yet
    assert not chat.composer.notice
    chat._on_message({"send": "  What is a list?  "})
    assert chat.wait() and chat.last is not None and chat.last.question == "What is a list?"
    chat._pick("edit:1")
    assert chat.composer.draft == "What is a list?" and "editing message 1" in chat.composer.notice
    chat._on_message({"cancel": True})
    assert chat.composer.draft == chat.composer.notice == ""
    chat._on_message({"last": True})
    chat._on_message({"send": "What is a dict?"})
    assert chat.wait() and chat.last.branch == (1, 2) and not chat.composer.notice
    chat._on_message({"send": "   "})
    chat._on_message("nonsense")
    chat._on_message({"send": 3})
    assert not chat.running and len(chat.tree.exchanges) == 2


@pytest.mark.parametrize("by", ["method", "the kernel's stop button"])
def test_stop_keeps_what_has_come(runner: Runner, by: str) -> None:
    chat = Chat(runner, max_tokens=900, ignore_eos=True)
    chat.send("Go on.")
    until(lambda: chat.last is not None and chat.last.parts and len(chat.last.parts[0].pieces) >= 2)
    chat.send("Meanwhile?")  # one at a time
    assert len(chat.tree.exchanges) == 1 and chat._answering in stop_button._STOPPABLE
    for each in tuple(stop_button._STOPPABLE) if by != "method" else (chat,):
        each.stop()
    assert chat.wait() and chat.last is not None and chat.last.stop_reason == "cancelled"
    text = chat.last.parts[0].text
    assert chat.conversation.turns[-1].content == text and "stopped" in words(chat.picture(), "")
    assert chat.last.conversation is not None
    chat.close()


def forced(runner: Runner, tool: Callable[..., Any], **settings: Any) -> Chat:
    """Return a chat whose first answer calls `tool`, whatever the model would say."""
    values = {"tool_choice": "required", "max_tokens": 60, "temperature": 0, "limits": {"rounds": 1}, **settings}
    return Chat(runner, [tool], **values)


def test_a_tool_that_hangs_can_be_stopped(runner: Runner) -> None:
    ends, began = threading.Event(), threading.Event()

    def wait_for(name: str) -> str:
        """Wait."""
        began.set()
        ends.wait()
        return name

    chat = forced(runner, wait_for)
    chat.send("Is anyone there?")
    until(began.is_set)
    until(lambda: "running …" in words(chat.picture(), ""))
    chat.stop()
    assert chat.wait() and chat.last is not None and chat.last.stop_reason == "cancelled"
    assert chat.conversation.unanswered_calls == []
    ends.set()
    chat.close()


def test_what_a_tool_raises_is_one_line(runner: Runner) -> None:
    def broken(name: str) -> str:
        """Break."""
        raise ValueError("no <b>such</b> name\nin two lines")

    chat = forced(runner, broken)
    chat.send("Go.")
    assert chat.wait() and chat.last is not None
    (call,) = (part for part in chat.last.parts if part.kind == "call")
    assert call.error and "no <b>such</b> name" in (call.result or "")
    fault = re.findall(r'class="wb-fault">(.*?)</span>', chat.picture(), re.S)
    assert len(fault) == 1 and "\n" not in fault[0] and "in two lines" in fault[0]
    chat.close()


def test_a_refused_conversation_is_one_line_and_not_part_of_the_next(runner: Runner) -> None:
    chat = Chat(runner, max_tokens=4, temperature=0)
    chat.send("word " * 1500)
    assert chat.wait() and chat.last is not None
    assert "fit together" in chat.last.error and 'role="alert"' in chat.picture()
    assert "the next message is asked without it" in words(chat.picture(), "")
    chat.send("Short.")
    assert chat.wait() and not chat.last.error
    assert [turn.role for turn in chat.conversation.turns] == ["user", "assistant"]
    chat.close()


def test_a_conversation_is_gone_on_with(runner: Runner) -> None:
    talk = Conversation(system="x", turns=["a"]).answer("b", thinking="t").user("c").answer("d")
    chat = Chat(runner, conversation=talk, max_tokens=4)
    assert chat.conversation.turns == talk.turns and [each.question for each in chat.tree.path()] == ["a", "c"]
    assert all(f">{each}<" in chat.picture() for each in "abtcd")
    chat.close()


def test_an_agent_is_taken_as_it_is(runner: Runner) -> None:
    made = workbench.agent(runner, max_tokens=4)
    assert Chat(made).agent is made


def test_without_a_prefix_cache_it_says_so() -> None:
    assert "computes its whole prompt" in Chat(load("demo", backend="eager")).picture()
