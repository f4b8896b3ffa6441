"""Represent a chart as a Vega-Lite specification, and render it as SVG and PNG.

vl-convert renders in this process, without a browser or a network: 50 to 80 ms for a chart of 300 points (Zen 3,
measured under load), 0.7 s for the first. Pictures that change many times a second (LiveBench, ServerView, Timeline,
the memory calculator) are therefore drawn by `workbench.svg`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape, unescape
from typing import Any

from workbench.svg import SERIES_COLOURS, html

WIDTH, HEIGHT = 420, 240  # size of a plot in pixels, without its axes
INK = "#1b1b1b"  # colour of text on white, if no page sets a colour
GREY = "#8a8a8a"
DASHES = [[1, 0], [6, 3], [2, 3], [8, 3, 2, 3], [1, 4], [10, 4], [4, 2]]
SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "triangle-right")
View = dict[str, Any]  # a part of a Vega-Lite specification


@dataclass(frozen=True)
class Figure:
    """A chart: `spec` is its Vega-Lite specification without colours of a page. `keys` maps a mark's description to the
    key by which a widget knows the mark; a mark without a description is known by its number."""

    spec: Mapping[str, Any]
    keys: Mapping[str, str] = field(default_factory=dict)

    def svg(self, in_page: bool = False) -> str:
        """Return the chart as SVG on white. With `in_page` it has the colours of the surrounding text, and its marks
        can be reached by pointer and keyboard (as `picture.js` of the widgets expects)."""
        import vl_convert

        text = vl_convert.vegalite_to_svg(_json(self._themed("currentColor" if in_page else INK)))
        return _reachable(text, self.keys) if in_page else text

    def render(self, form: str) -> bytes:
        """Return the content of a file with the chart, in the format `svg` or `png`."""
        return self.png() if form == "png" else self.svg().encode()

    def png(self) -> bytes:
        """Return the chart as PNG on white, with two image pixels for each chart pixel."""
        import vl_convert

        return vl_convert.vegalite_to_png(_json(self._themed(INK)), scale=2)

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        """Show the chart in the colours of a notebook's theme, or on white if a page shows no HTML."""
        page = html(self.svg(in_page=True))
        return {"text/html": page, "image/svg+xml": self.svg(), "text/plain": "a chart"}

    def _themed(self, ink: str) -> View:
        words = {"color": ink, "fontWeight": "normal"}
        axis = {
            "labelColor": ink,
            "titleColor": ink,
            "titleFontWeight": "normal",
            "gridColor": ink,
            "gridOpacity": 0.15,
            "domainColor": ink,
            "domainOpacity": 0.4,
            "tickColor": ink,
            "tickOpacity": 0.4,
            "labelLimit": 260,
        }
        silent = {"aria": False}
        return {
            "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
            "background": None if ink == "currentColor" else "white",
            # Leave more space at the left, where labels end: a page's letters may be wider than those measured here.
            "padding": {"left": 24 if ink == "currentColor" else 5, "top": 5, "right": 5, "bottom": 5},
            "config": {
                "font": "system-ui, sans-serif",
                "view": {"stroke": None},
                "axis": axis,
                "axisX": {"labelOverlap": True},
                "title": words | {"fontSize": 13, "anchor": "start", "subtitleColor": ink, "subtitleFontSize": 11},
                "legend": {"labelColor": ink, "titleColor": ink, "orient": "bottom", "labelLimit": 360},
                "range": {"category": list(SERIES_COLOURS)},
                "text": {"color": ink, "fontSize": 11} | silent,
                "line": silent,
                "rule": silent | {"color": ink},
                "tick": {"color": ink},
                "point": {"color": ink},
            },
            **self.spec,
        }


def beside(figures: Sequence[Figure], title: str = "", columns: int = 2, notes: Sequence[str] = ()) -> Figure:
    """Return one figure with the given figures side by side, `columns` in a row, and notes below the title; each keeps
    its own axes."""
    if len(figures) == 1 and not title and not notes:
        return figures[0]
    parts = [dict(each.spec) for each in figures]
    return Figure(
        {
            "title": {"text": title, "subtitle": list(notes)},
            "concat": parts,
            "columns": columns,
            "resolve": {
                "legend": {"color": "independent"},
                "scale": {"color": "independent", "shape": "independent", "strokeDash": "independent"},
            },
        }
    )


# JSON escapes of characters that XML does not allow. The first alternative skips an escaped backslash, whose second
# backslash would look like the begin of an escape.
_NO_XML = re.compile(r"\\\\|\\[bf]|\\u00[01][0-9a-f]|[\ud800-\udfff\ufffe\uffff]")


def _json(spec: View) -> str:
    """Return a specification as JSON without characters that XML does not allow: they would end this process in
    vl-convert.
    """
    text = json.dumps(spec, ensure_ascii=False, allow_nan=False)
    return _NO_XML.sub(lambda found: found[0] if found[0] == r"\\" else "\ufffd", text)


_SYMBOL = re.compile(r'<(\w+) aria-label="([^"]*)" role="graphics-symbol"')


def _reachable(text: str, keys: Mapping[str, str]) -> str:
    """Give each mark with a description a tooltip, and the key by which a widget's page finds it."""
    count = 0

    def reach(found: re.Match[str]) -> str:
        nonlocal count
        tag, words = found.groups()
        named = f'<{tag} aria-label="{words}" role="graphics-symbol" data-tip="{words}"'
        key = keys.get(unescape(words)) if keys else f"{count}: {unescape(words)}"
        if key is None:
            return named
        count += 1
        # arrow keys move on from the first mark
        return f'{named} data-key="{escape(key)}" tabindex="{-1 if count > 1 else 0}"'

    shrinks = text.replace("<svg ", '<svg style="max-width:100%;height:auto" ', 1)
    return _SYMBOL.sub(reach, shrinks)
