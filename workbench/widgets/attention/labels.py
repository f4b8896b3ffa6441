"""Label a weight map: title, names on the axes, bounds of window and sinks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from workbench.widgets.attention.picture import HEADS_DASH, SINKS_DASH, WINDOW_DASH
from workbench.widgets.attention.source import AttentionSource

MAX_STEPPED_ROWS = 128  # rows at most whose edge is drawn step by step


@dataclass(frozen=True)
class MapLabels:
    """Of `heads` of a layer, one below the other; `names` are those of all positions."""

    source: AttentionSource
    layer: int
    heads: tuple[int, ...]
    names: Sequence[str]

    @property
    def title(self) -> str:
        window, sinks = self.source.window_and_sinks(self.layer)
        reach = "the whole context" if window is None else f"a window of {window}"
        reach += f" and {sinks} sinks" if sinks else ""
        first, last = self.heads[0], self.heads[-1]
        which = f"head {first}" if first == last else f"heads {first} to {last}"
        size = f"{len(self.source.positions)} queries, {self.source.columns} tokens"
        return f"layer {self.layer}, {which} of {self.source.num_heads(self.layer)}, {reach}; {size}"

    @property
    def axes(self) -> tuple[list[str], list[int], list[str]]:
        """Names and positions of rows, names of columns."""
        numbers = list(self.source.positions) * len(self.heads)
        return [self.names[n] for n in numbers], numbers, list(self.names)

    @property
    def marks(self) -> list[list[Any]]:
        """As in HeatMap: bounds of window and sinks, and where one head's rows end and the next one's begin."""
        (window, sinks), positions = self.source.window_and_sinks(self.layer), self.source.positions
        count, marks = len(positions), []
        consecutive = count > 1 and positions[-1] - positions[0] == count - 1
        bounded = consecutive and window is not None and positions[-1] >= window
        for place in range(len(self.heads)):
            if bounded and window is not None:
                top = place * count - positions[0]
                first, end = max(positions[0], window), positions[-1] + 1
                marks.append([WINDOW_DASH, *_edge(first - window + 1, top + first, end - first)])
                if sinks:
                    marks.append([SINKS_DASH, [sinks, top + first], [sinks, top + end]])
            if place:
                marks.append([HEADS_DASH, [0, place * count], [self.source.columns, place * count]])
        return marks

    def describe_cell(self, row: int, column: int) -> str:
        """From, to, weight."""
        place, at = divmod(row, len(self.source.positions))
        head, position = self.heads[place], self.source.positions[at]
        weights, seen = self.source.read(self.layer, at, at + 1)
        shown = column < weights.shape[-1] and bool((seen[head] if seen.ndim == 3 else seen)[0, column])
        value = f"weight {float(weights[head, 0, column]):.4f}" if shown else "not looked at"
        return f"head {head}: from {self._named(position)} to {self._named(column)}: {value}"

    def _named(self, position: int) -> str:
        name = self.names[position]
        return name if name == str(position) else f"{position} {name}"


def _edge(column: int, row: int, count: int) -> list[list[int]]:
    """The left edge of what `count` rows see, each one column further than the one above: in steps, where one sees
    them, else straight."""
    if count > MAX_STEPPED_ROWS:
        return [[column, row], [column + count, row + count]]
    return [[column + n, row + n + end] for n in range(count) for end in (0, 1)]


def token_label(token: bytes) -> str:
    """A token's text in one line, whatever it holds."""
    text = token.decode("utf-8", "replace")
    return "".join({" ": "·", "\n": "⏎", "\t": "⇥"}.get(c, c if c.isprintable() else "�") for c in text)
