"""Traces are bounded in number and in bytes; what memory counts of an answer grows with what it holds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.prompt.conversation import Conversation
from workbench.prompt.turns import AssistantTurn, ToolCall
from workbench.request import SamplingParameters
from workbench.serve.call import ADMIN, Call, Caller
from workbench.serve.memory.generated_turns import GeneratedTurns
from workbench.serve.memory.tenant_store import TenantStore
from workbench.serve.watch.traces import BYTES_PER_ALTERNATIVE, CallTrace, TraceStore
from workbench.trace.events import Finished, HandedOver, Moved, Preempted

ADMINISTRATOR = Caller(scopes=frozenset({ADMIN}))
EVENT = Preempted(0.0, "r")


def trace(number: int, events: int) -> CallTrace:
    made = CallTrace(Call(str(number), "openai.chat", "m", ((1,),), SamplingParameters()))
    made.keep([EVENT] * events)
    return made


def test_a_death_and_a_handover_are_decisions_of_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    found = trace(0, 0)
    found.keep([
        HandedOver(1.0, "r", replica=2, source=1, pages=5),
        Moved(2.0, "r", replica=1, source=2, reason=f"its process ended: {__file__} failed", generated_tokens=3),
    ])  # fmt: skip
    monkeypatch.chdir(Path(__file__).parent)
    (_, shown) = found.as_json(Caller(""))["decisions"]
    assert shown["reason"] == "its process ended"  # in the words of the process it is for administrators
    handed, moved = found.as_json(ADMINISTRATOR)["decisions"]
    assert (handed["action"], handed["source"], handed["replica"]) == ("handed_over", 1, 2)
    assert handed["reason"] == "5 pages" and moved["reason"] == "its process ended: test_traces.py failed"
    assert (moved["action"], moved["source"], moved["generated_tokens"]) == ("moved", 2, 3)


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300)), max_size=12), st.integers(1, 6))
def test_traces_are_bounded_in_number_and_in_bytes(sizes: list[tuple[int, int]], size: int) -> None:
    store, added = TraceStore(size, 200_000), []
    for number, (events, more) in enumerate(sizes):
        before = store.latest()
        added.append(trace(number, events))
        store.add(added[-1])
        added[-1].keep([EVENT] * more)  # it grows while the call runs
        store.trim()
        latest = store.latest()
        assert 1 <= len(latest) <= size and latest == added[::-1][: len(latest)], "the oldest leave first"
        assert store.num_bytes <= 200_000 or len(latest) == 1
        if len(latest) <= len(before) and len(latest) < size:  # no more leave than have to
            assert store.num_bytes + before[len(latest) - 1].num_bytes > 200_000
        assert store.get(str(number), ADMINISTRATOR) is added[-1]


def made(text: str, thought: str, argument: str, tokens: int) -> AssistantTurn:
    call = ToolCall(name="look", arguments={"at": argument}, id="call_1")
    return AssistantTurn(content=text, thinking=thought, tool_calls=(call,), generated_ids=(1,) * tokens)


SIZES = st.sampled_from([0, 1, 1_000, 50_000])


@given(SIZES, SIZES, SIZES, SIZES)
def test_an_answer_is_counted_with_all_that_it_holds(text: int, thought: int, argument: int, tokens: int) -> None:
    store: TenantStore[Any] = TenantStore(1 << 30, 1 << 30)
    turns, conversation = GeneratedTurns(store), Conversation(turns=["Hi"])
    turn = made("a" * text, "b" * thought, "c" * argument, tokens)
    shown = turn.model_copy(update={"thinking": None, "generated_ids": ()})
    turns.keep("tenant", "m", conversation, shown, turn, "chatcmpl-1")
    assert store.num_bytes >= 8 * tokens + text + thought + argument
    filled = turns.fill("tenant", "m", conversation.with_turn(shown))
    assert filled.turns[-1] == turn == turns.get("tenant", "chatcmpl-1")


def test_large_answers_displace_one_another() -> None:
    """However many keys lead to an answer, what is kept is what was counted."""
    store: TenantStore[Any] = TenantStore(1_000_000, 1_000_000)
    turns = GeneratedTurns(store)
    for number in range(20):
        turn = made("a" * 50_000, "", "", 10)
        turns.keep("tenant", "m", Conversation(turns=[f"Hi {number}"]), turn, turn, f"chatcmpl-{number}")
    held = [number for number in range(20) if turns.get("tenant", f"chatcmpl-{number}") is not None]
    assert held and held == list(range(20 - len(held), 20)) and len(held) <= 5


def test_alternatives_count_among_the_bytes() -> None:
    """Of each token of an answer, and of a prompt where they were asked for."""
    request: Any = SimpleNamespace(request=SimpleNamespace(prompt_ids=(1,) * 50))
    sizes = {}
    for answer, prompt in ((None, None), (0, 0), (20, None), (None, 20)):
        made = trace(0, 10)
        made.call = replace(made.call, sampling=SamplingParameters(logprobs=answer), prompt_logprobs=prompt)
        made.prepared = [request]
        sizes[answer, prompt] = made.num_bytes
    plain = sizes[None, None]
    assert sizes[20, None] == plain + 10 * 20 * BYTES_PER_ALTERNATIVE
    assert sizes[0, 0] == plain + 50 * BYTES_PER_ALTERNATIVE
    assert sizes[None, 20] == plain + 50 * 21 * BYTES_PER_ALTERNATIVE


@pytest.mark.parametrize(("reason", "is_shown"), [("refused", True), ("error", False)])
def test_the_engines_words_are_for_administrators_but_those_of_a_refusal(reason: str, is_shown: bool) -> None:
    made = trace(0, 0)
    made.keep([Finished(1.0, "r", reason=reason, error="prompt of another")])
    for caller, sees in ((Caller(), is_shown), (ADMINISTRATOR, True)):
        (choice,) = made.as_json(caller)["choices"]
        assert choice["finished"]["error"] == ("prompt of another" if sees else "")


def test_a_use_renews_a_value_and_its_tenant() -> None:
    now = [0.0]

    def filled() -> TenantStore[str]:
        store = TenantStore[str](20, 12, 5.0, lambda: now[0])
        for tenant, key, size in (("a", 1, 6), ("a", 2, 4), ("b", 1, 6), ("b", 2, 4)):
            store.put(tenant, key, f"{tenant}{key}", size)
        return store

    def kept(store: TenantStore[str]) -> list[str]:
        found = (store.get(tenant, key) for tenant in "abc" for key in (1, 2, 3))
        return [each for each in found if each is not None]

    own, crowded, lasting = filled(), filled(), filled()
    for store, tenant, key, size in ((own, "a", 3, 4), (crowded, "c", 1, 5)):
        assert store.get("a", 1) == "a1"
        store.put(tenant, key, f"{tenant}{key}", size)
    assert (kept(own), kept(crowded)) == (["a1", "a3", "b1", "b2"], ["a1", "a2", "b2", "c1"])
    for now[0], is_there in ((3.0, True), (7.0, True), (12.0, False)):
        assert (lasting.get("a", 1) == "a1") == is_there
    assert (kept(lasting), lasting.num_bytes, len(lasting)) == ([], 0, 0)
