"""Draw attention weights: one small heat map per head, rows down and the context across."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

import numpy as np

from workbench.pixels import colorize, data_uri, upscale, max_pool
from workbench.shown import STYLE, Table

if TYPE_CHECKING:
    from workbench.engine.inspection import Inspection

MAX_MAPS, MAX_COLUMNS, MAX_ROWS = 32, 256, 128
WIDE, HIGH = 192, 96  # pixels that a small map is enlarged to, about
LARGEST, LEAST_HIGH = 24, 10  # pixels of a weight at most, of a map at least


def inspection_table(found: Inspection) -> Table:
    """List the position with the largest weight, by layer and head."""
    rows = []
    for layer, weights in found.weights.items():
        for index, mass in enumerate(weights.numpy()):
            row, position = np.unravel_index(int(mass.argmax()), mass.shape)
            label = f"{mass[row, position]:.2f} from {found.positions[row]} to {position}"
            rows.append((layer, head_index(found, index), label))
    states = ", ".join(f"{layer}: {list(each.shape)}" for layer, each in found.hidden_states.items())
    return Table(
        f"request {found.request_id}: {_rows(found)}", rows, ("layer", "head", "largest weight"),
        f"hidden states before block {states}" if states else "",
    )  # fmt: skip


def inspection_html(found: Inspection) -> str:
    """Draw the first maps of all layers, and say where the others are."""
    maps = [(layer, index) for layer, weights in found.weights.items() for index in range(len(weights))]
    words = inspection_table(found)
    notes = [words.note] if words.note else []
    if len(maps) > MAX_MAPS:
        notes.append(f"{MAX_MAPS} of {len(maps)} heads are drawn; ask for others with layers= and heads=")
    if maps:
        notes.append("dark: 0, yellow: the largest weight of the map; down: rows, across: positions from 0")
    drawn = "".join(_figure(found, layer, index) for layer, index in maps[:MAX_MAPS])
    title = f'<div class="title">{escape(words.title)}</div>'
    label = "".join(f'<div class="note">{escape(note)}</div>' for note in notes)
    return f'<div class="wb-shown">{STYLE}{title}{drawn}{label}</div>'


def head_index(found: Inspection, index: int) -> int:
    return index if found.heads is None else found.heads[index]


def _figure(found: Inspection, layer: int, index: int) -> str:
    whole = found.weights[layer][index].numpy()
    mass, step = max_pool(whole[-MAX_ROWS:], MAX_COLUMNS)
    across = max(1, min(LARGEST, WIDE // mass.shape[1]))
    down = max(1, min(LARGEST, max(HIGH // len(mass), -(-LEAST_HIGH // len(mass)))))
    name = f"layer {layer} head {head_index(found, index)}"
    row, position = np.unravel_index(int(whole.argmax()), whole.shape)
    largest = f"{whole[row, position]:.2f} at {position}"
    label = f"{name}: {_rows(found)}; largest weight {largest}, from {found.positions[row]}"
    pixel = f"; a pixel is the largest of {step} positions" if step > 1 else ""
    picture = data_uri(upscale(colorize(mass, 0.0, float(mass.max())), down, across))
    return (
        f'<figure><img src="{picture}" alt="{escape(label)}" title="{escape(label + pixel)}">'
        f"<figcaption>{name}: {largest}</figcaption></figure>"
    )


def _rows(found: Inspection) -> str:
    few = ", ".join(map(str, found.positions[:8])) + (", ..." if len(found.positions) > 8 else "")
    one = len(found.positions) == 1
    return f"{'row' if one else 'rows'} {few}, of {len(found.token_ids)} positions"
