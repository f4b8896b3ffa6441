"""Chart of predicted variants: latency against throughput, and each rate beside its bound."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from workbench.study.labels import place_labels
from workbench.study.pareto import import_altair

WIDTH, HEIGHT = 380, 280
MEASURED, BOUND = "#0b6e4f", "#a8a8a8"
PANELS = (("ttft_s_p50", "TTFT p50, s"), ("tpot_s_p50", "time per output token p50, s"))
RATE = "output_tokens_per_s"
Rows = Sequence[Mapping[str, Any]]


def chart(rows: Rows, title: str) -> Any:
    """Draw an Altair chart: tokens a second of each variant as a bar with its bound as a tick, and TTFT and TPOT
    against them."""
    altair = import_altair()
    panels = [_bars(altair, rows), *(_against(altair, rows, key, told) for key, told in PANELS)]
    return altair.hconcat(*panels).properties(title=title)


def _bars(altair: Any, rows: Rows) -> Any:
    values = [{"variant": row["variant"], "rate": row[RATE], "bound": row["predicted"][RATE]} for row in rows]
    least, most = min(v["rate"] for v in values), max(max(v["rate"], v["bound"]) for v in values)
    scale = altair.Scale(type="log", domain=[0.5 * least, 1.5 * most], nice=False)
    y = altair.Y("variant:N", sort=None, title=None, axis=altair.Axis(labelLimit=260))
    base = altair.Chart(altair.Data(values=values)).encode(y=y)
    bars = base.mark_bar(color=MEASURED).encode(
        x=altair.X("rate:Q", scale=scale, title="output tokens a second (tick: bound by this machine's ceilings)"),
        x2=altair.datum(0.5 * least),
    )
    ticks = base.mark_tick(color="black", thickness=2).encode(x=altair.X("bound:Q", scale=scale))
    return (bars + ticks).properties(width=WIDTH, height=altair.Step(26))


def _against(altair: Any, rows: Rows, key: str, told: str) -> Any:
    points = [
        {"variant": row["variant"], "rate": each[RATE], "latency": each[key], "kind": kind}
        for kind in ("bound", "measured")
        for row in rows
        if (each := row if kind == "measured" else row["predicted"]).get(key)
    ]
    if not points:
        return altair.Chart(altair.Data(values=[])).mark_point()
    ends = {
        name: (0.6 * min(p[name] for p in points), 2.0 * max(p[name] for p in points)) for name in ("rate", "latency")
    }
    x = altair.X(
        "rate:Q", title="output tokens a second", scale=altair.Scale(type="log", domain=ends["rate"], nice=False)
    )
    y = altair.Y("latency:Q", title=told, scale=altair.Scale(type="log", domain=ends["latency"], nice=False))
    base = altair.Chart(altair.Data(values=points)).encode(x=x, y=y)
    kinds = altair.Scale(domain=["measured", "bound"], range=[MEASURED, BOUND])
    colour = altair.Color("kind:N", title=None, scale=kinds)
    dots = base.mark_point(filled=True, size=50, opacity=1).encode(color=colour)
    seen = [point for point in points if point["kind"] == "measured"]

    def at(value: float, name: str) -> float:
        return math.log(value / ends[name][0]) / math.log(ends[name][1] / ends[name][0])

    pixels = [(WIDTH * at(p["rate"], "rate"), HEIGHT * (1 - at(p["latency"], "latency"))) for p in seen]
    texts = [
        altair.Chart(altair.Data(values=[point]))
        .mark_text(align="right" if label.left else "left", dx=label.dx, dy=label.dy, fontSize=11)
        .encode(x=x, y=y, text="variant:N")
        for point, label in zip(seen, place_labels(pixels, [p["variant"] for p in seen], WIDTH), strict=True)
    ]
    return altair.layer(dots, *texts).properties(width=WIDTH, height=HEIGHT)


def svg(rows: Rows, title: str) -> str:
    import vl_convert

    return vl_convert.vegalite_to_svg(chart(rows, title).to_json())


def png(rows: Rows, title: str) -> bytes:
    import vl_convert

    return vl_convert.vegalite_to_png(chart(rows, title).to_json(), scale=2)
