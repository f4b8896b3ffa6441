"""Laws of cache misses: the kind names the part that changed, and every missed token is accounted for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.thorough import tries
from workbench.economics.breakpoints import TracedPrompt, after_parts, placement_costs
from workbench.economics.prices import load_prices
from workbench.economics.prompt_cache import FIVE_MINUTES
from workbench.engine.config import EngineConfig
from workbench.engine.runner import Runner
from workbench.prompt.assemble import Prompt, Segment
from workbench.prompt.cache_miss import BEHIND_WHAT_STAYS, CacheMiss, PromptSeen, explain_miss, first_difference
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
    assert before.prompt is not None
    end = before.prompt.part_ends()["turn 2"] // PAGE * PAGE
    there = readable - end
    missed = readable - PAGE
    assert miss == CacheMiss("evicted", missed, missed, elsewhere="breakpoint after turn 2", elsewhere_tokens=there)
    pinned = PromptSeen(before.model, before.token_ids, before.prompt, pinned_tokens=end)  # it stood there already
    assert explain_miss(pinned, now, PAGE, PAGE) == CacheMiss("evicted", missed, missed, elsewhere_tokens=missed)
    assert f"with breakpoint after turn 2 it had been {there} tokens" in str(miss)


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


PARTS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6).map(tuple), min_size=1, max_size=5)
CHANGE = st.tuples(st.integers(0, 2), st.integers(0, 2))  # tokens that stay before and behind the changed one
PRICES = load_prices("article-a")


def of_parts(parts: list[tuple[int, ...]], pinned: int = 0) -> PromptSeen:
    """A prompt of a system prompt, a tool and turns, with these tokens."""
    segments, start = [], 0
    for number, ids in enumerate(parts):
        name = ("system", "tool 0")[number] if number < 2 else f"message {number}"
        segments.append(Segment(name, start, ids, "", number - 2 if number > 1 else None))
        start += len(ids)
    ids = tuple(token for each in parts for token in each)
    return PromptSeen("m", ids, Prompt(ids, tuple(segments), "", Conversation()), pinned)


def best_read(prompts: list[TracedPrompt], page: int, least: int) -> int:
    """Return the tokens that the second prompt reads with one breakpoint in both, the best of more than `least`."""
    placements = {name: after_parts(name) for name in prompts[0].ends}
    costs = placement_costs(prompts, PRICES, placements, page, (FIVE_MINUTES,))
    return max((each.usage.cache_read for each in costs if each.usage.cache_read > least), default=0)


@settings(max_examples=tries(200))
@given(
    parts=PARTS, changes=st.dictionaries(st.integers(0, 4), CHANGE, max_size=2), page=st.integers(1, 4),
    pages=st.integers(0, 4), pinned=st.sampled_from([0, 0, 4, 40]), pace=st.sampled_from([0.0, 0.25]),
)  # fmt: skip
def test_the_price_of_a_miss_is_what_a_replay_computes(
    parts: list[tuple[int, ...]], changes: dict[int, tuple[int, int]], page: int, pages: int, pinned: int, pace: float
) -> None:
    """No placement of one breakpoint costs less than the place that is named, whose price is never above the miss's."""
    then, now = [*parts], [*parts]
    stay = list[int]()
    for number, ids in enumerate(parts):
        front, back = changes.get(number, (len(ids), 0))
        front = min(front, len(ids))
        back = min(back, len(ids) - front)
        kept = ids[:front], ids[len(ids) - back :]
        if number in changes:
            then[number], now[number] = (*kept[0], 8, *kept[1]), (*kept[0], 9, *kept[1])
        stay += [] if number in changes and number > 1 else [*kept[0], *kept[1]]
    before, present = of_parts(then, pinned), of_parts([*now, (0, 1, 0)])
    place = first_difference(before.token_ids, present.token_ids)
    cached = min(pages * page, place // page * page)
    readable = len(before.token_ids) // page * page
    miss = explain_miss(before, present, cached, page, pace)
    assert (miss is None) == (cached == readable)  # what is read costs nothing
    if miss is None:
        return
    assert miss.missed_tokens > 0 and cached + miss.missed_tokens == readable
    assert 0 <= miss.elsewhere_tokens <= miss.missed_tokens
    assert (miss.elsewhere == "") == (miss.elsewhere_tokens == miss.missed_tokens)
    seconds = (miss.missed_seconds, miss.elsewhere_seconds)
    assert seconds == ((pace * miss.missed_tokens, pace * miss.elsewhere_tokens) if pace else (None, None))
    assert before.prompt is not None and present.prompt is not None
    sent = [TracedPrompt.from_prompt(n, each) for n, each in enumerate((before.prompt, present.prompt))]
    moved = [TracedPrompt(n, (*stay, *rest), {"what stays": len(stay)}) for n, rest in enumerate(((8,), (9,)))]
    reads = {"as sent": cached, "breakpoint": best_read(sent, page, pinned)}
    if place < readable:
        reads[BEHIND_WHAT_STAYS] = best_read(moved, page, 0)
    assert miss.elsewhere_tokens == readable - min(readable, max(reads.values()))
    assert miss.elsewhere.split(" after ")[0] in ("", *reads)


def test_a_date_before_the_rules_costs_them_all(model: Runner) -> None:
    """The classic: one word at the front of a long system prompt. Behind all that stays, only its page is computed."""
    rules = "Answer in one short sentence. Name your source, and say so where you have none. " * 3
    one, two = (BASE.model_copy(update={"system": f"It is {day}. {rules}"}) for day in ("Monday", "Sunday"))
    before, now = seen(model, one), seen(model, two)
    place = first_difference(before.token_ids, now.token_ids)
    miss = explain_miss(before, now, place // PAGE * PAGE, PAGE, 0.5)
    assert miss is not None and miss.elsewhere == BEHIND_WHAT_STAYS and miss.kind == "system_changed"
    changed = sum(one != two for one, two in zip(before.token_ids, now.token_ids, strict=False))
    assert miss.missed_tokens > 100 and miss.elsewhere_tokens <= changed + 2 * PAGE
    assert miss.missed_seconds == miss.missed_tokens / 2
    assert f"({miss.missed_seconds:.3g} s) were computed again" in str(miss)
    assert f"with {BEHIND_WHAT_STAYS} it had been {miss.elsewhere_tokens} tokens" in str(miss)
