"""A response cache: what it may keep, what it finds, and what it forgets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.refusals import refuses
from workbench.economics.prices import Usage, load_prices
from workbench.economics.response_cache import GREEDY, ResponseCache, replay_response_cache, request_key
from workbench.errors import WorkbenchError
from workbench.request import Request, SamplingParameters
from workbench.simulate.arrival import Arrival


def asked(*ids: int, salt: str = "", name: str = "r", **sampling: object) -> Request:
    return Request(name, ids, GREEDY.model_copy(update=sampling), cache_salt=salt)


@given(st.lists(st.integers(0, 6), max_size=60), st.integers(1, 5))
def test_it_is_a_bounded_lru(prompts: list[int], size: int) -> None:
    cache: ResponseCache[int] = ResponseCache(size)
    known: list[int] = []  # the latest last
    for prompt in prompts:
        computed = []
        answer = cache.get_or_compute(asked(prompt), lambda request: computed.append(1) or request.prompt_ids[0] * 10)  # noqa: B023
        assert answer == prompt * 10 and bool(computed) == (prompt not in known)
        known = [*(each for each in known if each != prompt), prompt][-size:]
        assert len(cache) == len(known) <= size
    assert cache.hits + cache.misses == len(prompts) and cache.evicted == cache.misses - len(cache)


@pytest.mark.parametrize(
    "other",
    [asked(1, 2, 4), asked(1, 2), asked(1, 2, 3, salt="b"), asked(1, 2, 3, max_tokens=9), asked(1, 2, 3, stop=("x",)),
     asked(1, 2, 3, logit_bias={1: 2.0}), asked(1, 2, 3, n=2), asked(1, 2, 3, ignore_eos=True)],
)  # fmt: skip
def test_what_differs_is_another_request(other: Request) -> None:
    assert request_key(other) != request_key(asked(1, 2, 3))


def test_what_cannot_change_the_answer_does_not() -> None:
    assert request_key(asked(1, 2, name="a", seed=1)) == request_key(asked(1, 2, name="b", seed=2))
    assert request_key(asked(1, 2), "demo") != request_key(asked(1, 2), "other")


@pytest.mark.parametrize("temperature", [1e-9, 0.7, 1.0])
def test_a_drawn_answer_is_refused(temperature: float) -> None:
    request = Request("mine", (1,), SamplingParameters(temperature=temperature))
    cache: ResponseCache[str] = ResponseCache(4)
    for wrong in (
        lambda: cache.get(request),
        lambda: cache.put(request, ""),
        lambda: cache.get_or_compute(request, str),
    ):
        refuses("mine: temperature .* only requests at temperature 0", wrong)
    assert (len(cache), cache.hits, cache.misses) == (0, 0, 0)


def test_what_fails_is_not_kept() -> None:
    cache: ResponseCache[str] = ResponseCache(4)

    def broken(request: Request) -> str:
        raise WorkbenchError("no")

    with pytest.raises(WorkbenchError):
        cache.get_or_compute(asked(1), broken)
    assert len(cache) == 0 and cache.get_or_compute(asked(1), lambda request: "yes") == "yes"
    refuses("at least 1", ResponseCache, 0)


def test_a_replayed_traffic() -> None:
    prices = load_prices("article-a")
    same = Arrival(0.0, 600, 10, blocks=(0, 1))
    other = [Arrival(1.0, 600, 10, blocks=(0, 2)), Arrival(2.0, 601, 10, blocks=(0, 1)), Arrival(3.0, 600, 10)]
    found = replay_response_cache([same, *other, Arrival(4.0, 600, 10), same], prices, 10)
    assert (found.requests, found.hits) == (6, 1) and found.hit_rate == 1 / 6
    assert found.saved == prices.cost(Usage(input=600, output=10)) and 0 < found.saved_fraction < 1 / 5
    assert replay_response_cache([same, *other, same], prices, 1).hits == 0
    tenants = [Arrival(0.0, 600, 10, tenant=name, blocks=(0, 1)) for name in "ab"]
    assert replay_response_cache(tenants, prices, 10).hits == 0
    assert replay_response_cache([], prices, 10).saved_fraction == 0
