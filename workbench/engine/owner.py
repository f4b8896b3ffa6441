"""Who may have a runner to itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from workbench.engine.intake import Asked
from workbench.trace.events import Event


class Owner(Protocol):
    """Who has a runner to itself, in a thread of its own while there is work: others stream through it."""

    def here(self) -> bool:
        """Whether this is that thread."""
        ...

    def elsewhere(self) -> bool:
        """Whether that thread is at work, and not this one."""
        ...

    def stream(self, requests: Asked, **sampling: object) -> Iterator[Event]: ...
