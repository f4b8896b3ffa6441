"""Placement of labels in a chart, so that none covers another label or a dot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LETTER, LINE, DOT = 6.4, 12.0, 5.0  # a letter's width, a line's height and a dot's radius in pixels, at size 11
GAP = 7.0  # from a dot's middle to where its name begins
VERTICAL_OFFSETS = (-6.0, 9.0, -18.0, 21.0, -30.0, 33.0, -42.0, 45.0)  # heights of a name against its dot


@dataclass(frozen=True)
class Label:
    """A label's offset from its dot's middle, in pixels. It starts there, or with `left` ends there."""

    dx: float
    dy: float
    left: bool = False


Box = tuple[float, float, float, float]


def place_labels(points: Sequence[tuple[float, float]], names: Sequence[str], width: float) -> list[Label]:
    """Place a label beside each point (x, y), in pixels with y downwards, in a chart of this width.

    Each label takes the first free position, right before left and near before far; without a free one, the first."""
    taken = [(x - DOT, y - DOT, x + DOT, y + DOT) for x, y in points]
    found = []
    for (x, y), name in zip(points, names, strict=True):
        tries = [Label(-GAP if left else GAP, dy, left) for dy in VERTICAL_OFFSETS for left in (False, True)]
        free = (
            label
            for label in tries
            if (box := _box(x, y, name, label))[0] >= 0
            and box[2] <= width + 40
            and not any(_boxes_overlap(box, t) for t in taken)
        )
        label = next(free, tries[0])
        taken.append(_box(x, y, name, label))
        found.append(label)
    return found


def _box(x: float, y: float, name: str, label: Label) -> Box:
    begin = x + label.dx - (LETTER * len(name) if label.left else 0)
    return begin, y + label.dy - LINE / 2, begin + LETTER * len(name), y + label.dy + LINE / 2


def _boxes_overlap(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
