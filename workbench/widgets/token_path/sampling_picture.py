"""Draw the end of the path: the likely tokens before and after a filter, and the draw on a line from 0 to 1."""

from __future__ import annotations

from collections.abc import Sequence

from workbench import svg
from workbench.svg import truncate_to_width
from workbench.units import format_percent
from workbench.widgets.token_path.data import Candidate, DrawnToken

ROW, LEFT = 19, 120


def draw_filter(candidates: Sequence[Candidate], width: float) -> tuple[str, float]:
    """Draw each likely token's probability before the filter (outline) and after it (filled); return markup and
    height."""
    bars = min(420.0, width - LEFT - 190)
    most = max([1e-12, *(max(each.before, each.after) for each in candidates)])
    parts = []
    for number, each in enumerate(candidates):
        y = 2 + ROW * number
        label = f"{format_percent(each.before)} → {format_percent(each.after)}" if each.after else "removed"
        tip = f"{each.text}, id {each.token}: {each.before:.6g} before, {each.after:.6g} after"
        parts.append(svg.group(
            svg.text(LEFT - 8, y + 13, truncate_to_width(each.text, LEFT - 12), text_anchor="end", class_="mono",
                     text_decoration=None if each.after else "line-through"),
            svg.rect(LEFT, y + 2, bars * each.before / most, ROW - 5, class_="line", stroke_opacity=0.6),
            svg.rect(LEFT, y + 5, bars * each.after / most, ROW - 11, class_="c0"),
            svg.text(LEFT + bars + 10, y + 13, label, font_size=11), tip=tip,
        ))  # fmt: skip
    height = 2 + ROW * len(candidates)
    note = "outline: before this filter; filled: after it. The likeliest tokens before it are shown."
    return "".join(parts) + svg.text(LEFT, height + 15, note, class_="faint", font_size=11), height + 24


def draw_draw(found: DrawnToken, width: float) -> tuple[str, float]:
    """Draw the tokens by id as segments on a line from 0 to 1, and the random number that picks one; return markup and
    height."""
    long = width - LEFT - 20
    parts = [svg.rect(LEFT, 30, long, 34, fill="none", stroke="currentColor", stroke_opacity=0.4)]
    for number, (name, begin, end) in enumerate(found.segments):
        x, wide = LEFT + long * begin, max(long * (end - begin) - 1, 0.5)
        chosen = begin <= found.number < end
        parts.append(svg.rect(x, 31, wide, 32, class_="c1" if chosen else "c0", tip=f"{name}: {end - begin:.4g}",
                              fill_opacity=0.75 if chosen else 0.3 if number % 2 else 0.18))  # fmt: skip
        if wide > 26:
            parts.append(svg.text(x + wide / 2, 52, truncate_to_width(name, wide), text_anchor="middle",
                                  class_="mono", font_size=11, pointer_events="none"))  # fmt: skip
    at = LEFT + long * found.number
    parts += [
        svg.line(at, 22, at, 72, class_="line", stroke_width=2.5),
        svg.text(min(max(at, LEFT + 40), LEFT + long - 40), 16, f"{found.number:.4f}", text_anchor="middle"),
        svg.text(LEFT, 82, "0", font_size=11),
        svg.text(LEFT + long, 82, "1", text_anchor="end", font_size=11),
        svg.text(LEFT, 106, f"the token drawn: {found.text} ({format_percent(found.probability)})", font_weight="bold"),
    ]
    return "".join(parts), 116.0
