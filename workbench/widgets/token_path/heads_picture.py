"""Draw the attention of all layers and heads as small maps, and one head as a large map with its tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from workbench import svg
from workbench.pixels import colorize, data_uri, max_pool
from workbench.svg import truncate_to_width
from workbench.units import format_percent

LEFT, GAP, MIN_SIDE, MAX_SIDE, LARGE, MAX_CELLS = 70, 6, 22.0, 84.0, 420.0, 40


def draw_head_grid(
    weights: Sequence[np.ndarray | None], chosen: tuple[int, int], off: frozenset[tuple[int, int]], width: float
) -> tuple[str, float]:
    """Draw a row for each layer with a map [token, context] for each head; heads in `off` are crossed out. Return
    markup and height."""
    across = max((len(each) for each in weights if each is not None), default=1)
    side = max(MIN_SIDE, min(MAX_SIDE, (width - LEFT - 4) / across - GAP))
    fits = max(1, int((width - LEFT - 4) / (side + GAP)))
    parts, y = [], 4.0
    for layer, maps in enumerate(weights):
        parts.append(svg.text(LEFT - 8, y + side / 2 + 4, f"layer {layer}", text_anchor="end", font_size=11))
        if maps is None:
            parts.append(svg.text(LEFT, y + side / 2 + 4, "its module shows no weights", class_="faint"))
            y += side + GAP
            continue
        for head, mass in enumerate(maps):
            x, top = LEFT + (side + GAP) * (head % fits), y + (side + GAP) * (head // fits)
            here, gone = (layer, head) == chosen, (layer, head) in off
            name = f"layer {layer}, head {head}" + (", switched off" if gone else "")
            parts.append(_image(mass, x, top, side))
            if gone:
                parts.append(svg.path([(x, top), (x + side, top + side)], class_="l5", stroke_width=3))
                parts.append(svg.path([(x + side, top), (x, top + side)], class_="l5", stroke_width=3))
            parts.append(svg.rect(x, top, side, side, fill="transparent", stroke="currentColor",
                                  stroke_width=3 if here else 0.5, key=f"m{layer}.{head}", role="button",
                                  data_row=None if head else "", tabindex=0 if here else -1,
                                  tip=f"{name}: {_summary(mass)}", aria_label=name))  # fmt: skip
        y += (side + GAP) * -(-len(maps) // fits)
    return "".join(parts), y + 2


def grid_width(weights: Sequence[np.ndarray | None], width: float) -> float:
    """Return the width of the small maps in pixels."""
    across = max((len(each) for each in weights if each is not None), default=1)
    return min(width, LEFT + across * (max(MIN_SIDE, min(MAX_SIDE, (width - LEFT - 4) / across - GAP)) + GAP))


def draw_large_head(mass: np.ndarray, tokens: Sequence[str], name: str, y: float, width: float) -> tuple[str, float]:
    """Draw the weights [token, context] of one head, as separate cells if they fit; return markup and height."""
    left, count = 120.0, len(tokens)
    parts = [svg.text(left, y + 14, name, font_weight="bold")]
    side = min(LARGE, width - left - 20)
    cell, top = min(26.0, side / count), y + 96
    side = cell * count
    parts.append(svg.rect(left, top, side, side, fill="none", stroke="currentColor", stroke_opacity=0.4))
    if count > MAX_CELLS:
        parts.append(_image(mass, left, top, side))
        parts.append(svg.text(left, top - 8, f"{count} tokens: down from, across to", class_="faint"))
        return "".join(parts), 96 + side + 10
    for row in range(count):
        bold = "bold" if row == count - 1 else None
        label = truncate_to_width(tokens[row], left - 12)
        size = 11
        parts.append(svg.text(left - 8, top + cell * row + cell / 2 + 4, label, text_anchor="end", class_="mono",
                              font_size=size, font_weight=bold))  # fmt: skip
        place = f"translate({left + cell * row + cell / 2 + 4:.1f},{top - 6:.1f}) rotate(-60)"
        parts.append(svg.text(0, 0, truncate_to_width(tokens[row], 74), transform=place, class_="mono",
                              font_size=size))  # fmt: skip
        for column in range(row + 1):
            weight = float(mass[row, column])
            if weight:
                parts.append(svg.rect(left + cell * column, top + cell * row, cell - 0.6, cell - 0.6,
                                      fill=svg.cividis_colour(weight**0.5),
                                      tip=f"{tokens[row]} looks at {tokens[column]}: {weight:.4f}"))  # fmt: skip
    return "".join(parts), 96 + side + 10


def _image(mass: np.ndarray, x: float, y: float, side: float) -> str:
    pooled, _ = max_pool(mass, 64)
    pooled = max_pool(pooled.T, 64)[0].T
    seen = np.tril(np.ones(pooled.shape, bool)) if pooled.shape[0] == pooled.shape[1] else pooled > 0
    shades = colorize(np.where(seen, np.sqrt(pooled), 0.0))
    return svg.tag("image", x=x, y=y, width=side, height=side, href=data_uri(shades), preserveAspectRatio="none",
                   style="image-rendering:pixelated")  # fmt: skip


def _summary(mass: np.ndarray) -> str:
    rows = np.arange(len(mass))
    own, before, first = mass[rows, rows].mean(), np.r_[0, mass[rows[1:], rows[:-1]]].mean(), mass[:, 0].mean()
    return (
        f"on average {format_percent(own)} of the weight is on the token itself, {format_percent(before)} on the one "
        f"before, {format_percent(first)} on the first"
    )
