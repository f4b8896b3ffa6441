"""Write SVG elements, scales and axes.

Markup takes its colours from the page around it, and has its own colours outside of a page.
Series colours are those of Okabe and Ito (2008), distinct to colour-blind readers; amounts are shaded with cividis
(Nunez, Anderton, Renslow 2018), which such readers see alike.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from html import escape

import numpy as np

from workbench.display import truncate_text
from workbench.pixels import colorize

SERIES_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442")

# Variables of JupyterLab's themes, each with a fallback for other pages.
BASE_STYLE = (
    ".wb-pic{background:var(--jp-layout-color0,#fff);color:var(--jp-ui-font-color0,#1b1b1b);"
    "font:12px var(--jp-ui-font-family,system-ui,sans-serif)}"
    ".wb-pic text{fill:currentColor}.wb-pic .faint{opacity:.62}.wb-pic .grid{stroke:currentColor;stroke-opacity:.18}"
    ".wb-pic .line{fill:none;stroke:currentColor}.wb-pic [data-key]:focus{outline:2px solid #d55e00;outline-offset:1px}"
    + "".join(f".wb-pic .c{n}{{fill:{c}}}.wb-pic .l{n}{{fill:none;stroke:{c}}}" for n, c in enumerate(SERIES_COLOURS))
    # Print on white with dark letters in every theme.
    + "@media print{.wb-pic{--jp-layout-color0:#fff;--jp-layout-color1:#fff;--jp-layout-color2:#eee;"
    "--jp-ui-font-color0:#1b1b1b;--jp-ui-font-color1:#1b1b1b;--jp-ui-font-color2:#555;--jp-content-font-color1:#1b1b1b;"
    "--jp-border-color1:#bbb;--jp-border-color2:#ccc;--jp-error-color1:#b00020;print-color-adjust:exact}}"
)

PICTURE_WIDTH = 960.0  # default width of a drawing in pixels
CHARACTER_WIDTH = 6.2  # pixels of a character at font size 11
MIN_DRAWABLE, MAX_DRAWABLE = 1e-30, 1e30  # smaller and larger values are not drawn
Box = tuple[float, float, float, float]  # left, top, right, bottom
TRAILING_ZEROS = re.compile(r"(\.\d*?)0+$")


def format_coordinate(value: float) -> str:
    """Format a coordinate with at most two decimals, without trailing zeros."""
    return TRAILING_ZEROS.sub(r"\1", f"{value:.2f}").rstrip(".")


def tag(name: str, *inner: str, **attributes: object) -> str:
    """Return an SVG or HTML element around the markup `inner`. In attribute names `_` becomes `-`, and a trailing `_`
    is dropped; attributes with the value None are left out.
    """
    pairs = ((key.rstrip("_").replace("_", "-"), value) for key, value in attributes.items() if value is not None)
    content = "".join(
        f' {key}="{format_coordinate(v) if isinstance(v, float) else escape_attribute(v)}"' for key, v in pairs
    )
    return f"<{name}{content}>{''.join(inner)}</{name}>" if inner else f"<{name}{content}/>"


def escape_attribute(value: object) -> str:
    """Escape a value for use between quotes; line breaks survive in XML."""
    return escape(str(value)).replace("\n", "&#10;")


def rect(x: float, y: float, width: float, height: float, **attributes: object) -> str:
    """Return a rectangle; `tip` is shown on hover and keyboard focus, and a `key` makes the element selectable."""
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
    """Return a diamond around x, y; `half_width` and `half_height` are the distances to its corners."""
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
    """Return a whole SVG picture with the given elements. It shrinks with its container and is never wider than
    `width`; `title` is for screen readers.
    """
    return _isolated(tag(
        "svg", tag("title", escape(title)), tag("style", BASE_STYLE), *parts,
        xmlns="http://www.w3.org/2000/svg", class_="wb-pic", role="group",
        viewBox=f"0 0 {format_coordinate(width)} {format_coordinate(height)}",
        width=float(width), height=float(height), style="max-width:100%;height:auto",
    ))  # fmt: skip


def html(*parts: str) -> str:
    """Return a picture of HTML text and tables in the same colours. `parts` are markup: external text must be
    escaped.
    """
    return _isolated(f'<div class="wb-pic"><style>{BASE_STYLE}</style>{"".join(parts)}</div>')


_STYLES = re.compile(r"(?<=<style>)(.*?)(?=</style>)", re.DOTALL)
_SCOPES = re.compile(r"(?<=wb-pic[. ])st-[0-9a-f]{8}\b")
_SELECTORS = re.compile(r"[^{}]+(?=\{)")
_COMMAS = re.compile(r",(?![^(]*\))")  # between selectors, not within `:is(th,td)`
_IDS = re.compile(r'(\bid="|url\(#)(wb-[a-z0-9-]+?)(?P<own>-x[0-9a-f]{8})?(?=["\)])')
_TAGS_AND_STYLES = re.compile(r"<style>.*?</style>|<[^>]*>", re.DOTALL)


def _isolated(markup: str) -> str:
    """Return a picture with style rules and ids (`wb-...`) that only apply within it, although a page has one namespace
    for all.

    Rules get a class derived from their text, ids a suffix derived from the picture, so that equal pictures have equal
    text. Nested pictures share the outer rules and keep their ids.
    """
    scope, own = f"st-{_digest(''.join(_STYLES.findall(markup)))}", _digest(markup)
    scoped = _SCOPES.sub(scope, markup)
    scoped = _STYLES.sub(lambda found: _scoped_rules(found[0], scope), scoped)
    scoped = scoped.replace('class="wb-pic"', f'class="wb-pic {scope}"', 1)

    def renamed(markup: str) -> str:
        return _IDS.sub(lambda found: found[0] if found["own"] else f"{found[0]}-x{own}", markup)

    return _TAGS_AND_STYLES.sub(lambda found: renamed(found[0]), scoped)  # the text between is content


@lru_cache(512)
def _scoped_rules(rules: str, scope: str) -> str:
    """Return the style rules with the picture's class before every selector."""

    def within(selector: str) -> str:
        rest = re.sub(r"^\.wb-pic(?![\w-])", "", selector.strip())
        if rest.startswith(f".{scope}"):
            return selector.strip()
        return f".wb-pic.{scope}{rest}" if rest != selector.strip() else f".wb-pic.{scope} {rest}"

    def scoped(found: re.Match[str]) -> str:
        return found[0] if found[0].lstrip().startswith("@") else ",".join(map(within, _COMMAS.split(found[0])))

    return _SELECTORS.sub(scoped, rules)


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=4).hexdigest()


