"""Draw the use of experts as a heat map with a line for each layer and a column for each expert.

A cell is shaded by the fraction of the layer's rows that the expert computed, and hatched if it computed none."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from workbench import svg
from workbench.units import format_percent
from workbench.widgets.model_graph.experts import LayerUse, layer_use

WIDTH, LEFT, RIGHT, TOP = 900.0, 70.0, 210.0, 58.0
MAX_CELL, MIN_CELL_HEIGHT, MAX_CELL_HEIGHT = 26.0, 8.0, 22.0
MAX_MAP_HEIGHT = 480.0
LABEL_STEPS = (1, 2, 4, 8, 16, 32, 64, 128)
MIN_LABEL_WIDTH = 20.0  # pixels from one expert's number to the next
HATCH = (
    '<defs><pattern id="wb-no-rows" width="5" height="5" patternUnits="userSpaceOnUse">'
    '<path class="grid" d="M-1 6L6 -1M-1 1L1 -1M4 6L6 4"/></pattern></defs>'
)


def draw_experts(layers: Sequence[int], rows: np.ndarray, caption: str, width: float = WIDTH) -> str:
    """Draw the counts of rows [layer, expert] of `layers`; -1 means that a layer has no such expert."""
    lines, experts = rows.shape
    cell = min(MAX_CELL, (width - LEFT - RIGHT) / experts)
    high = max(MIN_CELL_HEIGHT, min(MAX_CELL_HEIGHT, MAX_MAP_HEIGHT / lines))
    uses = [layer_use(layer, line) for layer, line in zip(layers, rows, strict=True)]
    most = max(max(use.busiest for use in uses), 1e-9)
    right = LEFT + cell * experts + 12
    parts = [HATCH, svg.text(8, 17, caption, font_weight=600), *_experts_axis(experts, cell)]
    parts.append(svg.text(right, TOP - 8, "busiest, unused", font_size=10, class_="faint"))
    step = next((each for each in LABEL_STEPS if each * high >= 11), LABEL_STEPS[-1])
    first = True  # the tabulator key stops at the first cell; arrow keys move on from there
    for place, (use, line) in enumerate(zip(uses, rows, strict=True)):
        y = TOP + place * high
        total = int(line[line >= 0].sum())
        for expert, count in enumerate(line):
            if count >= 0:
                parts.append(
                    _cell(use.layer, expert, int(count), total, most, LEFT + expert * cell, y, cell, high, first)
                )
                first = False
        if place % step == 0:
            parts.append(svg.text(LEFT - 6, y + high / 2 + 4, f"layer {use.layer}", font_size=10, text_anchor="end"))
            parts.append(svg.text(right, y + high / 2 + 4, _summary(use), font_size=10))
    bottom = TOP + lines * high
    return svg.document(width, bottom + 44, *parts, *_legend(most, bottom + 14), title=f"Experts: {caption}")


def _cell(
    layer: int, expert: int, count: int, total: int, most: float, x: float, y: float, wide: float, high: float,
    first: bool,
) -> str:  # fmt: skip
    share = count / max(total, 1)
    fill = svg.cividis_colour(share / most) if count else "url(#wb-no-rows)"
    tip = f"layer {layer}, expert {expert}\n{count:,} of {total:,} rows, {format_percent(share)}"
    return svg.rect(x, y, wide - 0.5, high - 0.5, fill=fill, tip=tip, key=f"{layer}.{expert}",
                    tabindex=0 if first else -1)  # fmt: skip


def _summary(use: LayerUse) -> str:
    return f"{use.busiest / use.even:.1f}x an even share, {use.unused}"


def _experts_axis(experts: int, cell: float) -> list[str]:
    step = next((each for each in LABEL_STEPS if each * cell >= MIN_LABEL_WIDTH), LABEL_STEPS[-1])
    middle = LEFT + cell / 2
    numbers = [
        svg.text(middle + cell * number, TOP - 8, str(number), font_size=10, text_anchor="middle")
        for number in range(0, experts, step)
    ]
    return [svg.text(LEFT, TOP - 24, "expert", font_size=10, class_="faint"), *numbers]


def _legend(most: float, y: float) -> list[str]:
    wide = 200.0
    bars = [svg.rect(LEFT + wide * n / 40, y, wide / 40 + 0.5, 10, fill=svg.cividis_colour(n / 39)) for n in range(40)]
    ends = [
        svg.text(LEFT, y + 22, "0%", font_size=10),
        svg.text(LEFT + wide, y + 22, f"{format_percent(most)} of its rows", font_size=10, text_anchor="middle"),
    ]
    none = svg.rect(LEFT + wide + 70, y, 22, 10, fill="url(#wb-no-rows)", stroke="currentColor", stroke_opacity=0.5)
    return [*bars, *ends, none, svg.text(LEFT + wide + 98, y + 9, "no rows", font_size=10)]
