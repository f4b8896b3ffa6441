"""Events of one kind."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

E = TypeVar("E")


def of(kind: type[E], events: Iterable[object]) -> list[E]:
    return [event for event in events if isinstance(event, kind)]
