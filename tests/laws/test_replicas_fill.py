"""A request waits at the front only where no replica has room for it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.cluster.fleet import MENU, SteppedReplica
from workbench.cluster.front import FleetLimits, Front
from workbench.simulate.routers import LeastLoaded
from workbench.trace.events import Event


class Sink:
    def emit(self, events: list[Event], done: bool = False, error: str = "") -> None:
        pass


@pytest.mark.parametrize("room", [1, 2, 3])
@pytest.mark.parametrize("requests", [1, 3, 4])
def test_as_many_samples_are_placed_as_there_is_room_for(room: int, requests: int) -> None:
    front = Front(LeastLoaded(), FleetLimits(page_size=4, replica_samples=room), lambda: 0.0)
    replica = SteppedReplica(1)
    front.add_replica(replica, pages=replica.pages)
    for number in range(requests):
        front.submit(Sink(), [replace(MENU[0], request_id=f"r{number}")])
    assert front.num_on(1) == min(room, requests)
    assert front.num_waiting == max(0, requests - room)
