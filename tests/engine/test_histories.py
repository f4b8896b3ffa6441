"""Scheduler, pages, prefix index and host under random histories and any policy: integers only, every read checked.

For a soak: HISTORIES=10000 python -m pytest tests/engine/test_histories.py
"""

from __future__ import annotations

import os
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.engine import many_histories
from tests.engine.evicting_history import EvictingHistory
from tests.engine.history import History
from tests.thorough import tries

HISTORIES = int(os.environ.get("HISTORIES", "360"))


@pytest.mark.parametrize("kind", [History, EvictingHistory])
@settings(max_examples=tries(HISTORIES), suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.randoms(use_true_random=False))
def test_any_history_reads_what_was_written(kind: type[History], draw: random.Random) -> None:
    """Also under eviction, with kept tokens where they should be."""
    many_histories.play(draw, kind())
