"""SVG helpers: markup that takes its colours from the page around it and has its own where there is none; numbers with
three digits and their unit.

Series colours are those of Okabe and Ito (2008), distinct to colour-blind readers; amounts are shaded with cividis
(Nunez, Anderton, Renslow 2018), which such readers see alike.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape

import numpy as np

from workbench.pixels import colorize

SERIES_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442")

# Variables of JupyterLab's themes, each with what a page has that is none of its own.
BASE_STYLE = (
    ".wb-pic{background:var(--jp-layout-color0,#fff);color:var(--jp-ui-font-color0,#1b1b1b);"
    "font:12px var(--jp-ui-font-family,system-ui,sans-serif)}"
    ".wb-pic text{fill:currentColor}.wb-pic .faint{opacity:.62}.wb-pic .grid{stroke:currentColor;stroke-opacity:.18}"
    ".wb-pic .line{fill:none;stroke:currentColor}.wb-pic [data-key]:focus{outline:2px solid #d55e00;outline-offset:1px}"
    + "".join(f".wb-pic .c{n}{{fill:{c}}}.wb-pic .l{n}{{fill:none;stroke:{c}}}" for n, c in enumerate(SERIES_COLOURS))
)

TRAILING_ZEROS = re.compile(r"(\.\d*?)0+$")


def format_coordinate(value: float) -> str:
    """Format a coordinate with at most two decimals, without trailing zeros."""
    return TRAILING_ZEROS.sub(r"\1", f"{value:.2f}").rstrip(".")


def tag(name: str, *inner: str, **attributes: object) -> str:
    """One element around the markup `inner`; `_` in an attribute's name is `-`, a trailing one is dropped; None is left
    out."""
    pairs = ((key.rstrip("_").replace("_", "-"), value) for key, value in attributes.items() if value is not None)
    content = "".join(
        f' {key}="{format_coordinate(v) if isinstance(v, float) else escape_attribute(v)}"' for key, v in pairs
    )
    return f"<{name}{content}>{''.join(inner)}</{name}>" if inner else f"<{name}{content}/>"


def escape_attribute(value: object) -> str:
    """Escape a value for use between quotes; line breaks survive in XML."""
    return escape(str(value)).replace("\n", "&#10;")


def rect(x: float, y: float, width: float, height: float, **attributes: object) -> str:
    """`tip` is shown where the pointer or the keyboard's focus is; a `key` makes the element one that can be picked."""
    return tag("rect", x=float(x), y=float(y), width=float(width), height=float(height), **_interactive(attributes))


def circle(x: float, y: float, radius: float, **attributes: object) -> str:
    return tag("circle", cx=float(x), cy=float(y), r=float(radius), **_interactive(attributes))


def line(x1: float, y1: float, x2: float, y2: float, **attributes: object) -> str:
    ends = {"x1": float(x1), "y1": float(y1), "x2": float(x2), "y2": float(y2)}
    return tag("line", **{"class_": "line", **ends, **_interactive(attributes)})


def path(points: Iterable[tuple[float, float]], **attributes: object) -> str:
    content = " ".join(f"{format_coordinate(x)},{format_coordinate(y)}" for x, y in points)
    return tag("polyline", **{"class_": "line", "points": content, **_interactive(attributes)})


def diamond(x: float, y: float, half_width: float = 5, half_height: float = 5, **attributes: object) -> str:
    """Around x, y; `wide` and `high` are from there to its corners."""
    corners = (
        (x, y - half_height),
        (x + half_width, y),
        (x, y + half_height),
        (x - half_width, y),
        (x, y - half_height),
    )
    return path(corners, **attributes)


def polygon(points: Iterable[tuple[float, float]], **attributes: object) -> str:
    return tag(
        "polygon",
        points=" ".join(f"{format_coordinate(x)},{format_coordinate(y)}" for x, y in points),
        **_interactive(attributes),
    )


def text(x: float, y: float, content: str, **attributes: object) -> str:
    return tag("text", escape(content), x=float(x), y=float(y), **_interactive(attributes))


def group(*inner: str, **attributes: object) -> str:
    return tag("g", *inner or ("",), **_interactive(attributes))


def document(width: float, height: float, *parts: str, title: str) -> str:
    """Return a whole picture; `title` is read by screen readers. It shrinks with its place, never beyond `width`."""
    return tag(
        "svg", tag("title", escape(title)), tag("style", BASE_STYLE), *parts,
        xmlns="http://www.w3.org/2000/svg", class_="wb-pic", role="group",
        viewBox=f"0 0 {format_coordinate(width)} {format_coordinate(height)}",
        width=float(width), height=float(height), style="max-width:100%;height:auto",
    )  # fmt: skip


def html(*parts: str) -> str:
    """A picture that is text and tables, in the same colours. `parts` are markup: escape what comes from outside."""
    return f'<div class="wb-pic"><style>{BASE_STYLE}</style>{"".join(parts)}</div>'


def cividis_colour(fraction: float) -> str:
    """Return the cividis colour of an amount between 0 and 1, dark to light; grey for NaN."""
    return "#" + colorize(np.array([[fraction]])).tobytes().hex()


def contrast_colour(fraction: float) -> str:
    """Return black or white, whichever contrasts with `cividis_colour(fraction)`."""
    return "#ffffff" if fraction < 0.55 else "#000000"


def _interactive(attributes: dict[str, object]) -> dict[str, object]:
    changed = {("data_" + key if key in ("tip", "key") else key): value for key, value in attributes.items()}
    if "data_key" in changed:
        changed.setdefault("tabindex", 0)
    return changed


def format_seconds(value: float | None) -> str:
    """`1.5 s`, `20 ms`, `3.14 µs`; – for what is not known."""
    if value is None:
        return "–"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value / 1e-9:.3g} ns"


def format_percent(fraction: float) -> str:
    """`12.5 %`; what is less than a hundredth of one is not counted out."""
    return f"{100 * fraction:.3g} %" if fraction >= 0.0001 else "< 0.01 %"
