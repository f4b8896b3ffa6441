"""The picture of a comparison: what variants cost in bytes against what they cost in quality."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from workbench.errors import WorkbenchError

LEAST_KL = 1e-8  # a logarithmic axis has no zero: what is below stands here


def frontier(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the points that none beats: no other is as small in both and smaller in one. By the first figure."""
    best: list[int] = []
    for index in sorted(range(len(points)), key=lambda i: points[i]):
        if not best or points[index][1] < points[best[-1]][1] or points[index] == points[best[-1]]:
            best.append(index)
    return best


def chart(rows: Sequence[Mapping[str, Any]], title: str) -> Any:
    """An Altair chart of `bytes_per_token` against `kl_mean`; variants that none beats are joined."""
    altair = _altair()
    points = [(float(row["bytes_per_token"]), max(float(row["kl_mean"]), LEAST_KL)) for row in rows]
    best = set(frontier(points))
    values = [
        {"variant": row["variant"], "bytes": x, "kl": y, "best": index in best}
        for index, (row, (x, y)) in enumerate(zip(rows, points, strict=True))
    ]
    x = altair.X(
        "bytes:Q", title="bytes of cache a token (measured)", scale=altair.Scale(type="log", nice=False, padding=24)
    )
    y = altair.Y(
        "kl:Q",
        title="mean KL divergence from float32, nats",
        scale=altair.Scale(type="log"),
        axis=altair.Axis(format=".0e"),
    )
    everything = altair.Chart(altair.Data(values=values)).encode(x=x, y=y)
    dots = everything.mark_point(filled=True, size=70).encode(
        color=altair.condition("datum.best", altair.value("#0b6e4f"), altair.value("#a8a8a8"))
    )
    names = everything.mark_text(align="left", dx=7, dy=-6, fontSize=11).encode(text="variant:N")
    line = everything.transform_filter("datum.best").mark_line(color="#0b6e4f", strokeWidth=1, interpolate="step-after")
    return (line + dots + names).properties(width=520, height=340, title=title)


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
