"""Finding stop strings in a text that comes in pieces (Aho and Corasick, 1975)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from workbench.errors import WorkbenchError


@dataclass(slots=True)
class _Node:
    """A prefix of some stop string: `back` is its longest proper suffix that is one too."""

    depth: int
    then: dict[str, _Node] = field(default_factory=dict)
    back: _Node | None = None
    stop: str | None = None  # the longest stop string that ends here


class StopSearch:
    """Reads text and keeps back as much of its end as might begin a stop string, and no more.

    The search ends with the first piece after which a stop string is complete. Of those that are, the one
    that starts first wins; of those that start together, the shortest.
    """

    def __init__(self, stops: Iterable[str]):
        self.stopped: str | None = None
        self._held = ""
        self._root = self._state = _Node(0)
        for stop in stops:
            if not stop:
                raise WorkbenchError("stop: a stop string must not be empty; leave it out")
            self._insert(stop)
        self._link()

    def push(self, piece: str) -> str:
        """The text that may be shown now; it ends right before the stop string once one is found."""
        if self.stopped is not None or not piece:
            return ""
        text, first = self._held + piece, len(self._held)
        cut = len(text)
        for position, character in enumerate(piece, first + 1):
            state = self._state = self._next(character)
            if state.stop is not None and position - len(state.stop) < cut:
                self.stopped, cut = state.stop, position - len(state.stop)
        if self.stopped is None:
            cut = len(text) - self._state.depth
        self._held = text[cut:]
        return text[:cut]

    def finish(self) -> str:
        """What was held back, when no more text comes."""
        held, self._held = self._held, ""
        self._state = self._root
        return "" if self.stopped is not None else held

    def _next(self, character: str) -> _Node:
        node: _Node | None = self._state
        while node is not None:
            if character in node.then:
                return node.then[character]
            node = node.back
        return self._root

    def _insert(self, stop: str) -> None:
        node = self._root
        for character in stop:
            node = node.then.setdefault(character, _Node(node.depth + 1))
        node.stop = stop

    def _link(self) -> None:
        queue = deque([self._root])
        while queue:
            node = queue.popleft()
            for character, child in node.then.items():
                self._state = node.back or self._root
                child.back = self._next(character) if node is not self._root else self._root
                # A node's own stop string is longer than any that ends within it.
                child.stop = child.stop or child.back.stop
                queue.append(child)
        self._state = self._root
