"""Any rows make a chart that Vega-Lite's schema allows, whose SVG is sound, says every name and loads nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any
from xml.etree import ElementTree

import altair
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.thorough import tries
from workbench import svg
from workbench.figures.bars import VERDICTS, Bar, Column, IntervalBar, SpanBar, bars, columns, intervals, spans
from workbench.figures.figure import Figure, beside
from workbench.figures.lines import MAX_POINTS, Series, lines
from workbench.figures.points import Point, points
from workbench.reports.comparison_charts import lines_figure
from workbench.reports.self_contained import external_resources
from workbench.svg import Axis
from workbench.widgets.model_graph.roofline import Roof, RooflinePoint, Roofs
from workbench.widgets.model_graph.roofline_picture import draw_roofline
from workbench.widgets.saved import saved_picture

VALUES = st.floats() | st.integers(-(10**12), 10**12).map(float)
POSITIVE = st.floats(1e-6, 1e9)
NAMES = st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1, max_size=30).filter(
    lambda name: "NaN" not in name and "Infinity" not in name  # no number may read so
)
SERIES = st.builds(
    Series, NAMES, st.lists(st.tuples(VALUES, VALUES), max_size=8).map(tuple), st.booleans(), st.booleans()
)
AXES = st.builds(Axis, st.text(max_size=20), st.booleans())


def holds(spec: Mapping[str, Any], rows: Sequence[Mapping[str, Any]] = ()) -> bool:
    """Return whether the numeric axes of a chart that have a domain reach all values of its rows."""
    rows = spec.get("data", {}).get("values", rows)
    channels = [each for each in spec.get("encoding", {}).values() if each.get("type") == "quantitative"]
    domains = {each["field"]: each["scale"]["domain"] for each in channels if "domain" in each.get("scale", {})}
    return all(holds(part, rows) for part in (*spec.get("layer", ()), *spec.get("concat", ()))) and all(
        row[field] is None or low <= row[field] <= high for field, (low, high) in domains.items() for row in rows
    )


def sound(figure: Figure, names: list[str] = ()) -> str:  # type: ignore[assignment]
    """Return the chart's SVG for a page, after it was checked."""
    altair.Chart.from_dict(json.loads(json.dumps(figure.spec)), validate=True)
    drawn = figure.svg(in_page=True)
    tree = ElementTree.fromstring(drawn)
    assert "NaN" not in drawn and "Infinity" not in drawn and holds(figure.spec)
    assert external_resources(svg.html(drawn)) == []
    tips = [each.attrib["data-tip"] for each in tree.iter() if "data-tip" in each.attrib]
    assert all(any(name in tip for tip in tips) for name in names)
    stops = [each for each in tree.iter() if each.attrib.get("tabindex") == "0"]
    assert len(stops) == bool(tips), "the keyboard enters a chart at one place"
    return drawn


@settings(max_examples=tries(20))
@given(st.lists(SERIES, max_size=9), AXES, AXES, st.text(max_size=20), st.booleans())
def test_any_lines_are_sound(series: list[Series], x: Axis, y: Axis, title: str, zero: bool) -> None:
    figure = lines(series, x, y, title, zero=zero, even=1.0)
    sound(figure)
    kept = [(row["x"], row["y"]) for row in figure.spec["layer"][1]["data"]["values"]]
    assert kept == [(a, b) for each in series for a, b in each.points if x.shows(a) and y.shows(b)]


@settings(max_examples=tries(15))
@given(st.lists(st.builds(Point, NAMES, VALUES, VALUES, st.just(""), st.booleans()), min_size=1, max_size=9), AXES)
def test_any_points_are_sound_and_named(given: list[Point], axis: Axis) -> None:
    sound(points(given, axis, axis), [each.name for each in given if axis.shows(each.x) and axis.shows(each.y)])


