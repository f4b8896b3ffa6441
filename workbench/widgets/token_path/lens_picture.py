"""Draw the logit lens: the head's likeliest token after each layer, at each position of the text."""

from __future__ import annotations

from collections.abc import Sequence

from workbench import svg
from workbench.svg import truncate_to_width
from workbench.units import format_percent
from workbench.widgets.token_path.data import Candidate, LensCell

ROW, LOW_ROW, LEFT, CELL = 36, 20, 96, 78
MANY_LAYERS = 16  # from this number of layers on, a cell has one line of text
LAST_COLUMN_MARGIN = 4


def positions_shown(count: int, position: int, width: float) -> range:
    """Return the positions around `position` that fit into the picture."""
    across = max(1, min(count, int((width - LEFT - LAST_COLUMN_MARGIN) / CELL)))
    begin = min(max(0, position - across + 2), count - across)
    return range(begin, begin + across)


def draw_lens(
    cells: Sequence[LensCell], tokens: Sequence[str], chosen: tuple[int, int], num_layers: int, width: float
) -> tuple[str, float]:
    """Draw cells with layers upwards and positions to the right; `chosen` is (layer, position). Return markup and
    height."""
    positions = list(dict.fromkeys(cell.position for cell in cells))
    wide = min(130.0, (width - LEFT - LAST_COLUMN_MARGIN) / len(positions))
    low = num_layers >= MANY_LAYERS
    row = LOW_ROW if low else ROW
    bottom = 20 + row * num_layers
    parts = [svg.text(LEFT - 8, 13, "says next", text_anchor="end", class_="faint", font_size=11)]
    for layer in range(num_layers + 1):
        name = f"after layer {layer - 1}" if layer else "embedding"
        y = bottom - row * layer + (13 if low else 21)
        parts.append(svg.text(LEFT - 8, y, name, text_anchor="end", font_size=11))
    room = wide - (44 if low else 10)
    for cell in cells:
        x, y = LEFT + wide * positions.index(cell.position), bottom - row * cell.layer
        here = (cell.layer, cell.position) == chosen
        after = f"after layer {cell.layer - 1}" if cell.layer else "embedding"
        label = f"{cell.text}, {format_percent(cell.probability)}"
        parts.append(svg.group(
            svg.rect(x, y, wide - 3, row - 3, rx=2, class_="c4", fill_opacity=round(0.1 + 0.5 * cell.probability, 3)),
            svg.text(x + 5, y + 13, truncate_to_width(cell.text, room), class_="mono", font_size=11),
            svg.text(*((x + wide - 7, y + 13) if low else (x + 5, y + 28)), format_percent(cell.probability),
                     text_anchor="end" if low else None, font_size=11, class_="faint"),
            svg.rect(x, y, wide - 3, row - 3, rx=2, fill="none", stroke="currentColor",
                     stroke_width=2.5 if here else 0) if here else "",
            key=f"l{cell.layer}.{cell.position}", tabindex=0 if here else -1, role="button",
            data_row="" if cell.position == positions[0] else None,
            tip=f"position {cell.position}, {after}: {label}",
            aria_label=f"position {cell.position}, layer {cell.layer}: {label}",
        ))  # fmt: skip
    under = bottom + row + 10
    parts.append(svg.text(LEFT - 8, under + 2, "the text", text_anchor="end", font_size=11, class_="faint"))
    for number, position in enumerate(positions):
        name = truncate_to_width(tokens[position], wide - 8)
        parts.append(svg.text(LEFT + wide * number + 5, under + 2, name, class_="mono",
                              font_weight="bold" if position == chosen[1] else None))  # fmt: skip
    return "".join(parts), under + 14


def draw_lens_top(top: Sequence[Candidate], chosen: tuple[int, int], y: float, width: float) -> tuple[str, float]:
    """Draw the five likeliest tokens of the chosen cell; return markup and height."""
    layer, position = chosen
    name = f"after layer {layer - 1}" if layer else "of the embedding alone"
    parts = [svg.text(LEFT, y + 14, f"The five likeliest {name}, position {position}", font_weight="bold")]
    bars = min(360.0, width - LEFT - 220)
    for number, each in enumerate(top):
        at = y + 24 + 19 * number
        parts += [
            svg.text(LEFT - 8, at + 12, truncate_to_width(each.text, LEFT - 12), text_anchor="end", class_="mono"),
            svg.rect(LEFT, at + 1, bars * each.before, 13, class_="c0"),
            svg.text(LEFT + bars * each.before + 8, at + 12,
                     f"{format_percent(each.before)}; at the end {format_percent(each.after)}", font_size=11),
        ]  # fmt: skip
    return "".join(parts), 24.0 + 19 * len(top) + 6
