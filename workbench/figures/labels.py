"""Place the names of points in a plot so that no name covers another name or a point."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from workbench.svg import Box, boxes_overlap

LETTER, LINE, DOT = 6.4, 12.0, 5.0  # width of a letter, height of a line and radius of a dot in pixels, at font size 11
GAP = 7.0  # distance in pixels from a dot's centre to its name
VERTICAL_OFFSETS = (-6.0, 9.0, -18.0, 21.0, -30.0, 33.0, -42.0, 45.0)  # vertical offsets of a name from its dot


@dataclass(frozen=True)
class Label:
    """A label's offset from its dot's centre, in pixels. The text starts there, or with `left` ends there."""

    dx: float
    dy: float
    left: bool = False


def place_labels(
    points: Sequence[tuple[float, float]], names: Sequence[str], width: float, taken: Sequence[Box] = ()
) -> list[Label]:
    """Place a label next to each point (x, y), in pixels with y downwards, in a chart of this width.

    Each label takes the first position that is free of points, other labels and the boxes `taken`: right before left,
    near before far. If no position is free, it takes the first."""
    taken = [*taken, *((x - DOT, y - DOT, x + DOT, y + DOT) for x, y in points)]
    found = []
    for (x, y), name in zip(points, names, strict=True):
        tries = [Label(-GAP if left else GAP, dy, left) for dy in VERTICAL_OFFSETS for left in (False, True)]
        free = (
            label
            for label in tries
            if (box := _box(x, y, name, label))[0] >= 0
            and box[2] <= width + 40
            and not any(boxes_overlap(box, t) for t in taken)
        )
        label = next(free, tries[0])
        taken.append(_box(x, y, name, label))
        found.append(label)
    return found


def _box(x: float, y: float, name: str, label: Label) -> Box:
    begin = x + label.dx - (LETTER * len(name) if label.left else 0)
    return begin, y + label.dy - LINE / 2, begin + LETTER * len(name), y + label.dy + LINE / 2
