"""Select the visible slices of a run's tracks as bars in pixels; merge neighbours below one pixel."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from workbench.records.svg import Scale
from workbench.trace.tracks import Moment, Slice, Tracks

MERGE_PIXELS = 4.0  # pixels: decisions that are nearer are one mark


class TimelineBar(NamedTuple):
    """From pixel `x`, `wide` of them; `slices` are one, or several where they are narrower than a pixel."""

    x: float
    wide: float
    slices: Sequence[Slice]


def merge_slices(slices: Iterable[Slice], across: Scale) -> Iterator[TimelineBar]:
    """Merge visible slices of one kind into bars. `slices` are in order of time and do not overlap."""
    low, high = across.low, across.high
    x = end = 0.0
    group: list[Slice] = []
    for each in slices:
        if each.end < low or each.begin > high:
            continue
        left, right = across(max(each.begin, low)), across(min(each.end, high))
        if group and right - x <= 1 and left - end <= 1:
            group.append(each)
            end = max(end, right)
            continue
        if group:
            yield TimelineBar(x, end - x, group)
        x, end, group = left, right, [each]
    if group:
        yield TimelineBar(x, end - x, group)


def merge_steps(tracks: Tracks, across: Scale) -> list[TimelineBar]:
    """Return visible steps as bars; steps that begin within one pixel are one bar."""
    begins = np.array(tracks.step_times)  # a copy: an array that is looked at cannot grow
    first, last = visible_range(begins, across)
    while first and tracks.steps[first - 1].end >= across.low:
        first -= 1
    seen = tracks.steps[first:last]
    if not seen:
        return []
    scale = (across.end - across.begin) / (across.high - across.low)
    pixels = np.floor((begins[first:last].clip(across.low) - across.low) * scale)
    edges = [0, *(np.flatnonzero(np.diff(pixels)) + 1).tolist(), len(seen)]
    out = []
    for low, high in zip(edges, edges[1:], strict=False):
        group = seen[low:high]
        x, end = across(max(group[0].begin, across.low)), across(min(group[-1].end, across.high))
        out.append(TimelineBar(x, end - x, group))
    return out


def merge_moments(moments: Iterable[Moment], across: Scale) -> Iterator[tuple[float, list[Moment]]]:
    """Return the pixels of visible moments, grouping those nearer than `MERGE_PIXELS`."""
    x, group = 0.0, []
    for each in moments:
        if not across.low <= each.time <= across.high:
            continue
        at = across(each.time)
        if group and at - x < MERGE_PIXELS:
            group.append(each)
            continue
        if group:
            yield x, group
        x, group = at, [each]
    if group:
        yield x, group


def visible_range(times: array[float] | np.ndarray, across: Scale) -> tuple[int, int]:
    """Return the range of visible indices in ascending `times`."""
    known = np.array(times)
    return int(np.searchsorted(known, across.low)), int(np.searchsorted(known, across.high, "right"))
