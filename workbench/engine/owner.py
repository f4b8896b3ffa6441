"""Define the owner of a runner."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from workbench.engine.intake import RequestInput
from workbench.trace.events import Event


class RunnerOwner(Protocol):
    """The owner of a runner, with a thread of its own while there is work; others stream through it."""

    def is_current_thread(self) -> bool:
        """Return whether this is the owner's thread."""
        ...

    def is_other_thread(self) -> bool:
        """Return whether the owner's thread is at work and is not this one."""
        ...

    def stream(self, requests: RequestInput, **sampling: object) -> Iterator[Event]: ...
