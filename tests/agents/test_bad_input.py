"""Bad input to an agent: one clear error each, after bounded work, and the batch goes on as before."""

from __future__ import annotations

from collections import deque
from functools import cache
from typing import Any

import pytest

import workbench
from tests.agents.script import Json, add, pages_in_use, runner, script
from tests.calls import refusal_of
from workbench.engine.runner import Runner
from workbench.prompt.conversation import Conversation
from workbench.prompt.template_bounds import BASE_STEPS
from workbench.prompt.templates import ChatTemplate
from workbench.prompt.turns import ToolCall
from workbench.request import Request, SamplingParameters
from workbench.trace.events import Event, Finished

MAX_CALLS = 100_000  # of this thread, with the steps of the other request
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}"


def messages(*last: Json) -> Any:
    return lambda: Conversation.from_messages([{"role": "user", "content": "q"}, *last])


def tool(schema: Json) -> Json:
    return {"tools": [{"name": "f", "parameters": {"type": "object", "properties": {"x": schema}, "required": ["x"]}}]}


def deep(levels: int) -> Json:
    found: Json = {}
    for _ in range(levels):
        found = {"type": "object", "properties": {"x": found}}
    return found


def schema_form(schema: Json) -> Json:
    return {"response_format": {"kind": "json_schema", "json_schema": schema}}


ENDLESS = "a{1000000000}"
BAD: dict[str, tuple[Json, Any, str]] = {
    "no schema": ({"tools": [{"name": "f", "parameters": 3}]}, "q", "tool 'f': has no schema"),
    "one name": ({"tools": [add, add]}, "q", "two tools are named 'add'"),
    "a result without a call": ({}, messages({"role": "tool", "content": "1"}), "turns.1: a tool's result without a"),
    "roles out of order": ({}, messages({"role": "system", "content": "s"}), "no system message after the first turn"),
    "the assistant last": ({}, messages({"role": "assistant", "content": "s"}), "ends with the assistant's turn"),
    "an image": (
        {}, messages({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}),
        "a part of type 'image_url'; models here read text",
    ),
    "a megabyte": ({"system": "long " * 200_000}, "q", "the largest part is system"),
    "a deep schema": (schema_form(deep(10_000)), "q", "nested deeper than 100 levels"),
    "a tool's deep schema": (tool(deep(10_000)), "q", "nested more than 64 deep"),
    "a regex that explodes": ({"response_format": {"kind": "regex", "regex": ENDLESS}}, "q", "make it smaller"),
    "without tools": ({"response_format": {"kind": "regex", "regex": ENDLESS}, "tools": []}, "q", "no end was found"),
    "a tool's regex that explodes": (
        {**tool({"type": "string", "pattern": f"^{ENDLESS}$"}), "tool_choice": "required"},
        "q", "tool 'f': parameters: no end",
    ),
}  # fmt: skip


def other() -> Request:
    return Request("other", (5, 6, 7), SamplingParameters(max_tokens=30, temperature=0, ignore_eos=True))


@cache
def other_alone() -> tuple[int, ...]:
    return next(each.token_ids for each in runner().stream([other()]) if isinstance(each, Finished))


def beside(on: Runner) -> deque[Event]:
    """Return the events of another request, which is under way."""
    box: deque[Event] = deque()
    on.submit(other(), box)
    for _ in range(3):
        on.step()
    return box


def assert_unharmed(on: Runner, box: deque[Event]) -> None:
    while on.has_unfinished_requests:
        on.step()
    assert [each.token_ids for each in box if isinstance(each, Finished)] == [other_alone()]
    assert workbench.agent(on, [add], **script("b")).run("q").answer == "b" and pages_in_use(on) == 0


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_error_after_bounded_work_and_harms_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("constrained.grammar", "engine.compiling"):  # a slow machine must not end a compilation first
        monkeypatch.setattr(f"workbench.{module}.MAX_COMPILE_SECONDS", 60)
    on = runner()
    assert workbench.agent(on, [add], **script("a")).run("q").answer == "a"  # the vocabulary is ready too
    values, question, words = BAD[name]
    box = beside(on)

    def run() -> None:
        asked: Any = question() if callable(question) else question
        workbench.agent(on, **{"tools": [add], **script("a"), **values}).run(asked)

    said, calls = refusal_of(run)
    assert words in said and "\n" not in said and len(said) < 1000
    assert calls < MAX_CALLS
    assert_unharmed(on, box)


@pytest.mark.parametrize("text", [LOOPS, "{{ messages.__class__.__mro__ }}{{ ''.__class__.__subclasses__() }}"])
def test_a_hostile_template_is_one_error(text: str) -> None:
    on = runner()
    box, own = beside(on), on.chat_template
    on.loaded_model.__dict__["chat_template"] = ChatTemplate(text, {}, "test")
    said, calls = refusal_of(lambda: workbench.agent(on, **script("a")).run("q"))
    assert "chat template refuses" in said and calls < BASE_STEPS  # each call spends more than one
    on.loaded_model.__dict__["chat_template"] = own
    assert_unharmed(on, box)


def test_a_malformed_call_in_a_history_does_not_poison_it() -> None:
    on = runner()
    talk = Conversation(tools=[add], turns=["q"]).answer(tool_calls=[ToolCall.parse("add", '{"a": 1, "b"', id="x")])
    talk = talk.result("error: the arguments are not a JSON object, or are nested too deep").user("again")
    assert workbench.agent(on, [add], **script("-", "fine")).run(talk).answer == "fine"
