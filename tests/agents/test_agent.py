"""Agents: rounds until an answer, every end by its name, and a conversation that can always go on."""

from __future__ import annotations

import itertools
import json
import re
import sys
import threading
from typing import Any

import pytest

import workbench
from tests.agents.script import CONTROLS, add, call, pages_in_use, runner, say, script
from tests.patience import limit
from workbench.agents import rounds
from workbench.agents.calls import call_tool, cut
from workbench.agents.result import STOP_REASONS, AgentResult
from workbench.constrained.grammar import GrammarVocabulary
from workbench.engine.runner import Runner
from workbench.errors import WorkbenchError
from workbench.prompt.conversation import Conversation
from workbench.prompt.own_template import NAMES, TEMPLATE
from workbench.prompt.templates import ChatTemplate
from workbench.prompt.tools import Tool, declare
from workbench.prompt.turns import AssistantTurn, ToolCall
from workbench.trace.agent_events import (
    AgentFinished,
    AnswerPiece,
    CallFinished,
    CallStarted,
    RoundFinished,
    RoundStarted,
)
from workbench.trace.events import Event

FREE = threading.Event()


def shout(text: str) -> str:
    """Say a text loudly."""
    return text.upper()


def fail(text: str) -> str:
    """Fail."""
    raise ValueError(text)


def hang() -> str:
    """Never return."""
    FREE.wait(limit(60))
    return "late"


def flood() -> str:
    """Return ten megabytes."""
    return "x" * 10_000_000


def not_a_number() -> float:
    """Return what JSON has no number for."""
    return float("nan")


def print_much(then: str) -> str:
    """Print ten thousand characters, and fail with as many, or return."""
    print("p" * 10_000)
    if then == "fail":
        raise ValueError("f" * 10_000)
    return then


def odd() -> Any:
    """Return something that is no JSON."""
    return object()


def leave() -> None:
    """Leave the interpreter."""
    sys.exit(3)


def say_and_return() -> str:
    """Print, and return."""
    print("beside")
    return "returned"


def nest(x: list) -> str:
    """Take a list."""
    return "taken"


def surrogate() -> str:
    """Return a lone surrogate."""
    return "a\ud800b"


TOOLS = [not_a_number, print_much, add, shout, fail, hang, flood, odd, leave, say, say_and_return, nest, surrogate]
CLIENT = Tool(name="ask", description="Ask the user.", parameters={"type": "object", "properties": {}})


def run(*answers: str, question: Any = "q", tools: Any = TOOLS, on: Runner | None = None, **more: Any) -> AgentResult:
    return workbench.agent(on or runner(), tools, **{**script(*answers), **more}).run(question)


def test_rounds_until_an_answer() -> None:
    on = runner()
    result = run(
        "one moment" + call("add", a=1, b=2) + call("shout", text="é"), call("add", a=3, b=4), "It is 7.", on=on
    )
    assert (result.answer, result.stop_reason, result.calls) == ("It is 7.", "end_turn", ())
    assert [[(each.name, each.result) for each in one.calls] for one in result.rounds] == [
        [("add", "3"), ("shout", "É")], [("add", "7")], []
    ]  # fmt: skip
    assert [turn.role for turn in result.conversation.turns] == ["user", "assistant", "tool", "tool", "assistant",
                                                                 "tool", "assistant"]  # fmt: skip
    assert result.conversation.turns[1].content == "one moment" and pages_in_use(on) == 0
    assert result.usage.output_tokens == sum(each.usage.output_tokens for each in result.rounds)
    assert json.loads(json.dumps(result.as_json()))["turns"][-1]["content"] == "It is 7."
    assert 'add({"a": 1, "b": 2}) → 3' in result._display_table().text()
    ids = [each.id for turn in result.conversation.turns if isinstance(turn, AssistantTurn) for each in turn.tool_calls]
    assert len({*ids}) == 3 and all(re.fullmatch("[a-z0-9]{9}", each) for each in ids)
    prompt = result.conversation.user("more").prompt(on)
    assert [how for how in prompt.answers.values()] == ["kept"] * 3


