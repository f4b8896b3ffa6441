"""A picture that gets longer at its end: only new pieces are sent to the browser."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from workbench.widgets.view import MarkupWidget


class GrowingPicture(MarkupWidget):
    """Markup that grows: `draw` makes the whole, `append` sends new pieces.

    An element with `data-grows="NAME"` has one child for each piece of that name. A browser that
    missed some gets the whole.
    """

    def __init__(self, draw: Callable[[], str]):
        super().__init__()
        self._draw, self._num_sent = draw, dict[str, int]()
        self._drawing = threading.RLock()
        self.on_msg(lambda *_: self.send_all())

    @property
    def region_names(self) -> set[str]:
        return set(self._num_sent)

    def send_all(self, counts: Mapping[str, int] | None = None) -> None:
        """Send the whole; `counts` are its pieces by name, where they differ from those sent before."""
        with self._drawing:
            if counts is not None:
                self._num_sent = dict(counts)
            self.content = self._draw()

    def append(self, name: str, count: int, pieces: Callable[[int], Sequence[str]]) -> None:
        """Send the new ones of `count` pieces; `pieces(n)` makes those from the n-th on."""
        with self._drawing:
            at = self._num_sent.get(name, 0)
            if count > at:
                self._num_sent[name] = count
                message: dict[str, Any] = {"into": name, "at": at, "pieces": list(pieces(at))}
                self.send(message)
