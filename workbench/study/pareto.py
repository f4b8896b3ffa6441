"""The picture of a comparison: what variants cost in bytes against what they cost in quality."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workbench.errors import WorkbenchError
from workbench.study.labels import labels

WIDTH, HEIGHT = 560, 340  # pixels of the picture without its edges
LEAST_KL = 1e-10  # what is below is no distance: rounding
BEST, BEATEN = "#0b6e4f", "#a8a8a8"


def frontier(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the points that none beats: no other is as small in both and smaller in one. By the first figure."""
    best: list[int] = []
    for index in sorted(range(len(points)), key=lambda i: points[i]):
        if not best or points[index][1] < points[best[-1]][1] or points[index] == points[best[-1]]:
            best.append(index)
    return best


def chart(rows: Sequence[Mapping[str, Any]], title: str) -> Any:
    """An Altair chart of `bytes_per_token` against `kl_mean`, both logarithmic; variants that none beats are joined.
    What is no distance away stands at the bottom, a decade below the smallest that is some."""
    altair = _altair()
    points = [(float(row["bytes_per_token"]), float(row["kl_mean"])) for row in rows]
    best = set(frontier(points))
    some = [kl for _, kl in points if kl > LEAST_KL] or [LEAST_KL]
    bottom, top = (10.0 ** (math.floor(math.log10(least)) + up) for least, up in ((min(some), -1), (max(some), 1)))
    values = [
        {"variant": row["variant"], "bytes": x, "kl": max(y, bottom), "best": index in best}
        for index, (row, (x, y)) in enumerate(zip(rows, points, strict=True))
    ]
    decades = [10.0**power for power in range(round(math.log10(bottom)), round(math.log10(top)) + 1)]
    axis = altair.Axis(values=decades, labelExpr=f"datum.value <= {bottom} ? '0' : format(datum.value, '.0e')")
    left, right = 0.85 * min(x for x, _ in points), 1.3 * max(x for x, _ in points)
    ticks = [step * 10.0**power for power in range(15) for step in (1, 1.5, 2, 3, 4, 6)]
    x = altair.X(
        "bytes:Q", title="bytes of cache a token (measured)",
        axis=altair.Axis(values=[tick for tick in ticks if left <= tick <= right], format=",.6~r"),
        scale=altair.Scale(type="log", domain=[left, right], nice=False),
    )  # fmt: skip
    y = altair.Y(
        "kl:Q", title="mean KL divergence from float32, nats", axis=axis,
        scale=altair.Scale(type="log", domain=[bottom, top], nice=False),
    )  # fmt: skip
    everything = altair.Chart(altair.Data(values=values)).encode(x=x, y=y)
    dots = everything.mark_point(filled=True, size=70, opacity=1).encode(
        color=altair.condition("datum.best", altair.value(BEST), altair.value(BEATEN))
    )
    across, down = _Log(left, right, WIDTH), _Log(top, bottom, HEIGHT)
    places = [(across.pixel(value["bytes"]), down.pixel(value["kl"])) for value in values]
    said = [
        {"name": label.text, "bytes": across.value(label.x), "kl": down.value(label.y)}
        for label in labels([value["variant"] for value in values], places, WIDTH, HEIGHT)
    ]
    names = altair.Chart(altair.Data(values=said)).mark_text(align="left", baseline="middle", fontSize=11)
    names = names.encode(x=x, y=y, text="name:N")
    line = everything.transform_filter("datum.best").mark_line(color=BEST, strokeWidth=1, interpolate="step-after")
    shown = line.encode(order=altair.Order("bytes:Q")) + dots + names
    return shown.properties(width=WIDTH, height=HEIGHT, title=title)


@dataclass(frozen=True)
class _Log:
    """A logarithmic axis of `length` pixels from the value `start` to the value `end`."""

    start: float
    end: float
    length: float

    def pixel(self, value: float) -> float:
        return self.length * math.log(value / self.start) / math.log(self.end / self.start)

    def value(self, pixel: float) -> float:
        return self.start * (self.end / self.start) ** (pixel / self.length)


def svg(rows: Sequence[Mapping[str, Any]], title: str) -> str:
    import vl_convert

    return vl_convert.vegalite_to_svg(chart(rows, title).to_json())


def png(rows: Sequence[Mapping[str, Any]], title: str) -> bytes:
    import vl_convert

    return vl_convert.vegalite_to_png(chart(rows, title).to_json(), scale=2)


def plotting_problem() -> str | None:
    """Why no picture can be drawn here, None where one can."""
    try:
        _altair()
        import vl_convert  # noqa: F401
    except WorkbenchError as error:
        return str(error)
    except ImportError:
        return "pictures need vl-convert-python; pip install 'inference-workbench[plots]'"
    return None


def _altair() -> Any:
    try:
        import altair
    except ImportError:
        raise WorkbenchError("pictures need altair; pip install 'inference-workbench[plots]'") from None
    return altair