@settings(max_examples=tries(15))
@given(st.lists(st.builds(Bar, NAMES, VALUES, st.none() | VALUES, st.booleans(), NAMES), min_size=1, max_size=5), AXES)
def test_any_bars_are_sound_and_named(given: list[Bar], axis: Axis) -> None:
    sound(bars(given, axis), [each.name for each in given if axis.shows(each.value)])


@settings(max_examples=tries(15))
@given(st.lists(st.tuples(NAMES, POSITIVE, st.none() | st.floats(0, 0.5), st.sampled_from([*VERDICTS])), min_size=1,
                max_size=5))  # fmt: skip
def test_any_intervals_are_sound_and_say_what_was_found(given: list[tuple[str, float, float | None, str]]) -> None:
    made = [
        IntervalBar(name, value, reach and value * (1 - reach), reach and value * (1 + reach), verdict)
        for name, value, reach, verdict in given
    ]
    drawn = sound(intervals(made, Axis("ratio", log=True)), [each.name for each in made])
    assert all(verdict in drawn for verdict in VERDICTS)


@settings(max_examples=tries(10))
@given(st.lists(st.tuples(NAMES, st.floats(0, 1e9), st.floats(0, 1e9), NAMES), min_size=1, max_size=5))
def test_any_spans_and_columns_are_sound(given: list[tuple[str, float, float, str]]) -> None:
    pieces = [SpanBar(name, min(begin, end), max(begin, end), group) for name, begin, end, group in given]
    heights = [Column(name, value, group) for name, value, _, group in given]
    both = [spans(pieces, Axis("s")), columns(heights, "place", Axis("share", percent=True))]
    sound(beside(both, "two", notes=["a note"]), [each.name for each in pieces])


@given(st.lists(st.floats(0, 1), min_size=MAX_POINTS + 1, max_size=4 * MAX_POINTS))
@settings(max_examples=tries(5))
def test_many_points_keep_their_peaks(values: list[float]) -> None:
    shown = lines([Series("a", tuple(enumerate(map(float, values))), marked=False)], Axis("x"), Axis("y"))
    kept = [row["y"] for row in shown.spec["layer"][0]["data"]["values"]]
    assert len(kept) <= MAX_POINTS and (min(kept), max(kept)) == (min(values), max(values))


@settings(max_examples=tries(10))
@given(st.lists(SERIES, max_size=5))
def test_lines_of_a_measure_are_sound_and_have_its_unit(series: list[Series]) -> None:
    figure = lines_figure({"ttft_s_p50": series}, "batch size")
    sound(figure)
    assert figure.spec["title"].startswith("TTFT p50, s")


@settings(max_examples=tries(10))
@given(st.lists(st.builds(RooflinePoint, NAMES, POSITIVE, POSITIVE, POSITIVE), max_size=5, unique_by=str))
def test_a_roofline_has_every_point_and_its_unit(found: list[RooflinePoint]) -> None:
    roofs = Roofs((Roof("cache", 1e5), Roof("DRAM", 1e3)), (Roof("float32", 1e6),))
    figure = draw_roofline([each.with_ceilings(roofs) for each in found], roofs)
    assert "FLOP/s</text>" in sound(figure, [each.name for each in found])


def test_names_are_words_and_never_markup() -> None:
    drawn = sound(points([Point("<script>alert(1)</script>", 1.0, 2.0)], Axis("a<b"), Axis("y")))
    assert "<script>" not in drawn and "&lt;script&gt;" in drawn


def test_a_file_is_on_white_and_a_page_gives_its_own_colour() -> None:
    figure = lines([Series("a", ((1.0, 1.0), (2.0, 2.0)))], Axis("x"), Axis("y"))
    assert 'fill="white"' in figure.svg() and "currentColor" not in figure.svg()
    shown = figure._repr_mimebundle_()  # a notebook has a theme, whose variables hold in HTML alone
    assert 'fill="white"' not in shown["text/html"] and "currentColor" in shown["text/html"]
    assert "--jp-ui-font-color0" in shown["text/html"] and "wb-drawn" in saved_picture(shown["text/html"])["text/html"]
    assert figure.png().startswith(b"\x89PNG")
