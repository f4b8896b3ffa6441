"""Ends of a fleet's streams, and a wait until its pages are home again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tests.patience import until
from workbench.cluster.pools import PrefillDecodePools
from workbench.trace.events import Decoded, Event, Finished


def end_of(events: Iterable[Event]) -> Finished:
    """Return the one end among the events."""
    (found,) = (each for each in events if isinstance(each, Finished))
    return found


def decoded(events: Iterable[Event]) -> list[Decoded]:
    return [each for each in events if isinstance(each, Decoded)]


def until_begun(handles: Sequence[Any], tokens: int = 1) -> None:
    """Wait until each request has so many tokens."""
    until(lambda: all(len(decoded(tuple(handle.events))) >= tokens for handle in handles))


def until_home(pools: PrefillDecodePools) -> None:
    """Wait until no page is lent."""
    until(lambda: (pools.recall(), pools.pages_lent())[1] == 0)


def pids(pools: PrefillDecodePools) -> set[int | None]:
    return {slot.process.pid for slot in pools.slots if slot.process is not None}
