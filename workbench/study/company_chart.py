"""Chart of determinism: distinct outputs by variant, and the cost of `batch_invariant`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from workbench.study.pareto import import_altair

GOOD, BAD = "#0b6e4f", "#b3541e"
EXPENSIVE_RATIO = 2.0  # times as long
COUNTS = {"varying_outputs": "outputs", "varying_bits": "sets of bits"}
PRICES = {"price_prefill": "prefill", "price_decode_one": "decode of one", "price_decode_many": "decode of many"}


def chart(rows: Sequence[Mapping[str, Any]], title: str) -> Any:
    """Draw an Altair chart: bars of distinct outputs by variant, and beside them the costs as ratios."""
    altair = import_altair()
    counts = _values(rows, COUNTS)
    left = _bars(altair, counts, "different answers to one prompt", "datum.value > 1", "d", tick=1)
    ratios = _values(rows, PRICES)
    if not ratios:
        return left.properties(title=title)
    right = _bars(altair, ratios, "time with the mode / without", f"datum.value > {EXPENSIVE_RATIO}", ".2f", tick=0.5)
    return altair.hconcat(left, right).properties(title=title)


def _values(rows: Sequence[Mapping[str, Any]], names: Mapping[str, str]) -> list[dict[str, Any]]:
    return [
        {"label": f"{row['variant']}: {told}", "value": row[name]}
        for row in rows
        for name, told in names.items()
        if name in row
    ]


def _bars(altair: Any, values: list[dict[str, Any]], axis: str, bad: str, format: str, tick: float) -> Any:
    most = max(each["value"] for each in values)
    base = altair.Chart(altair.Data(values=values)).encode(
        y=altair.Y("label:N", title=None, sort=[each["label"] for each in values], axis=altair.Axis(labelLimit=300)),
        x=altair.X(
            "value:Q", title=axis, axis=altair.Axis(tickMinStep=tick), scale=altair.Scale(domain=[0, 1.15 * most])
        ),
    )
    bars = base.mark_bar().encode(color=altair.condition(bad, altair.value(BAD), altair.value(GOOD)))
    numbers = base.mark_text(align="left", dx=4, fontSize=11).encode(text=altair.Text("value:Q", format=format))
    return (bars + numbers).properties(width=260, height=altair.Step(22))


def svg(rows: Sequence[Mapping[str, Any]], title: str) -> str:
    import vl_convert

    return vl_convert.vegalite_to_svg(chart(rows, title).to_json())


def png(rows: Sequence[Mapping[str, Any]], title: str) -> bytes:
    import vl_convert

    return vl_convert.vegalite_to_png(chart(rows, title).to_json(), scale=2)