@pytest.mark.parametrize(
    ("made", "result"),
    [
        (call("fail", text="no luck"), "error: no luck"),
        (call("fail", text=""), "error: ValueError"),
        (call("odd"), "error: the tool returned an object, not JSON; return text, numbers, lists or dicts"),
        (call("leave"), "error: the tool called sys.exit(3)"),
        (call("say"), "printed words\n"),
        (call("say_and_return"), "returned"),
        (call("surrogate"), "a?b"),
        (
            call("nest", x=eval("[" * 70 + "]" * 70)),
            "error: the arguments are not a JSON object, or are nested too deep",
        ),
        (call("flood"), "x" * 162 + "\n... (cut: 10000000 characters in all)"),
    ],
)
def test_whatever_a_tool_does_is_a_result(made: str, result: str, capsys: pytest.CaptureFixture[str]) -> None:
    done = run(made, "so", limits={"result_characters": 200})
    assert done.rounds[0].calls[0].result == result and done.answer == "so"
    assert capsys.readouterr().out == ""
    assert done.rounds[0].calls[0].printed == {"say": "printed words\n", "say_and_return": "beside\n"}.get(
        done.rounds[0].calls[0].name, ""
    )


@pytest.mark.parametrize(
    ("arguments", "result"),
    [
        ({"a": 10**400, "b": 0}, cut(str(10**400), 200)), ({"a": 1e300, "b": 0.0}, "1e+300"),
        ({"a": 1e300, "b": "1"}, "error: b: must be integer, not '1'"),
        ({"a": 1.5, "b": 1}, "error: a: must be integer, not 1.5"),
    ],
)  # fmt: skip
def test_arguments_of_any_size_are_held_against_the_schema(arguments: dict[str, Any], result: str) -> None:
    assert call_tool(declare(add), ToolCall(name="add", arguments=arguments), 200).result == result


def test_calls_of_one_round_run_at_once_and_one_that_hangs_does_not_hold_up() -> None:
    done = run(call("hang") + call("hang") + call("add", a=1, b=1), "so", limits={"tool_seconds": 0.3})
    assert [each.result for each in done.rounds[0].calls] == ["error: no result within 0.3 s"] * 2 + ["2"]
    assert done.answer == "so"
    FREE.set()


def test_the_events_of_a_run() -> None:
    on, heard = runner(), []
    on.set_listener(heard.append)
    agent = workbench.agent(on, [add], **script("a" + call("add", a=1, b=2), "3"))
    events = list(agent.stream("q"))
    kinds = [type(each) for each in events if not isinstance(each, AnswerPiece)]
    assert kinds == [RoundStarted, RoundFinished, CallStarted, CallFinished, RoundStarted, RoundFinished, AgentFinished]
    pieces = [each for each in events if isinstance(each, AnswerPiece)]
    first = [each for each in pieces if each.round == 0]
    assert "".join(each.text for each in first if each.channel == "text") == "a"
    assert json.loads("".join(each.text for each in first if each.channel == "call"))["arguments"] == {"a": 1, "b": 2}
    started = next(each for each in events if isinstance(each, CallStarted))
    assert (started.name, started.arguments) == ("add", {"a": 1, "b": 2})
    listened = [each for each in heard if type(each) in kinds]
    assert [type(each) for each in listened] == kinds and isinstance(heard[0], Event)
    ends = [each for each in (events[-1], listened[-1]) if isinstance(each, AgentFinished)]
    assert ends[0].result is not None and ends[0].result.answer == "3" and ends[1].result is None
    assert {each.request for each in events if isinstance(each, RoundFinished)} <= {
        each.request_id for each in heard if each.request_id
    }


def test_a_tool_without_a_function_is_the_callers() -> None:
    done = run(call("ask") + call("add", a=1, b=2), "thanks", tools=[CLIENT, add])
    assert done.stop_reason == "tool_use" and [each.name for each in done.calls] == ["ask"]
    assert [each.result for each in done.rounds[0].calls] == ["3"]
    talk = done.conversation.result("blue", done.calls[0])
    assert [turn.content for turn in talk.turns[2:]] == ["blue", "3"]  # in the order of the calls
    on = runner()
    agent = workbench.agent(on, [CLIENT, add], **script("never", "thanks"))
    assert agent.run(talk).answer == "thanks"
    with pytest.raises(WorkbenchError, match="the call of 'ask' has no result"):
        agent.run(done.conversation)


def test_each_limit_has_its_name() -> None:
    asks = call("add", a=1, b=1)
    two = run(asks, limits={"rounds": 2})
    assert two.stop_reason == "max_rounds" and len(two.rounds) == 2
    assert run("abcdef", max_tokens=3).stop_reason == "max_tokens"
    four = run("abcdef", max_tokens=30, limits={"tokens": 4})
    assert four.stop_reason == "max_total_tokens" and four.answer == "abcd"
    several = run(asks, limits={"tokens": 2 * len(asks)})
    assert several.stop_reason == "max_total_tokens" and several.usage.output_tokens <= 2 * len(asks)
    stopped = run("abc END def", stop="END")
    assert (stopped.stop_reason, stopped.answer) == ("stop_sequence", "abc ")
    full = run("abc" * 400, on=runner(256), tools=[], max_tokens=1000)
    assert full.stop_reason == "max_context"
    cut = run(call("shout", text="long " * 30), max_tokens=70)
    assert cut.stop_reason == "max_tokens" and "error: not run" in cut.conversation.turns[-1].content
    assert {"max_rounds", "max_tokens", "max_total_tokens", "stop_sequence", "max_context"} <= set(STOP_REASONS)


