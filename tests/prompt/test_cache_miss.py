"""Laws of cache misses: the kind names the part that changed, and every missed token is accounted for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.thorough import tries
from workbench.engine.config import EngineConfig
from workbench.engine.runner import Runner
from workbench.prompt.cache_miss import CacheMiss, PromptSeen, explain_miss, first_difference
from workbench.prompt.conversation import Conversation

PAGE = 4


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first.
        b: the second.
    """
    return a + b


def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: the first.
        b: the second.
    """
    return a * b


BASE = (
    Conversation(system="You answer in one short sentence, always.", tools=[add])
    .user("What is the capital of France?")
    .answer("Paris.")
    .user("And of Spain?")
)


@pytest.fixture(scope="module")
def model() -> Runner:
    return Runner(EngineConfig.model_validate({"model": "demo-chat", "backend": "eager"}))


def seen(model: Runner, conversation: Conversation, name: str = "demo-chat") -> PromptSeen:
    prompt = model.assemble(conversation)
    return PromptSeen(name, prompt.ids, prompt)


CHANGES: dict[str, tuple[str, Callable[[Conversation], Conversation]]] = {
    "another system prompt": (
        "system_changed",
        lambda each: each.model_copy(update={"system": "You sing, at length."}),
    ),
    "a shorter system prompt": ("system_changed", lambda each: each.model_copy(update={"system": "You answer"})),
    "no system prompt": ("system_changed", lambda each: each.model_copy(update={"system": None})),
    "one tool more": ("tools_changed", lambda each: Conversation(**{**dict(each), "tools": [add, multiply]})),
    "no tools": ("tools_changed", lambda each: each.model_copy(update={"tools": ()})),
    "another question": (
        "messages_changed",
        lambda each: each.model_copy(update={"turns": Conversation(turns=("Who are you, then?",)).turns}),
    ),
    "another answer": (
        "messages_changed",
        lambda each: each.model_copy(
            update={"turns": (each.turns[0], each.turns[1].model_copy(update={"content": "Lyon."}), each.turns[2])}
        ),
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_kind_names_the_part_that_changed(model: Runner, change: str) -> None:
    kind, changed = CHANGES[change]
    before, now = seen(model, BASE), seen(model, changed(BASE))
    place = first_difference(before.token_ids, now.token_ids)
    miss = explain_miss(before, now, place // PAGE * PAGE, PAGE)
    assert miss is not None and (miss.kind, miss.token, miss.evicted_tokens) == (kind, place, 0)
    assert before.token_ids[:place] == now.token_ids[:place] and before.token_ids[place] != now.token_ids[place]
    assert now.prompt is not None and miss.was != miss.now
    segment = next(each for each in now.prompt.segments if each.start <= place < each.end)
    assert (miss.part, miss.turn) == (segment.name, segment.turn)


def test_an_earlier_prompt_that_is_a_beginning_is_no_miss(model: Runner) -> None:
    before, now = seen(model, BASE), seen(model, BASE.answer("Madrid.").user("And of Italy?"))
    # The prompt before ends where the assistant begins, and so does the beginning of this one.
    readable = len(before.token_ids) // PAGE * PAGE
    assert explain_miss(before, now, readable, PAGE) is None
    miss = explain_miss(before, now, PAGE, PAGE)
    assert miss == CacheMiss("evicted", readable - PAGE, readable - PAGE)


def test_other_kinds(model: Runner) -> None:
    now = seen(model, BASE)
    assert explain_miss(None, now, 0, PAGE) == CacheMiss("previous_not_found")
    unavailable = explain_miss(now, now, 0, None)
    assert unavailable is not None and unavailable.kind == "unavailable"
    other = explain_miss(seen(model, BASE, "demo"), now, 0, PAGE)
    assert other is not None and (other.kind, other.was, other.now) == ("model_changed", "demo", "demo-chat")


ids = st.lists(st.integers(0, 2), max_size=40).map(tuple)


@settings(max_examples=tries(200))
@given(shared=ids, before=ids, now=ids, page=st.integers(1, 5), pages=st.integers(0, 10))
def test_missed_tokens_are_all_that_could_have_been_read(
    shared: tuple[int, ...], before: tuple[int, ...], now: tuple[int, ...], page: int, pages: int
) -> None:
    before, now = shared + before, (*shared, *now, 0)
    place = first_difference(before, now)
    assert before[:place] == now[:place] and before[place : place + 1] != now[place : place + 1] or place in (
        len(before), len(now)
    )  # fmt: skip
    cached = min(pages * page, min(place, len(now) - 1) // page * page)
    readable = min(len(before), len(now) - 1) // page * page
    miss = explain_miss(PromptSeen("m", before), PromptSeen("m", now), cached, page)
    assert (miss is None) == (cached >= readable)
    if miss is not None:
        assert miss.missed_tokens == readable - cached
        assert (miss.kind == "evicted") == (place >= readable)
        assert cached + miss.evicted_tokens == min(readable, place // page * page)
