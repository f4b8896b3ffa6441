"""Chart of a comparison: quality loss of the variants against their bytes, with the Pareto frontier.

Labels are placed so that none covers another label or a dot.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workbench.errors import WorkbenchError
from workbench.runs.metrics import pareto_frontier
from workbench.svg import Box, Scale, boxes_overlap

LETTER, LINE, DOT = 6.4, 12.0, 5.0  # a letter's width, a line's height and a dot's radius in pixels, at size 11
GAP = 7.0  # from a dot's middle to where its name begins
VERTICAL_OFFSETS = (-6.0, 9.0, -18.0, 21.0, -30.0, 33.0, -42.0, 45.0)  # heights of a name against its dot
SIZES = {"bytes_per_token": "bytes of cache a token (measured)", "weight_bytes": "bytes of weights (measured)"}
MIN_KL = 1e-10  # what is below is no distance: rounding
FRONTIER_COLOR, DOMINATED_COLOR = "#0b6e4f", "#a8a8a8"
WIDTH, HEIGHT = 560, 340  # of the plot, in pixels


@dataclass(frozen=True)
class Label:
    """A label's offset from its dot's middle, in pixels. It starts there, or with `left` ends there."""

    dx: float
    dy: float
    left: bool = False


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
            and not any(boxes_overlap(box, t) for t in taken)
        )
        label = next(free, tries[0])
        taken.append(_box(x, y, name, label))
        found.append(label)
    return found


def _box(x: float, y: float, name: str, label: Label) -> Box:
    begin = x + label.dx - (LETTER * len(name) if label.left else 0)
    return begin, y + label.dy - LINE / 2, begin + LETTER * len(name), y + label.dy + LINE / 2


def chart(rows: Sequence[Mapping[str, Any]], title: str) -> Any:
    """Draw an Altair chart of `kl_mean` against `bytes_per_token`, or against `weight_bytes` where only these differ.

    Both axes are logarithmic and the Pareto frontier is joined. A KL of zero is drawn at the bottom, below the smallest
    positive one."""
    altair = import_altair()
    sized = max(SIZES, key=lambda key: len({row.get(key) for row in rows}))
    points = [(float(row[sized]), float(row["kl_mean"])) for row in rows]
    best = set(pareto_frontier(points))
    some = [kl for _, kl in points if kl > MIN_KL] or [MIN_KL]
    bottom, top = 10.0 ** (math.ceil(math.log10(min(some))) - 1), 10.0 ** (math.floor(math.log10(max(some))) + 1)
    decades = [10.0**power for power in range(round(math.log10(bottom)), round(math.log10(top)) + 1)]
    axis = altair.Axis(values=decades, labelExpr=f"datum.value <= {bottom} ? '0' : format(datum.value, '.0e')")
    sizes = [x for x, _ in points]
    left, right = 0.85 * min(sizes), 1.3 * max(sizes)
    across, up = Scale(left, right, 0, WIDTH, True), Scale(bottom, top, HEIGHT, 0, True)
    x = altair.X(
        "bytes:Q", title=SIZES[sized], axis=altair.Axis(values=across.ticks()),
        scale=altair.Scale(type="log", domain=[left, right], nice=False),
    )  # fmt: skip
    y = altair.Y(
        "kl:Q", title="mean KL divergence from float32, nats", axis=axis,
        scale=altair.Scale(type="log", domain=[bottom, top], nice=False),
    )  # fmt: skip
    names: dict[tuple[float, float, bool], str] = {}  # points that are one bear their names together
    for index, (row, (size, kl)) in enumerate(zip(rows, points, strict=True)):
        key = size, max(kl, bottom), index in best
        names[key] = f"{names[key]}, {row['variant']}" if key in names else row["variant"]
    pixels = [(across(size), up(kl)) for size, kl, _ in names]
    values = [
        {"variant": name, "bytes": size, "kl": kl, "best": is_best} for (size, kl, is_best), name in names.items()
    ]
    everything = altair.Chart(altair.Data(values=values)).encode(x=x, y=y)
    dots = everything.mark_point(filled=True, size=70, opacity=1).encode(
        color=altair.condition("datum.best", altair.value(FRONTIER_COLOR), altair.value(DOMINATED_COLOR))
    )
    line = everything.transform_filter("datum.best").mark_line(
        color=FRONTIER_COLOR, strokeWidth=1, interpolate="step-after"
    )
    texts = [
        altair.Chart(altair.Data(values=[value]))
        .mark_text(align="right" if label.left else "left", dx=label.dx, dy=label.dy, fontSize=11)
        .encode(x=x, y=y, text="variant:N")
        for value, label in zip(values, place_labels(pixels, list(names.values()), WIDTH), strict=True)
    ]
    shown = altair.layer(line.encode(order=altair.Order("bytes:Q")), dots, *texts)
    return shown.properties(width=WIDTH, height=HEIGHT, title=title)


def render_chart(chart: Any, form: str) -> bytes:
    """Render an Altair chart as `svg` or `png`. WorkbenchError where vl-convert cannot draw."""
    if problem := plotting_problem():
        raise WorkbenchError(problem)
    import vl_convert

    text = chart.to_json()
    return vl_convert.vegalite_to_png(text, scale=2) if form == "png" else vl_convert.vegalite_to_svg(text).encode()


def plotting_problem() -> str | None:
    """Return the reason why no chart can be drawn here; None where one can."""
    try:
        import_altair()
        import vl_convert  # noqa: F401 (altair calls it)
    except WorkbenchError as error:
        return str(error)
    except ImportError:
        return "pictures need vl-convert-python; pip install 'inference-workbench[plots]'"
    return None


def import_altair() -> Any:
    try:
        import altair
    except ImportError:
        raise WorkbenchError("pictures need altair; pip install 'inference-workbench[plots]'") from None
    return altair
