"""The fake peer is a script that finds its imports beside another one. The cores stay where they are: other work would
look like a move of theirs."""

from __future__ import annotations

import pytest

collect_ignore = ["fake_peer.py"]


@pytest.fixture(autouse=True)
def cores_at_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.peers.run.core_to_core_ns", lambda: 20.0)