@dataclass(frozen=True)
class Axis:
    """A chart's axis. With `names` the positions 0, 1, ... are categories instead of numbers."""

    title: str
    log: bool = False
    names: tuple[str, ...] = ()
    percent: bool = False  # whether values are fractions of one

    def shows(self, value: float) -> bool:
        return abs(value) <= MAX_DRAWABLE and (not self.log or value >= MIN_DRAWABLE)  # False for NaN too


@dataclass(frozen=True)
class Scale:
    """A mapping from values to pixels, linear or logarithmic."""

    low: float
    high: float
    begin: float
    end: float
    log: bool = False

    @classmethod
    def over(cls, values: Sequence[float], begin: float, end: float, axis: Axis, zero: bool = False) -> Scale:
        known = [value for value in values if axis.shows(value)]
        low, high = (min(known), max(known)) if known else (0.0, 1.0)
        if axis.log:
            if not known:
                low, high = 1.0, 10.0
            return cls(low / 1.1, high * 1.1, begin, end, True)
        low = min(0.0, low) if zero else low
        spread = high - low
        if spread <= 1e-9 * max(abs(low), abs(high), MIN_DRAWABLE):  # equal within the resolution of a chart
            spread = max(abs(high), 1.0)
        return cls(low if zero and low == 0 else low - 0.04 * spread, high + 0.04 * spread, begin, end)

    def __call__(self, value: float) -> float:
        if self.log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.begin + share * (self.end - self.begin)

    def ticks(self, max_ticks: int = 6) -> list[float]:
        """Return round values for ticks: multiples of 1, 2 or 5 times a power of ten. On a logarithmic scale they are
        powers of ten, with values between them if needed for at least four.
        """
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1) if self.log else ()
        for steps in ((1,), (1, 3), (1, 2, 5)):
            found = [float(f"{step * 10.0**power:.6g}") for power in powers for step in steps]
            found = [value for value in found if self.low <= value <= self.high]
            if len(found) >= 4:
                return found[:: -(-len(found) // (max_ticks + 2))]
        rough = (self.high - self.low) / max_ticks
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough)
        first = math.ceil(self.low / step)
        return [float(f"{n * step:.12g}") for n in range(first, math.floor(self.high / step) + 1)]


def truncate_to_width(name: str, pixels: float) -> str:
    """Truncate `name` to the available width at font size 11, but keep at least three characters."""
    return truncate_text(name, max(3, int(pixels / CHARACTER_WIDTH)))


def format_tick(value: float) -> str:
    """Format the number at a tick: at most four digits, and a suffix (k, M, ...) from 10,000 on."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            size = 1e3 if letter == "k" else size
            return f"{value / size:.4g}{letter}"
    return f"{value:.4g}"


def boxes_overlap(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def cividis_colour(fraction: float) -> str:
    """Return the cividis colour of an amount between 0 and 1, dark to light; grey for NaN."""
    return "#" + colorize(np.array([[fraction]])).tobytes().hex()


def _interactive(attributes: dict[str, object]) -> dict[str, object]:
    changed = {("data_" + key if key in ("tip", "key") else key): value for key, value in attributes.items()}
    if "data_key" in changed:
        changed.setdefault("tabindex", 0)
    return changed
