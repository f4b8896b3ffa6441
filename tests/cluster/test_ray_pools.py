"""Pools whose engines are Ray actors, on a real Ray of this machine: bytes by gloo, a SIGKILL, nothing left."""

from __future__ import annotations

import os
import signal

import pytest

from tests.cluster.ends import pids, until_home
from tests.cluster.pool_requests import config, requests
from tests.cluster.processes import is_alive
from tests.helpers.events import of
from tests.helpers.processes import python
from tests.helpers.ray_cluster import own_ray
from tests.patience import until
from workbench.cluster.apart import pool_processes
from workbench.cluster.pools import PrefillDecodePools
from workbench.engine.inputs import sample_id
from workbench.engine.runner import Runner, generate
from workbench.errors import WorkbenchError
from workbench.trace.events import Decoded, Finished, HandedOver

REFUSED = """
from tests.cluster.pool_requests import config
from workbench.cluster.pools import PrefillDecodePools
PrefillDecodePools(config(), transfer="gloo", processes="ray")
"""


def test_texts_are_those_of_one_engine_though_an_actor_is_killed(ray_cluster) -> None:
    alone = {name: end.token_ids for name, end in generate(Runner(config()), requests(0)).items()}
    with PrefillDecodePools(config(), 1, 1, transfer="gloo", processes="ray") as pools:
        begun = pids(pools)
        assert all(begun) and os.getpid() not in begun
        for kills in (False, True):
            found, sent = {}, []
            for event in pools.stream(requests(0)):
                if kills and isinstance(event, Decoded):
                    kills, victim = False, pools.slots[1].process
                    assert victim is not None and victim.pid is not None
                    os.kill(victim.pid, signal.SIGKILL)
                if isinstance(event, HandedOver):
                    sent.append(event.bytes)
                elif isinstance(event, Finished):
                    assert not event.error
                    found[sample_id(event.request_id, event.sample)] = event.token_ids
            assert found == alone and sent and all(sent)
        assert pools.counts["processes that died"] == 1
        begun |= pids(pools)
    until(lambda: not any(map(is_alive, filter(None, begun))))


def test_a_shared_memory_serves_actors_of_this_host(ray_cluster) -> None:
    asked = requests(1)[:3]
    alone = {name: end.token_ids for name, end in generate(Runner(config()), asked).items()}
    with PrefillDecodePools(config(), 1, 1, processes="ray") as pools:
        found = {end.request_id: end.token_ids for end in of(Finished, pools.stream(asked))}
        assert found == alone and pools.counts["handed over"] == 2
        until_home(pools)


def test_a_process_id_of_another_machine_is_no_process_here(ray_cluster, monkeypatch) -> None:
    """A signal to it would end a stranger. Its clock is compared."""
    monkeypatch.setattr(pool_processes, "process_space", lambda: ("another boot", "another namespace"))
    asked = requests(1)[:1]
    with PrefillDecodePools(config(), 1, 0, processes="ray") as pools:
        (slot,) = pools.slots
        assert slot.process is not None and slot.process.pid is None and slot.clock_ahead
        with pytest.raises(WorkbenchError, match="no process of this host"):
            pools.kill(0)
        monkeypatch.undo()
        pools.call(lambda: pools._died(slot, "planted"))  # its successor is here
        until(lambda: slot.state == "ready")
        assert slot.clock_ahead == 0
        assert [end.error for end in of(Finished, pools.stream(asked))] == [""]


@own_ray
def test_actors_without_ray_are_refused() -> None:
    done = python("-c", REFUSED)
    assert done.returncode == 1 and "call ray.init() first" in done.stderr
