"""Chart of sampled texts: repetition against surprisal under the model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from workbench.study.labels import place_labels
from workbench.study.pareto import import_altair

WIDTH, HEIGHT = 480, 340
LOW = -0.12  # where the axis begins, so that names find room below 0
REFERENCE_COLOR, SAMPLED_COLOR, PREDICTED_COLOR = "#a8a8a8", "#0b6e4f", "black"
Rows = Sequence[Mapping[str, Any]]


def chart(rows: Rows, title: str) -> Any:
    """Draw Altair charts: left bits a token against repeated 4-grams by variant, right bits a token beside the
    predicted ones."""
    altair = import_altair()
    return altair.hconcat(_repeats(altair, rows), _bits(altair, rows)).properties(title=title)


def _repeats(altair: Any, rows: Rows) -> Any:
    points = [{"variant": row["variant"], "bits": row["bits_per_byte"], "repeated": row["repeated_4"],
               "made": "predicted" in row} for row in rows]  # fmt: skip
    left, right = 0.8 * min(point["bits"] for point in points), 1.25 * max(point["bits"] for point in points)
    x = altair.X(
        "bits:Q", title="bits a byte under the model in float32",
        scale=altair.Scale(type="log", domain=[left, right], nice=False),
    )  # fmt: skip
    y = altair.Y(
        "repeated:Q", title="repeated 4-grams",
        scale=altair.Scale(domain=[LOW, 1], nice=False),
        axis=altair.Axis(format="%", values=[0, 0.2, 0.4, 0.6, 0.8, 1]),
    )  # fmt: skip
    base = altair.Chart(altair.Data(values=points)).encode(x=x, y=y)
    dots = base.mark_point(filled=True, size=60, opacity=1).encode(
        color=altair.condition("datum.made", altair.value(SAMPLED_COLOR), altair.value(REFERENCE_COLOR))
    )
    width = WIDTH / math.log(right / left)
    pixels = [(width * math.log(p["bits"] / left), HEIGHT * (1 - p["repeated"]) / (1 - LOW)) for p in points]
    texts = [
        altair.Chart(altair.Data(values=[point]))
        .mark_text(align="right" if label.left else "left", dx=label.dx, dy=label.dy, fontSize=11)
        .encode(x=x, y=y, text="variant:N")
        for point, label in zip(points, place_labels(pixels, [p["variant"] for p in points], WIDTH), strict=True)
    ]
    return altair.layer(dots, *texts).properties(width=WIDTH, height=HEIGHT)


def _bits(altair: Any, rows: Rows) -> Any:
    values = [{"variant": row["variant"], "bits": row["bits_a_token"],
               "predicted": row.get("predicted", {}).get("bits_a_token")} for row in rows]  # fmt: skip
    base = altair.Chart(altair.Data(values=values)).encode(y=altair.Y("variant:N", sort=None, title=None))
    bars = base.mark_bar(color=SAMPLED_COLOR).encode(x=altair.X("bits:Q", title="bits a token (tick: predicted)"))
    ticks = base.transform_filter("isValid(datum.predicted)").mark_tick(color=PREDICTED_COLOR, thickness=2)
    return (bars + ticks.encode(x="predicted:Q")).properties(width=300, height=altair.Step(22))


def svg(rows: Rows, title: str) -> str:
    import vl_convert

    return vl_convert.vegalite_to_svg(chart(rows, title).to_json())


def png(rows: Rows, title: str) -> bytes:
    import vl_convert

    return vl_convert.vegalite_to_png(chart(rows, title).to_json(), scale=2)
