"""Draw the derivation of one value: its largest terms as bars around zero, and their sum."""

from __future__ import annotations

from typing import Any

from workbench import svg
from workbench.svg import truncate_to_width
from workbench.units import format_number

ROW, LEFT, MAX_TERMS = 19, 120, 8


def draw_derivation(found: Any, y: float, width: float) -> tuple[str, float]:
    """Draw the `Derivation` `found`; return markup and height."""
    parts = [svg.text(LEFT, y + 14, f"= {found.formula}", font_weight="bold")]
    top = y + 24
    if not found.terms:
        parts.append(svg.text(LEFT, top + 12, found.note, class_="faint"))
        return "".join(parts), top + 22 - y
    rows = [(term.name, term.product, " × ".join(map(format_number, term.factors)))
            for term in found.largest(MAX_TERMS)]  # fmt: skip
    if rest := len(found.terms) - len(rows):
        rows.append((f"{rest:,} others", found.total - sum(value for _, value, _ in rows), "their sum"))
    factors = " × ".join(found.factors)
    bars = max(120.0, min(360.0, width - LEFT - 430))
    middle, most = LEFT + bars / 2, max([1e-12, *(abs(value) for _, value, _ in rows)])
    parts.append(svg.text(LEFT + bars + 12, top + 10, factors, class_="faint", font_size=11))
    for number, (name, value, made) in enumerate(rows):
        at = top + 16 + ROW * number
        long = bars / 2 * abs(value) / most
        parts += [
            svg.text(LEFT - 8, at + 13, truncate_to_width(name, LEFT - 12), text_anchor="end", font_size=11),
            svg.rect(middle - (long if value < 0 else 0), at + 2, long, ROW - 5, class_="c5" if value > 0 else "c0",
                     tip=f"{name}: {made} = {value:.6g}"),
            svg.text(LEFT + bars + 12, at + 13, f"{made} = {format_number(value)}" if found.factors[1:]
                     else format_number(value), font_size=11),
        ]  # fmt: skip
    end = top + 16 + ROW * len(rows)
    parts.append(svg.line(middle, top + 16, middle, end, class_="line", stroke_opacity=0.5))
    total = f"sum of {len(found.terms):,} terms: {found.total:.6g}" if len(found.terms) > 1 else f"{found.total:.6g}"
    total += f"; in the model's own type {found.value:.6g}" if f"{found.total:.6g}" != f"{found.value:.6g}" else ""
    total += f" ({found.note})" if found.note else ""
    total = total.replace("-", "−")
    parts.append(svg.text(LEFT, end + 15, total, font_weight="bold", font_size=12))
    return "".join(parts), end + 24 - y
