"""Draw figures over a swept setting: one small chart a figure, one line a series."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from workbench import svg
from workbench.runs.measures import direction, unit
from workbench.svg import CHARACTER_WIDTH, SERIES_COLOURS, Axis, Scale, format_tick, truncate_to_width
from workbench.widgets.compare.data import SweepLine

BETTER = {"min": ", less is better", "max": ", more is better"}
MIN_CHART_WIDTH, CHART_HEIGHT = 300, 210
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 30, 40  # of a chart, around its plot
DASHES = (None, "6 3", "2 3", "8 3 2 3")  # beside the colours, which not everyone sees
DECADE, LEGEND_LINE = 10.0, 18


def draw_lines(lines: Mapping[str, Sequence[SweepLine]], swept: str, width: float = svg.PICTURE_WIDTH) -> str:
    """`lines` has each measure's series; a series has one colour and dash in all charts."""
    labels = list(dict.fromkeys(line.label for each in lines.values() for line in each))
    across = max(1, min(len(lines), int(width // MIN_CHART_WIDTH)))
    chart = width / across
    head = list(_legend(labels, width))
    top = 12.0 + LEGEND_LINE * (max((row for row, _ in _places(labels, width)), default=-1) + 1)
    parts = [*head]
    for number, (measure, each) in enumerate(lines.items()):
        x, y = chart * (number % across), top + CHART_HEIGHT * (number // across)
        inner = list(_chart(measure, each, labels, swept, chart, number == 0))
        parts.append(svg.group(*inner, transform=f"translate({x:.1f},{y:.1f})"))
    height = top + CHART_HEIGHT * -(-len(lines) // across)
    if not lines:
        parts.append(svg.text(4, height + 14, "no measure is chosen"))
        height += 24
    return svg.document(width, height, *parts, title=f"{', '.join(lines)} over {swept}")


def _places(labels: Sequence[str], width: float) -> Iterator[tuple[int, float]]:
    """Return the row and x of each label of the legend; none where one series needs no name."""
    row, x = 0, 4.0
    for label in labels if labels != [""] else ():
        need = 40 + CHARACTER_WIDTH * len(label)
        if x > 4 and x + need > width:
            row, x = row + 1, 4.0
        yield row, x
        x += need + 14


def _legend(labels: Sequence[str], width: float) -> Iterator[str]:
    for number, (label, (row, x)) in enumerate(zip(labels, _places(labels, width), strict=False)):
        y = 14 + LEGEND_LINE * row
        yield svg.path([(x, y - 4), (x + 26, y - 4)], **_stroke(number))
        yield svg.text(x + 32, y, truncate_to_width(label or "others", width - x - 36), font_size=11)


def _stroke(number: int) -> dict[str, object]:
    dash = DASHES[number % len(DASHES)]
    return {"class_": f"l{number % len(SERIES_COLOURS)}", "stroke_width": 2, "stroke_dasharray": dash}


def _chart(
    measure: str, lines: Sequence[SweepLine], labels: Sequence[str], swept: str, width: float, first: bool
) -> Iterator[str]:
    name = f"{measure} [{unit(measure)}]" if unit(measure) else measure
    title = truncate_to_width(name + BETTER.get(direction(measure) or "", ""), width - 14)
    yield svg.text(10, 18, title, font_weight="bold")
    bottom = CHART_HEIGHT - BOTTOM
    points = [point for line in lines for point in line.points]
    if not points:
        yield svg.text(LEFT, (TOP + bottom) / 2, "missing: no run has it at a value of this setting", class_="faint")
        return
    across = _scale([x for x, _ in points], LEFT, width - RIGHT, swept)
    up = _scale([y for _, y in points], bottom, TOP, "")
    yield from svg.x_axis(across, Axis(truncate_to_width(swept, width - LEFT - RIGHT)), TOP, bottom, 4)
    yield from svg.y_axis(up, Axis(""), LEFT, width - RIGHT, 4)
    for line in lines:
        number = labels.index(line.label)
        yield svg.path([(across(x), up(y)) for x, y in line.points], **_stroke(number))
        for place, (x, y) in enumerate(line.points):
            about = f"{line.label}\n" if line.label else ""
            tip = f"{about}{swept} {format_tick(x)}\n{name} {format_tick(y)}"
            key = f"{measure}:{line.label}:{place}"
            reach = {"key": key, "tabindex": 0 if first and place == 0 and line is lines[0] else -1}
            yield svg.circle(across(x), up(y), 3.5, class_=f"c{number % len(SERIES_COLOURS)}", tip=tip, **reach)


def _scale(values: Sequence[float], begin: float, end: float, name: str) -> Scale:
    log = min(values) > 0 and max(values) / min(values) > DECADE
    return Scale.over(values, begin, end, Axis(name, log=log))