def test_the_time_limit_cancels_an_answer_and_a_call() -> None:
    """On a clock that counts how often it is read, and on one that stands where the test puts it."""
    on, reads = runner(), itertools.count()
    on.clock = lambda: float(next(reads))
    done = run("abc" * 1000, on=on, max_tokens=3000, limits={"seconds": 1000})
    assert done.stop_reason == "max_seconds" and 0 < len(done.answer) < 3000 and pages_in_use(on) == 0
    free = {"seconds": None}
    assert run("and", question=done.conversation.user("go on"), on=on, limits=free).answer == "and"
    on, now = runner(), [0.0]
    on.clock = lambda: now[0]
    events = workbench.agent(on, TOOLS, **script(call("hang")), limits={"seconds": 1000}).stream("q")
    FREE.clear()
    for event in events:  # half a second is left when the call begins, and none when it has ended
        now[0] = {CallStarted: 999.5, CallFinished: 1000.0}.get(type(event), now[0])
    FREE.set()
    done = events.result
    assert done.stop_reason == "max_seconds" and done.rounds[0].calls[0].result == "error: no result within 0.5 s"


def test_the_time_limit_holds_while_a_grammar_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be in a part that cannot be interrupted: no event comes."""
    on, release = runner(), threading.Event()
    compiled = GrammarVocabulary.compile
    monkeypatch.setattr(GrammarVocabulary, "compile", lambda *given: (release.wait(limit(60)), compiled(*given))[1])
    done = run("a", on=on, tools=[], response_format={"kind": "choices", "choices": ["a"]}, limits={"seconds": 0.2})
    assert done.stop_reason == "max_seconds" and not release.is_set()
    assert not on.has_unfinished_requests and pages_in_use(on) == 0
    release.set()
    assert run("and", question=done.conversation.user("go on"), on=on, tools=[]).answer == "and"


@pytest.mark.parametrize(("limits", "least", "most"), [
    ({"seconds": 5.0, "tool_seconds": 60.0}, 0.0, 5.0), ({"seconds": 600.0, "tool_seconds": 2.0}, 2.0, 2.0),
])  # fmt: skip
def test_a_call_has_the_seconds_of_a_tool_or_what_the_run_has_left(
    limits: dict[str, float], least: float, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, carried = list[float](), rounds.carry_out

    def watched(calls: Any, seconds: float, *rest: Any) -> Any:
        given.append(seconds)
        return carried(calls, seconds, *rest)

    monkeypatch.setattr(rounds, "carry_out", watched)
    assert run(call("add", a=1, b=2), "3", limits=limits).answer == "3"
    assert given and all(least <= each <= most for each in given)


def test_a_run_that_is_closed_or_interrupted_while_tools_run_can_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    on = runner()
    FREE.clear()
    agent = workbench.agent(on, TOOLS, **script(call("add", a=1, b=2) + call("hang"), "fine"))
    events = agent.stream("q")
    assert any(isinstance(event, CallFinished) for event in events)
    events.close()
    talk = events.result.conversation
    assert events.result.stop_reason == "cancelled" and not events.result.calls
    assert [turn.content for turn in talk.turns[2:]] == ["3", "error: the run was stopped"]
    assert agent.run(talk.user("go on")).answer == "fine"

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("workbench.agents.rounds.carry_out", interrupted)
    events = agent.stream("q")
    with pytest.raises(KeyboardInterrupt):
        list(events)
    FREE.set()
    assert events.result.stop_reason == "cancelled" and not events.result.calls


def test_a_template_that_refuses_results_ends_the_run_with_its_words() -> None:
    on = runner()
    assert on.chat_template is not None
    refusing = TEMPLATE.replace("{%- elif message.role == 'tool' %}", "{%- elif message.role == 'tool' %}"
                                  "{{ raise_exception('no results here') }}")  # fmt: skip
    on.loaded_model.__dict__["chat_template"] = ChatTemplate(refusing, NAMES, "test")
    done = run(call("add", a=1, b=2), on=on)
    assert done.stop_reason == "error" and "no results here" in done.error
    assert done.rounds[0].calls[0].result == "3"


def test_stop_and_close_cancel_everything() -> None:
    on = runner()
    agent = workbench.agent(on, TOOLS, **script("abc" * 2000), limits={"tokens": None})
    with agent.stream("q") as events:
        for number, _ in enumerate(events):
            if number == 5:
                break
    assert events.result.stop_reason == "cancelled" and pages_in_use(on) == 0 and not on.has_unfinished_requests
    events = agent.stream("q")
    for number, _ in enumerate(events):
        if number == 5:
            events.stop()
    assert events.result.stop_reason == "cancelled" and pages_in_use(on) == 0
    assert run("on", question=events.result.conversation.user("go on"), on=on).answer == "on"


def test_thoughts_and_results_of_a_later_question() -> None:
    on = runner()
    first = run("hm<|/think|>" + call("add", a=1, b=2), "<|/think|>3", on=on, thinking={"budget_tokens": 8})
    assert first.rounds[0].thinking == "hm" and first.rounds[0].usage.thinking_tokens == 2
    again = run("-", "-", "four", question=first.conversation.user("and 4?"), on=on)
    assert again.answer == "four" and len(again.conversation.turns) == 6


def test_results_that_are_too_long_for_the_context_are_cut() -> None:
    done = run(
        call("flood") + call("flood"),
        "so",
        on=runner(512),
        tools=[flood],
        max_tokens=100,
        limits={"result_characters": 5000},
    )
    assert done.answer == "so" and done.stop_reason == "end_turn"
    assert all("(cut: " in turn.content for turn in done.conversation.turns[2:4])


def test_what_cannot_work_is_one_sentence() -> None:
    on = runner()
    for values, words in [
        ({"tool_choice": "ad"}, "tool_choice: 'ad' is unknown; did you mean 'add'?"),
        ({"tool_choice": "required", "tools": []}, "'required' needs a tool"),
        ({"tools": [add, add]}, "two tools are named 'add'"),
        ({"tools": [{"name": "f", "parameters": 3}]}, "tool 'f': has no schema"),
        (
            {"tools": [{"name": "f", "parameters": {"type": "object", "not": {}}}], "tool_choice": "required"},
            "tool 'f': parameters: the keyword",
        ),
        ({"limits": {"round": 3}}, "limits: round: unknown key; did you mean 'rounds'?"),
        ({"n": 2}, "leave out n"),
        ({"max_token": 2}, "max_token: unknown key"),
    ]:
        with pytest.raises(WorkbenchError) as error:
            workbench.agent(on, **{"tools": [add], **values})
        assert words in str(error.value)
    agent = workbench.agent(on, [add], **script("a"))
    with pytest.raises(WorkbenchError, match="has no turns"):
        agent.run(Conversation())
    with pytest.raises(WorkbenchError, match="ends with the assistant's turn"):
        agent.run(Conversation(turns=["a"]).answer("b"))
    with pytest.raises(WorkbenchError, match="the prompt has"):
        agent.run("x" * 5000)
    assert agent.run("a").answer == "a" and CONTROLS["<|tool|>"]


@pytest.mark.parametrize("then", ["fail", "go on"])
def test_nothing_of_a_call_is_longer_than_its_limit(then: str) -> None:
    made = call("print_much", then=then) + call("not_a_number")
    done, nan = run(made, "so", limits={"result_characters": 200}).rounds[0].calls
    assert len(done.printed) == 200 and "cut: 10001 characters" in done.printed
    assert len(done.result) == 200 if then == "fail" else done.result == then
    assert nan.error and nan.result.startswith("error: ")


def test_a_conversations_own_settings_come_before_the_agents() -> None:
    agent = workbench.agent(runner(), [add], system="agent's", template_arguments={"a": 1, "b": 1}, **script("so"))
    own = Conversation(system="its own", turns=["q"], template_arguments={"b": 2, "c": 2})
    talk = agent.run(own).conversation
    assert talk.system == "its own" and talk.template_arguments == {"a": 1, "b": 2, "c": 2}
    plain = agent.run("q").conversation
    assert plain.system == "agent's" and plain.template_arguments == {"a": 1, "b": 1} and plain.tools == agent.tools


@pytest.mark.parametrize("left", [None, 50, 21, 14, 10, 3])
def test_a_thought_leaves_the_answer_its_tokens(left: int | None) -> None:
    """With its two control tokens it takes what the run has left beside the answer's own, and no more."""
    agent = workbench.agent(runner(), [], max_tokens=10, thinking={"budget_tokens": 20})
    asked = Conversation(turns=["q"])
    values = agent.sampling_of(asked, agent.answer_format(()), left)
    assert values["max_tokens"] == min(10, left or 10)
    wanted = 20 if left is None else min(20, max(0, left - values["max_tokens"] - 2))
    assert values["thinking"].budget_tokens == wanted
