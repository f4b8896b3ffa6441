"""Draw a step's operators from top to bottom: blocks as frames, functions as brackets, times as bars."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from workbench import svg
from workbench.display import format_ranges
from workbench.svg import format_tick, truncate_to_width
from workbench.units import format_bytes, format_quantity, format_seconds
from workbench.widgets.model_graph.data import ModelOperator, attention_kind
from workbench.widgets.model_graph.graph import OperatorGraph, total_cost
from workbench.widgets.model_graph.kernels import backend_of, kernel_of

ROW, HEADER, GAP, TOP = 24, 30, 8, 28  # heights in pixels
BRACKET, BRACKET_WIDTH = 8, 22  # left edge and width of a function's bracket
STREAM, BOX, BOX_WIDTH = 48, 64, 250  # x of the residual stream; left edge and width of an operator's box
NUMBER = 74  # width of a column of figures
TIME = 96  # width of a time with its scope
MIN_WIDTH_WITH_COSTS = 700.0  # pixels of the narrowest picture with columns of FLOPs and bytes
NOT_COUNTED = "not counted"
WHY_NOT_COUNTED = "the cost model counts products, attention and the cache; this it leaves out, as small beside them"


@dataclass(frozen=True)
class _Columns:
    """Left edge of the backend column, right edges of the figures' columns, and ends (left, right) of the time bars."""

    backend: float
    flops: float | None  # None, like bytes, in a narrow picture: only the tooltips show them
    bytes: float | None
    predicted: tuple[float, float]
    measured: tuple[float, float]

    @classmethod
    def within(cls, width: float) -> _Columns:
        backend = BOX + BOX_WIDTH + 12
        if width < MIN_WIDTH_WITH_COSTS:
            room = (width - backend - 62 - 24) / 2
            begin = backend + 62
            return cls(backend, None, None, (begin, begin + room - 8), (begin + room, width - 6))
        flops = backend + 62 + NUMBER
        moved = flops + NUMBER
        room = (width - moved - 24) / 2
        return cls(backend, flops, moved, (moved + 16, moved + 8 + room), (moved + 24 + room, width - 6))


