"""A machine whose ceilings are known: no test of a sweep measures one."""

from __future__ import annotations

import pytest

from workbench.sweep.point_cost import CachedCeilings

FLOPS, BYTES = 1e11, 1e10


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CachedCeilings, "rates", lambda self, working_set, dtype: (FLOPS, BYTES))
