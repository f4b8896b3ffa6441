"""The picture of a prompt in varying company: how many different answers, and what it costs to have one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from workbench.study.pareto import altair_module

ONE, MORE = "#0b6e4f", "#b3541e"
COUNTS = {"varying_outputs": "different outputs", "varying_bits": "different bits"}
PRICES = {"price_prefill": "prefill", "price_decode_one": "decode of one", "price_decode_many": "decode of many"}


def chart(rows: Sequence[Mapping[str, Any]], title: str) -> Any:
    """An Altair chart: bars of distinct answers by variant, and beside them the prices as ratios."""
    altair = altair_module()
    counts = [
        {"variant": row["variant"], "what": told, "count": row[name]} for row in rows for name, told in COUNTS.items()
    ]
    ratios = [
        {"variant": row["variant"], "what": told, "ratio": row[name]}
        for row in rows
        for name, told in PRICES.items()
        if name in row
    ]
    left = _bars(
        altair, counts, "count", "distinct answers to one prompt", "datum.count > 1", [row["variant"] for row in rows]
    )
    if not ratios:
        return left.properties(title=title)
    variants = list(dict.fromkeys(each["variant"] for each in ratios))
    right = _bars(altair, ratios, "ratio", "time with the mode / without", "datum.ratio > 2", variants)
    return altair.hconcat(left, right).properties(title=title)


def _bars(altair: Any, values: list[dict], key: str, axis: str, bad: str, variants: list[str]) -> Any:
    base = altair.Chart(altair.Data(values=values)).encode(
        y=altair.Y("variant:N", title=None, sort=variants),
        yOffset=altair.YOffset("what:N"),
        x=altair.X(f"{key}:Q", title=axis),
    )
    bars = base.mark_bar().encode(color=altair.condition(bad, altair.value(MORE), altair.value(ONE)))
    names = (
        base.mark_text(align="left", dx=4, fontSize=10)
        .encode(text="told:N")
        .transform_calculate(told=f"format(datum.{key}, '.3~g') + ' ' + datum.what")
    )
    return (bars + names).properties(width=300, height=altair.Step(16))


def svg(rows: Sequence[Mapping[str, Any]], title: str) -> str:
    import vl_convert

    return vl_convert.vegalite_to_svg(chart(rows, title).to_json())


def png(rows: Sequence[Mapping[str, Any]], title: str) -> bytes:
    import vl_convert

    return vl_convert.vegalite_to_png(chart(rows, title).to_json(), scale=2)