class GraphPicture:
    """The picture of one graph; `unfolded` has the first layer of each set of equal layers drawn one by one."""

    def __init__(self, graph: OperatorGraph, unfolded: tuple[int, ...] = (), width: float = svg.PICTURE_WIDTH):
        self.graph, self.unfolded, self.width = graph, unfolded, width
        self.columns = _Columns.within(self.width)
        times = [graph.predicted((operator,)) for operator in graph.operators]
        times += [graph.measured(operator).seconds for operator in graph.operators]
        self.longest = max((seconds for seconds in times if seconds is not None), default=1.0)
        self.rows: list[tuple[ModelOperator, float]] = []  # drawn operators, with their tops
        self.first = True  # whether the next element is the one that the tab key reaches

    def draw(self) -> str:
        parts = [*self._heads()]
        y = float(TOP)
        loose = [operator for operator in self.graph.operators if operator.layer is None]
        for operator in (each for each in loose if each.side == "embed"):
            parts += self._row(operator, y)
            y += ROW
        y += GAP
        for layers in self.graph.layers():
            for shown in [(layer,) for layer in layers] if layers[0] in self.unfolded else [layers]:
                block, y = self._block(shown, layers, y)
                parts += block
        for operator in (each for each in loose if each.side == "head"):
            parts += self._row(operator, y)
            y += ROW
        parts += self._total(y + 6)
        parts = [*self._brackets(), *parts]
        title = f"{self.graph.spec.name}: operators of a {self.graph.step}"
        return svg.document(self.width, y + 6 + ROW + 8, *parts, title=title)

    def _heads(self) -> Iterator[str]:
        columns = self.columns
        yield svg.text(BRACKET, 14, "function", class_="faint", font_size=11)
        yield svg.text(BOX, 14, "operator", class_="faint", font_size=11)
        yield svg.text(columns.backend, 14, "backend", class_="faint", font_size=11)
        for at, name in ((columns.flops, "FLOPs"), (columns.bytes, "bytes")):
            if at is not None:
                yield svg.text(at, 14, name, class_="faint", font_size=11, text_anchor="end")
        yield svg.text(columns.predicted[0], 14, "predicted", class_="faint", font_size=11)
        yield svg.text(columns.measured[0], 14, "measured", class_="faint", font_size=11)
        yield svg.line(BRACKET, 22, self.width - 6, 22, class_="grid")

    def _block(self, shown: tuple[int, ...], layers: tuple[int, ...], y: float) -> tuple[list[str], float]:
        """Draw the first layer of `shown`, for all of them, in a frame; return markup and the y of the next element."""
        operators = self.graph.of_layer(shown[0])
        bottom = y + HEADER + ROW * len(operators) + 4
        frame = svg.rect(BOX - 8, y, self.width - BOX + 4, bottom - y, rx=6, fill="none", stroke="currentColor",
                         stroke_opacity=0.35)  # fmt: skip
        parts = [frame, self._header(shown, layers, y)]
        stream = y + HEADER
        stream_top, places = stream - 6, []
        for operator in operators:
            if operator.name.startswith("residual sum"):
                places.append(stream + ROW / 2)
            parts += self._row(operator, stream)
            stream += ROW
        parts.append(svg.line(STREAM, stream_top, STREAM, bottom, stroke_opacity=0.6, stroke_width=1.5))
        for place in places:  # additions to the residual stream
            parts.append(svg.circle(STREAM, place, 5, fill="var(--jp-layout-color0,#fff)", stroke="currentColor"))
            parts.append(svg.text(STREAM, place + 3.5, "+", text_anchor="middle", font_size=10))
            parts.append(svg.line(STREAM + 5, place, BOX, place, stroke_opacity=0.6))
        return parts, bottom + GAP

    def _header(self, shown: tuple[int, ...], layers: tuple[int, ...], y: float) -> str:
        drawn, first, graph = shown[0], layers[0], self.graph
        layer = graph.spec.layers[drawn]
        together = total_cost(operator for one in shown for operator in graph.of_layer(one))
        unfolded = first in self.unfolded
        arrow = "" if len(layers) == 1 else "▾ " if unfolded else "▸ "
        name = f"layer {drawn}" if len(shown) == 1 else f"layers {format_ranges(shown)}"
        count = "" if len(shown) == 1 else f" — {len(shown)} equal ones, layer {drawn} is drawn"
        costs = f"{format_quantity(together.flops, 'FLOPs')}, {format_bytes(together.bytes)}"
        costs += " together" if len(shown) > 1 else ""
        beside = costs if self.columns.bytes is not None else format_quantity(together.flops, "FLOPs")
        label = f"{arrow}{name}{count}"
        tip = f"{name}: {attention_kind(layer.attention)}\n{costs}"
        seconds = graph.measured_layer(drawn)
        if seconds is not None:
            tip += f"\nmeasured {format_seconds(seconds)} for layer {drawn}"
        if len(layers) > 1:
            tip += "\nEnter folds the equal layers into one" if unfolded else "\nEnter shows each layer"
        at = self.columns.predicted[0]
        words = svg.text(BOX, y + 19, truncate_to_width(label, at - 16 - BOX), font_weight="bold")
        about = svg.text(at, y + 19, truncate_to_width(beside, self.width - at - 8), class_="faint")
        hit = svg.rect(BOX - 8, y, self.width - BOX + 4, HEADER - 2, fill="transparent")
        if len(layers) == 1:
            return svg.group(hit, words, about, tip=tip)
        return svg.group(
            hit, words, about, tip=tip, key=f"fold:{first}:{drawn}", tabindex=self._tab(), role="button",
            aria_expanded=str(unfolded).lower(), aria_label=f"{name}{count}", style="cursor:pointer",
        )  # fmt: skip

    def _tab(self) -> int:
        """Return the tabindex: 0 for the first element, reached by Tab; -1 for the others, reached by arrow keys."""
        reached, self.first = (0 if self.first else -1), False
        return reached

    def _row(self, operator: ModelOperator, y: float) -> Iterator[str]:
        graph, columns = self.graph, self.columns
        self.rows.append((operator, y))
        middle = y + 16
        predicted, measured = graph.predicted((operator,)), graph.measured(operator)
        plain = operator.flops is None
        box = svg.rect(BOX, y + 2, BOX_WIDTH, ROW - 4, rx=4, stroke="currentColor", stroke_opacity=0.5,
                       fill="currentColor", fill_opacity=0.03 if plain else 0.1)  # fmt: skip
        name = svg.text(BOX + 10, middle, truncate_to_width(operator.name, BOX_WIDTH - 14))
        yield svg.group(
            box, name, key=f"operator:{operator.key}", tabindex=self._tab(), tip=self._describe(operator),
            role="img", aria_label=self._describe(operator),
        )  # fmt: skip
        yield svg.text(columns.backend, middle, backend_of(graph.kernels, operator), font_size=11)
        if columns.flops is None or columns.bytes is None:
            pass
        elif operator.flops is None or operator.bytes is None:
            yield svg.text(columns.bytes, middle, NOT_COUNTED, class_="faint", text_anchor="end", font_size=11)
        else:
            yield svg.text(columns.flops, middle, format_tick(operator.flops), text_anchor="end")
            yield svg.text(columns.bytes, middle, format_bytes(operator.bytes), text_anchor="end")
        yield from self._time(columns.predicted, y, predicted, "" if plain else "no roofs", "c0")
        yield from self._time(columns.measured, y, measured.seconds, measured.remark, "c1", measured.scope)

    def _time(
        self, ends: tuple[float, float], y: float, seconds: float | None, remark: str, style: str, scope: str = ""
    ) -> Iterator[str]:
        begin, end = ends
        if seconds is None:
            yield svg.text(begin, y + 16, truncate_to_width(remark, end - begin), class_="faint", font_size=11)
            return
        room = max(0.0, end - begin - TIME)
        length = room * min(1.0, seconds / self.longest)
        yield svg.rect(begin, y + 6, max(length, 1.0), ROW - 12, class_=style)
        words = f"{format_seconds(seconds)}{f', {scope}' if scope else ''}"
        yield svg.text(begin + length + 6, y + 16, truncate_to_width(words, TIME + room - length), font_size=11)

    def _describe(self, operator: ModelOperator) -> str:
        graph = self.graph
        kernel, measured = kernel_of(graph.kernels, operator), graph.measured(operator)
        letter = graph.letters.get(kernel)
        where = f"function {letter}, {kernel}" if letter else "a call of its own"
        lines = [f"{operator.name}{'' if operator.layer is None else f' of layer {operator.layer}'}"]
        lines += [operator.note] * bool(operator.note)
        lines.append(f"{backend_of(graph.kernels, operator)}: {where}")
        if operator.flops is None or operator.bytes is None:
            lines.append(f"FLOPs and bytes {NOT_COUNTED}: {WHY_NOT_COUNTED}")
        else:
            lines.append(f"{operator.flops:,.0f} FLOPs, {operator.bytes:,.0f} bytes")
            if (seconds := graph.predicted((operator,))) is not None:
                lines.append(f"predicted {format_seconds(seconds)}")
        known = measured.seconds is not None
        lines.append(f"measured {format_seconds(measured.seconds)}, {measured.remark}" if known else measured.remark)
        return "\n".join(lines)

    def _brackets(self) -> Iterator[str]:
        """Draw a bracket along the rows of each function with several operators."""
        graph = self.graph
        begin = 0
        while begin < len(self.rows):
            kernel = kernel_of(graph.kernels, self.rows[begin][0])
            end = begin
            while end + 1 < len(self.rows) and kernel_of(graph.kernels, self.rows[end + 1][0]) == kernel:
                end += 1
            if (letter := graph.letters.get(kernel)) is not None:
                top, bottom = self.rows[begin][1] + 2, self.rows[end][1] + ROW - 2
                group = graph.groups[kernel]
                cost = total_cost(group)
                tip = f"function {letter}: {kernel}\n{len(group)} operators, {format_quantity(cost.flops, 'FLOPs')}, "
                tip += f"{format_bytes(cost.bytes)}"
                if (seconds := graph.predicted(group)) is not None:
                    tip += f"\npredicted {format_seconds(seconds)}"
                colour = f"c{(ord(letter) - ord('A')) % len(svg.SERIES_COLOURS)}"
                yield svg.rect(
                    BRACKET, top, BRACKET_WIDTH, bottom - top, rx=4, class_=colour, fill_opacity=0.35, tip=tip
                )
                middle = top + min(bottom - top, 2 * ROW) / 2 + 4
                yield svg.text(BRACKET + BRACKET_WIDTH / 2, middle, letter, text_anchor="middle", font_weight="bold")
            begin = end + 1

    def _total(self, y: float) -> Iterator[str]:
        graph, columns = self.graph, self.columns
        whole = total_cost(graph.operators)
        yield svg.line(BRACKET, y, self.width - 6, y, class_="grid")
        yield svg.text(BOX, y + 18, "the whole step", font_weight="bold")
        for at, value in ((columns.flops, format_tick(whole.flops)), (columns.bytes, format_bytes(whole.bytes))):
            if at is not None:
                yield svg.text(at, y + 18, value, text_anchor="end", font_weight="bold")
        predicted, measured = graph.predicted(graph.operators), graph.whole
        words = "no roofs" if predicted is None else format_seconds(predicted)
        bold, (begin, end) = {"font_weight": "bold"}, columns.measured
        yield svg.text(columns.predicted[0], y + 18, words, tip="of all FLOPs and all bytes together", **bold)
        words = measured.remark if measured.seconds is None else format_seconds(measured.seconds)
        yield svg.text(begin, y + 18, truncate_to_width(words, end - begin), tip=measured.remark, **bold)


def draw_graph(graph: OperatorGraph, unfolded: tuple[int, ...] = (), width: float = svg.PICTURE_WIDTH) -> str:
    return GraphPicture(graph, unfolded, width).draw()
