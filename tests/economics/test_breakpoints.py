"""Breakpoints elsewhere: every token is counted once, and what is read was sent before."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.refusals import refuses
from tests.thorough import tries
from workbench.economics.breakpoints import PLACEMENTS, TracedPrompt, after_parts, placement_costs
from workbench.economics.prices import DEFAULT_TABLE, load_prices
from workbench.economics.prompt_cache import FIVE_MINUTES

PRICES = load_prices(DEFAULT_TABLE)


LAST = ("after the last turn", "after system and the last two turns")


def chat(turns: int, system: int = 1000, turn: int = 200, gap: int = 60, tenant: str = "") -> list[TracedPrompt]:
    """A conversation whose prompts each begin with the one before."""
    ids = tuple(range(system + turns * turn))
    return [
        TracedPrompt(
            number * gap, ids[: system + (number + 1) * turn],
            {"system": system} | {f"turn {n}": system + (n + 1) * turn for n in range(number + 1)},
            (system,), 50, tenant,
        )
        for number in range(turns)
    ]  # fmt: skip


def test_a_long_chat_is_cheapest_with_its_last_turn_marked() -> None:
    costs = placement_costs(chat(10), PRICES)
    assert (costs[0].placement, costs[0].ttl) in [(name, FIVE_MINUTES) for name in LAST]
    last = costs[0].usage
    assert last.written == 1000 + 10 * 200, "every token is written once"
    assert last.cache_read == sum(1000 + n * 200 for n in range(1, 10))
    sent = next(each for each in costs if each.placement == "as sent" and each.ttl == FIVE_MINUTES)
    assert sent.usage.written == 1000 and sent.usage.cache_read == 9 * 1000


def test_what_is_not_asked_again_is_cheapest_without_breakpoints() -> None:
    alone = [TracedPrompt(n * 10, tuple(range(n * 1000, n * 1000 + 500)), {"turn 0": 500}, (500,)) for n in range(5)]
    assert placement_costs(alone, PRICES)[0].placement == "none"


def test_tenants_and_time_are_kept_apart() -> None:
    two = sorted((*chat(3, tenant="a"), *chat(3, tenant="b")), key=lambda each: each.time)
    marked = {"last": after_parts("turn -1")}
    both = {each.ttl: each.usage for each in placement_costs(two, PRICES, marked)}
    one = {each.ttl: each.usage for each in placement_costs(chat(3), PRICES, marked)}
    assert all(both[ttl] == usage + usage for ttl, usage in one.items())
    late = {each.ttl: each.usage for each in placement_costs(chat(3, gap=400), PRICES, marked)}
    assert late[FIVE_MINUTES].cache_read == 0 < one[FIVE_MINUTES].cache_read
    refuses("in order", lambda: placement_costs(chat(3)[::-1], PRICES, marked))


prompts = st.lists(
    st.tuples(st.integers(0, 400), st.lists(st.integers(0, 1), min_size=1, max_size=30), st.lists(st.integers(0, 40))),
    max_size=8,
)


@settings(max_examples=tries(200))
@given(traffic=prompts, page=st.sampled_from([1, 4]))
def test_tokens_are_counted_once_and_read_only_after_they_were_written(traffic, page: int) -> None:
    time, sent = 0, []
    for gap, ids, marks in traffic:
        time += gap
        sent.append(TracedPrompt(time, tuple(ids), {"turn 0": len(ids)}, tuple(marks), 1))
    costs = placement_costs(sent, PRICES, PLACEMENTS, page)
    total = sum(len(each.token_ids) for each in sent)
    assert [each.cost for each in costs] == sorted(each.cost for each in costs)
    for each in costs:
        assert each.usage.prompt == total and each.usage.output == len(sent)
        assert each.cost == PRICES.cost(each.usage)
        assert each.usage.written % page == each.usage.cache_read % page == 0
        known = {each.token_ids[:end] for each in sent for end in range(len(each.token_ids) + 1)}
        most = sum(max(n for n in range(len(s.token_ids) + 1) if s.token_ids[:n] in known) for s in sent[1:])
        assert each.usage.cache_read <= most


@given(st.lists(st.sets(st.integers(1, 40), max_size=8), min_size=1, max_size=6))
def test_of_more_marks_than_a_request_may_have_the_last_four_count(marks: list[set[int]]) -> None:
    sent = [TracedPrompt(n * 60, tuple(range(40)), {}, tuple(each)) for n, each in enumerate(marks)]
    last = [replace(each, breakpoints=tuple(sorted(each.breakpoints)[-4:])) for each in sent]
    own = {"as sent": PLACEMENTS["as sent"]}
    assert placement_costs(sent, PRICES, own) == placement_costs(last, PRICES, own)
