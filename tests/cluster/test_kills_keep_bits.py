"""Under `batch_invariant` a fleet's log-probabilities too are those of one engine, to the bit, whatever is killed."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compiled_kernels import Backend, backend_problems
from tests.cluster.fleet import Sink, SteppedReplica
from tests.engine.tiny import layer, model_of, request, runner_of, spec_of
from tests.helpers.events import of
from tests.thorough import tries
from workbench.cluster.front import FleetLimits, Front
from workbench.engine.runner import Runner
from workbench.simulate.routers import router_from
from workbench.trace.events import Decoded, Event, Finished, Moved

problem = backend_problems()[Backend.MLIR]
pytestmark = pytest.mark.skipif(problem is not None, reason=f"backend mlir: {problem}")

SPEC = spec_of(layer(4, 2, 16), layer(4, 2, 16)).model_copy(update={"hidden_size": 64})
SETTINGS: dict[str, Any] = {"batch_invariant": True, "backend": "mlir", "page_size": 8, "cache": {"prefix": "radix"}}
MENU = (
    request("greedy", 9, 8, temperature=0, logprobs=2),
    request("seeded", 14, 10, temperature=0.7, seed=1, logprobs=2),
    request("long", 37, 6, temperature=1.0, seed=2, logprobs=2),
    request("penalized", 20, 9, temperature=0.9, seed=3, logprobs=2, repetition_penalty=1.3),
)
ENGINES = 3


@cache
def engines() -> list[Runner]:
    """Return engines that examples share: none is compiled twice, and their prefix caches are as examples left them."""
    model = model_of(SPEC, backend=Backend.EAGER)
    return [runner_of(model, **SETTINGS) for _ in range(ENGINES)]


def tokens_of(events: list[Event]) -> list[tuple[int, float | None, tuple[tuple[int, float], ...]]]:
    return [(each.token_id, each.logprob, each.top_logprobs) for each in of(Decoded, events)]


@cache
def alone(place: int) -> list[Any]:
    """Return the tokens of a request with their log-probabilities, as a fresh engine gives them to it alone."""
    return tokens_of(list(runner_of(model_of(SPEC, backend=Backend.EAGER), **SETTINGS).stream([MENU[place]])))


class Pool:
    """Replicas over the shared engines: one that is killed gives its engine back, without its requests."""

    def __init__(self, front: Front):
        self.front, self.free, self.numbers = front, engines().copy(), count(1)
        self.replicas: dict[int, SteppedReplica] = {}

    def add(self) -> None:
        if self.free:
            number = next(self.numbers)
            replica = self.replicas[number] = SteppedReplica(number, self.free.pop())
            self.front.add_replica(replica, pages=replica.pages)

    def gone(self, number: int) -> None:
        replica = self.replicas.pop(number)
        while not replica.is_idle:  # cancelled, or as a process that ends
            for name in [*replica.runner.tracker.sequences]:
                replica.runner.cancel(name)
            replica.turn()
        self.free.append(replica.runner)

    def choose(self, place: int) -> SteppedReplica | None:
        return [*self.replicas.values()][place % len(self.replicas)] if self.replicas else None


ACTIONS = st.tuples(
    st.sampled_from(["turn", "turn", "turn", "kill", "retire", "add"]), st.integers(0, 2), st.integers(1, 4)
)


@settings(max_examples=tries(15))
@given(asked=st.lists(st.integers(0, len(MENU) - 1), min_size=1, max_size=6), actions=st.lists(ACTIONS, max_size=16))
def test_tokens_and_log_probabilities_are_those_of_one_engine(asked: list[int], actions: list[Any]) -> None:
    pool: Pool
    front = Front(
        router_from("prefix_aware"), FleetLimits(page_size=8, losses=99), lambda: 0.0, lambda number: pool.gone(number)
    )
    pool = Pool(front)
    pool.add()
    pool.add()
    sinks = [Sink() for _ in asked]
    for number, (place, sink) in enumerate(zip(asked, sinks, strict=True)):
        front.submit(sink, [replace(MENU[place], request_id=f"r{number}")])
    for action, place, times in actions:
        replica = pool.choose(place)
        if action == "add" or replica is None:
            pool.add()
        elif action == "kill":
            front.lose_replica(replica.number, "killed")
        elif action == "retire":
            front.retire_replica(replica.number)
        else:
            for _ in range(times):
                front.take_report(replica.number, replica.turn())
    while front.num_requests:
        if not any(not view.is_leaving for view in front.replicas.values()):
            pool.add()
        for replica in list(pool.replicas.values()):
            front.take_report(replica.number, replica.turn())
    for place, sink in zip(asked, sinks, strict=True):
        assert tokens_of(sink.events) == alone(place)
        assert sum(isinstance(each, Finished) for each in sink.events) == 1
    moves = {each.request_id for sink in sinks for each in of(Moved, sink.events)}
    assert front.accounts[""].moves >= len(moves) and front.pages.used == 0
    for number in list(pool.replicas):
        front.replicas.pop(number)
        pool.gone(number)
