"""Chart of simulated variants: curves over a swept setting, or bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from workbench.study.pareto import import_altair

WIDTH, HEIGHT = 300, 220
CURVES = (
    ("slo_attainment", "SLO attainment", "linear"),
    ("ttft_s_p50", "TTFT p50, s", "log"),
    ("ttft_s_p99", "TTFT p99, s", "log"),
    ("longest_gap_s_p99", "longest gap between tokens, p99, s", "log"),
    ("cache_hit_rate", "prompt tokens from the cache", "linear"),
)
BARS = (
    ("cache_waste", "pages in use without tokens"),
    ("sequences_mean", "sequences at once"),
    ("output_tokens_per_s", "output tokens a second"),
    ("longest_gap_s", "longest gap between tokens of those running, s"),
    ("ttft_s", "TTFT, s"),
    ("behind_ttft_s", "TTFT of the short request behind it, s"),
    ("visible_s_p50", "first text that a client sees p50, s"),
    ("ttft_s_p50", "TTFT p50, s"),
    ("ttft_s_p99", "TTFT p99, s"),
    ("tpot_s_p50", "time per output token p50, s"),
    ("e2el_s_p50", "E2EL p50, s"),
    ("seconds", "from the first arrival to the last token, s"),
)


def chart(rows: Sequence[Mapping[str, Any]], title: str) -> Any:
    """Draw an Altair chart: one panel for each metric that the rows have, one curve or bar a variant."""
    panels = _curves(rows) if any(row.get("curve") for row in rows) else _bars(rows)
    altair = import_altair()
    return altair.concat(*panels, columns=2).properties(title=title)


def _curves(rows: Sequence[Mapping[str, Any]]) -> list[Any]:
    altair = import_altair()
    order = [row["variant"] for row in rows]
    points = [{"variant": row["variant"], **point} for row in rows for point in row["curve"]]
    numbers = all(isinstance(point["value"], int | float) for point in points)
    offered = len({point.get("offered_requests_per_s") for point in points}) > 1
    names = ("offered_requests_per_s", "requests offered a second"), ("value", points[0]["path"])
    field, heading = names[0] if offered else names[1]
    x = altair.X(f"{field}:{'Q' if numbers or offered else 'O'}", title=heading)
    panels = []
    for key, told, scale in CURVES:
        values = [point for point in points if point.get(key)]
        if len({point[key] for point in values}) < 2:
            continue
        y = altair.Y(f"{key}:Q", title=told, scale=altair.Scale(type=scale))
        color = altair.Color("variant:N", sort=order, title=None)
        made = altair.Chart(altair.Data(values=values)).mark_line(point=True).encode(x=x, y=y, color=color)
        panels.append(made.properties(width=WIDTH, height=HEIGHT))
    return panels


def _bars(rows: Sequence[Mapping[str, Any]]) -> list[Any]:
    altair = import_altair()
    order = [row["variant"] for row in rows]
    panels = []
    for key, told in BARS:
        values = [{"variant": row["variant"], key: row[key]} for row in rows if row.get(key) is not None]
        if values:
            y = altair.Y("variant:N", sort=order, title=None)
            made = altair.Chart(altair.Data(values=values)).mark_bar().encode(y=y, x=altair.X(f"{key}:Q", title=told))
            panels.append(made.properties(width=WIDTH, height=24 * len(rows)))
    return panels


def svg(rows: Sequence[Mapping[str, Any]], title: str) -> str:
    import vl_convert

    return vl_convert.vegalite_to_svg(chart(rows, title).to_json())


def png(rows: Sequence[Mapping[str, Any]], title: str) -> bytes:
    import vl_convert

    return vl_convert.vegalite_to_png(chart(rows, title).to_json(), scale=2)
