"""Chart of requests of several lengths: measured times and predicted bounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from workbench.study.pareto import import_altair

WIDTH, HEIGHT = 440, 280
PANELS = (("prefill_s", "prefill"), ("decode_step_s", "one decode step"))
SERIES_NAMES = ["measured", "bound by this machine's ceilings"]
Rows = Sequence[Mapping[str, Any]]


def chart(rows: Rows, title: str) -> Any:
    """Draw an Altair chart with logarithmic axes: prefill and one decode step against the prompt's length.

    Where all rows have a single length, it shows the request's whole time against the model's size."""
    altair = import_altair()
    if all(len(row["curve"]) == 1 for row in rows):
        return _by_size(altair, rows).properties(title=title)
    panels = [_panel(altair, rows, *panel) for panel in PANELS]
    return altair.hconcat(*panels).properties(title=title)


def _panel(altair: Any, rows: Rows, key: str, told: str) -> Any:
    names = [row["variant"] for row in rows]
    points = [
        {"variant": row["variant"], "tokens": point["prompt_tokens"], "ms": 1e3 * point[front + key], "kind": kind}
        for row in rows
        for point in row["curve"]
        for kind, front in zip(SERIES_NAMES, ("", "predicted_"), strict=True)
    ]
    ends = min(point["tokens"] for point in points), max(point["tokens"] for point in points)
    ticks = [2**power for power in range(ends[0].bit_length() - 1, ends[1].bit_length() + 1) if 2**power <= ends[1]]
    x = altair.X(
        "tokens:Q", title="prompt tokens", axis=altair.Axis(values=ticks, format="d"),
        scale=altair.Scale(type="log", base=2, domain=[0.9 * ends[0], 1.1 * ends[1]], nice=False),
    )  # fmt: skip
    times = [point["ms"] for point in points]
    y = altair.Y(
        "ms:Q", title="milliseconds", scale=altair.Scale(type="log", domain=[0.8 * min(times), 1.25 * max(times)])
    )
    colour = altair.Color("variant:N", sort=names, title=None) if len(names) > 1 else altair.value("#0b6e4f")
    base = altair.Chart(altair.Data(values=points)).encode(x=x, y=y, color=colour)
    dash = altair.StrokeDash("kind:N", sort=SERIES_NAMES, title=None, scale=altair.Scale(domain=SERIES_NAMES, range=[[1, 0], [5, 4]]))
    lines = base.mark_line(clip=True).encode(strokeDash=dash)
    dots = base.transform_filter(f"datum.kind == '{SERIES_NAMES[0]}'").mark_point(filled=True, size=40, opacity=1)
    return (lines + dots).properties(width=WIDTH, height=HEIGHT, title=told)


def _by_size(altair: Any, rows: Rows) -> Any:
    points = [
        {"variant": row["variant"], "parameters": row["parameters"], "ms": 1e3 * row["curve"][0][key], "kind": kind}
        for row in rows
        for kind, key in zip(SERIES_NAMES, ("e2el_s", "predicted_e2el_s"), strict=True)
    ]
    x = altair.X("parameters:Q", title="parameters", scale=altair.Scale(type="log"), axis=altair.Axis(format="~s"))
    y = altair.Y("ms:Q", title="milliseconds of one request", scale=altair.Scale(type="log", nice=False))
    base = altair.Chart(altair.Data(values=points)).encode(x=x, y=y)
    dash = altair.StrokeDash("kind:N", sort=SERIES_NAMES, title=None, scale=altair.Scale(domain=SERIES_NAMES, range=[[1, 0], [5, 4]]))
    seen = base.transform_filter(f"datum.kind == '{SERIES_NAMES[0]}'")
    names = seen.mark_text(align="right", dx=-6, dy=-10, fontSize=11).encode(text="variant:N")
    dots = seen.mark_point(filled=True, size=50, opacity=1)
    return (base.mark_line().encode(strokeDash=dash) + dots + names).properties(width=560, height=320)


def svg(rows: Rows, title: str) -> str:
    import vl_convert

    return vl_convert.vegalite_to_svg(chart(rows, title).to_json())


def png(rows: Rows, title: str) -> bytes:
    import vl_convert

    return vl_convert.vegalite_to_png(chart(rows, title).to_json(), scale=2)
