"""Chart of speculation: speed-up against load, and the number of accepted tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from workbench.study.pareto import import_altair

WIDTH, HEIGHT = 420, 260
Rows = Sequence[Mapping[str, Any]]


def chart(rows: Rows, title: str) -> Any:
    """Draw an Altair chart of two panels.

    Left: tokens a second over the rate without drafts at the same load, one line a variant, and the prediction for the
    first load as a diamond. Right: the fraction of verifications that accept 0, 1, 2, ... tokens."""
    altair = import_altair()
    drafting = [row for row in rows if row.get("speed_up")]
    points = [
        {"variant": row["variant"], "load": int(load), "times": times}
        for row in drafting
        for load, times in row["speed_up"].items()
    ]
    loads = sorted({point["load"] for point in points})
    x = altair.X(
        "load:Q", title="sequences at once", axis=altair.Axis(values=loads),
        scale=altair.Scale(type="log", base=2, domain=[min(loads) / 1.1, max(loads) * 1.1], nice=False),
    )  # fmt: skip
    y = altair.Y("times:Q", title="tokens a second, times those without drafts", scale=altair.Scale(zero=True))
    colour = altair.Color("variant:N", title=None, sort=[row["variant"] for row in drafting])
    measured = altair.Chart(altair.Data(values=points)).mark_line(point=True).encode(x=x, y=y, color=colour)
    expected = [
        {"variant": row["variant"], "load": loads[0], "times": row["predicted_speed_up"]}
        for row in drafting
        if "predicted_speed_up" in row
    ]
    predicted = (
        altair.Chart(altair.Data(values=expected))
        .mark_point(shape="diamond", size=90, filled=False)
        .encode(x=x, y=y, color=colour)
    )
    even = altair.Chart(altair.Data(values=[{"times": 1}])).mark_rule(color="#888", strokeDash=[4, 4]).encode(y=y)
    left = altair.layer(even, measured, predicted).properties(
        width=WIDTH, height=HEIGHT, title="speed-up (diamonds: predicted for the first load)"
    )
    counts = [
        {"variant": row["variant"], "accepted": stand, "share": count / sum(row["acceptance_histogram"])}
        for row in drafting
        for stand, count in enumerate(row["acceptance_histogram"])
    ]
    right = (
        altair.Chart(altair.Data(values=counts))
        .mark_bar()
        .encode(
            x=altair.X("accepted:O", title="accepted draft tokens"),
            y=altair.Y("share:Q", title="share of the verifications", axis=altair.Axis(format="%")),
            xOffset=altair.XOffset("variant:N", sort=[row["variant"] for row in drafting]),
            color=colour,
        )
        .properties(width=WIDTH, height=HEIGHT, title="acceptance")
    )
    return altair.hconcat(left, right).properties(title=title)


def svg(rows: Rows, title: str) -> str:
    import vl_convert

    return vl_convert.vegalite_to_svg(chart(rows, title).to_json())


def png(rows: Rows, title: str) -> bytes:
    import vl_convert

    return vl_convert.vegalite_to_png(chart(rows, title).to_json(), scale=2)
