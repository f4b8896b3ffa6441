"""Kill a replica in mid-answer: its requests go on elsewhere without a token lost or said twice."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.cluster.ends import decoded, end_of, until_begun
from tests.cluster.threads import ASKED, CONFIG, alone
from tests.helpers.events import of
from tests.patience import limit, until
from workbench.cluster.apart import pool_slots
from workbench.cluster.apart.engine_link import EngineLink
from workbench.cluster.apart.pool_messages import Start
from workbench.cluster.cluster import Cluster
from workbench.cluster.launcher import Launcher
from workbench.errors import WorkbenchError
from workbench.trace.events import Moved


def check_killed_replica(cluster: Cluster) -> list[Moved]:
    """Kill one of two replicas as four requests are answered; return the moves of what it had."""
    heard: list[Any] = []
    leave = cluster.listen(heard.append)
    handles = [cluster.submit("def fib(n):", **ASKED) for _ in range(4)]
    until_begun(handles, 3)
    number, victim = next(iter(cluster.replicas.items()))
    os.kill(victim.process_id, signal.SIGKILL)  # type: ignore[attr-defined] (of a process)
    assert all(handle.wait(limit(120)) for handle in handles)
    wanted = alone("def fib(n):")
    for handle in handles:
        end, tokens = end_of(handle.events), decoded(handle.events)
        assert (end.token_ids, end.output_text) == (wanted.token_ids, wanted.output_text)
        assert [each.index for each in tokens] == list(range(len(wanted.token_ids)))
        assert "".join(each.text for each in tokens) + end.text == wanted.output_text
    moves = of(Moved, heard)
    assert 0 < len(moves) == cluster.accounts[""].moves and all(each.source == number for each in moves)
    until(lambda: len(cluster.replicas) == 2)  # a new one in its place
    assert number not in cluster.replicas
    leave()
    return moves


def check_cancelled_start(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cancel a start whose processes run and do not get ready: it ends at once."""
    has_process, send = threading.Event(), EngineLink.send

    def withhold(link: EngineLink, message: object) -> None:
        has_process.set() if isinstance(message, Start) else send(link, message)

    monkeypatch.setattr(EngineLink, "send", withhold)
    monkeypatch.setattr(pool_slots, "START_SECONDS", limit(60))
    with ThreadPoolExecutor() as threads, pytest.raises(WorkbenchError, match="its process has ended"):
        start = threads.submit(launcher.start, 1, CONFIG)
        has_process.wait()
        launcher.cancel_starts()
        start.result()
    launcher.close()
