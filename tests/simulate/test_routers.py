"""Each router's contract, one decision at a time."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.refusals import refuses
from workbench.simulate.arrival import Arrival
from workbench.simulate.job import SimulatedRequest
from workbench.simulate.routers import LeastLoaded, PrefixAware, RoundRobin, SessionSticky, router_from, routing_options


@dataclass(frozen=True)
class Seen:
    number: int
    num_requests: int = 0
    pending_prompt_tokens: int = 0
    holds: int = 0

    def cached_tokens(self, prompt: tuple[int, ...], tenant: str) -> int:
        return self.holds


VIEWS = st.lists(st.tuples(*(st.integers(0, 50),) * 3), min_size=1, max_size=6).map(
    lambda rows: [Seen(number, *row) for number, row in enumerate(rows)]
)


def job(number: int, session: str = "") -> SimulatedRequest:
    return SimulatedRequest(number, f"request-{number}", Arrival(0.0, 60, 5, session), 0, 5)


@given(VIEWS, st.integers(0, 99), st.text(max_size=4))
def test_every_router_keeps_its_promise(views: list[Seen], number: int, session: str) -> None:
    count = len(views)
    turns = [RoundRobin().choose(job(n), views).number for n in range(number, number + count)]
    assert sorted(turns) == list(range(count))
    assert LeastLoaded().choose(job(number), views).num_requests == min(view.num_requests for view in views)
    aware = PrefixAware(request_tokens=0).choose(job(number), views)
    assert aware.pending_prompt_tokens - aware.cached_tokens((), "") == min(
        view.pending_prompt_tokens - view.holds for view in views
    )
    sticky = SessionSticky()
    mine = sticky.choose(job(number, session or "s"), views).number
    assert sticky.choose(job(number + 1, session or "s"), list(reversed(views))).number == mine
    others = [view for view in views if view.number != mine]
    for gone in others:  # who leaves takes only its own sessions along
        assert sticky.choose(job(number, session or "s"), [v for v in views if v is not gone]).number == mine


@given(VIEWS, st.integers(0, 99))
def test_a_reason_has_the_numbers_of_the_choice(views: list[Seen], number: int) -> None:
    asked = job(number, "s")
    assert [(each.replica, each.samples, each.pending_prompt_tokens, each.cached_tokens)
            for each in routing_options(views, asked, first=1)] == [
        (view.number + 1, view.num_requests, view.pending_prompt_tokens, view.holds) for view in views
    ]  # fmt: skip
    fewest = min(view.num_requests for view in views)
    least = LeastLoaded()
    words = least.reason(asked, least.choose(asked, views), views)
    equal = sum(view.num_requests == fewest for view in views)
    assert words == f"fewest requests: {fewest}" + f", in turn among {equal} that have so many" * (equal > 1)
    aware = PrefixAware(request_tokens=7)
    cost = {view.number: 60 - view.holds + view.pending_prompt_tokens + 7 * view.num_requests for view in views}
    chosen = aware.choose(asked, views)
    assert aware.reason(asked, chosen, views).startswith(f"fewest tokens to compute first: {min(cost.values())} (60 ")
    assert SessionSticky().reason(asked, views[0], views) == "highest hash with session 's'"
    assert RoundRobin().reason(asked, views[0], views) == f"in turn: request {number}"


@pytest.mark.parametrize("instances", [2, 3, 5, 8, 16])
def test_sessions_are_spread(instances: int) -> None:
    views = [Seen(number) for number in range(instances)]
    counts = [0] * instances
    for session in range(1000, 1000 + 500 * instances):
        counts[SessionSticky().choose(job(0, str(session)), views).number] += 1
    assert min(counts) > 400 and max(counts) < 600  # 4.5 standard deviations from 500


def test_a_wrong_router_is_reported() -> None:
    assert router_from("prefix_aware") == PrefixAware() == router_from({"kind": "prefix_aware"})
    refuses("round_robin, least_loaded, prefix_aware, session_sticky", router_from, "fastest")
