"""Define the owner of a runner."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from workbench.engine.intake import Asked
from workbench.trace.events import Event


class Owner(Protocol):
    """The owner of a runner, with a thread of its own while there is work; others stream through it."""

    def here(self) -> bool:
        """Return whether this is the owner's thread."""
        ...

    def elsewhere(self) -> bool:
        """Return whether the owner's thread is at work and is not this one."""
        ...

    def stream(self, requests: Asked, **sampling: object) -> Iterator[Event]: ...
