"""A picture that gets longer at its end: only what is new travels to the browser."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from workbench.widgets.view import Picture


class Growing(Picture):
    """`draw` makes the whole. An element with `data-grows="NAME"` in it has one child for each piece of that name:
    `grow` with all pieces there are sends those that are new. Whoever missed some gets the whole."""

    def __init__(self, draw: Callable[[], str]):
        super().__init__()
        self._draw, self._sent = draw, dict[str, int]()
        self._drawing = threading.RLock()
        self.on_msg(lambda *_: self.whole())

    @property
    def names(self) -> set[str]:
        return set(self._sent)

    def whole(self, counts: Mapping[str, int] | None = None) -> None:
        """Send all; `counts` are the pieces in it, by name, where they are no longer those sent before."""
        with self._drawing:
            if counts is not None:
                self._sent = dict(counts)
            self.content = self._draw()

    def grow(self, name: str, count: int, pieces: Callable[[int], Sequence[str]]) -> None:
        """There are `count` pieces; `pieces` makes those from a place on."""
        with self._drawing:
            at = self._sent.get(name, 0)
            if count > at:
                self._sent[name] = count
                message: dict[str, Any] = {"into": name, "at": at, "pieces": list(pieces(at))}
                self.send(message)
