"""Where names stand beside the points of a picture, so that each can be read. Pixels, from the upper left corner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

HEIGHT, LETTER = 13.0, 6.2  # of a line of text, and of a letter in it, at size 11
DOT = 5.0  # from a point's middle to its edge


@dataclass(frozen=True)
class Label:
    """A name, or several at one place: its left edge, and the middle of its line."""

    text: str
    x: float
    y: float

    @property
    def box(self) -> tuple[float, float, float, float]:
        """Left, top, right, bottom."""
        return self.x, self.y - HEIGHT / 2, self.x + LETTER * len(self.text), self.y + HEIGHT / 2


def labels(names: Sequence[str], points: Sequence[tuple[float, float]], width: float, height: float) -> list[Label]:
    """A label for each place at which points stand, near it and clear of the others and of all points; where there is
    no clear place inside, the one that covers least."""
    together: dict[tuple[int, int], list[int]] = {}
    for index, (x, y) in enumerate(points):
        together.setdefault((round(x), round(y)), []).append(index)
    taken = [(x - DOT, y - DOT, x + DOT, y + DOT) for x, y in together]
    placed = []
    for (x, y), found in together.items():
        text = ", ".join(names[index] for index in found)
        label = min(_beside(text, x, y), key=lambda label: _covered(label.box, taken, width, height))
        taken.append(label.box)
        placed.append(label)
    return placed


def _beside(text: str, x: float, y: float) -> list[Label]:
    """Places for a text around a point, the best first: `min` takes the first of equals."""
    right, left = x + DOT + 3, x - DOT - 3 - LETTER * len(text)
    near = [Label(text, side, y + up) for up, side in product((-8.0, 9.0), (right, left))]
    return near + [Label(text, side, y + up) for up, side in product((-22.0, 23.0, -36.0, 37.0), (right, left))]


def _covered(box: tuple, taken: Sequence[tuple], width: float, height: float) -> float:
    """The area of a box that covers others or lies outside."""
    left, top, right, bottom = box
    inside = _shared(box, (0.0, 0.0, width, height))
    return (right - left) * (bottom - top) - inside + sum(_shared(box, other) for other in taken)


def _shared(one: tuple, other: tuple) -> float:
    across = min(one[2], other[2]) - max(one[0], other[0])
    down = min(one[3], other[3]) - max(one[1], other[1])
    return max(0.0, across) * max(0.0, down)
