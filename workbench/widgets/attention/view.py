"""Show the attention weights of a layer and head, also while their text is being generated.

A generated text is computed a second time, outside its runner's cache, so that all rows have weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import ipywidgets
import traitlets

from workbench import svg
from workbench.errors import WorkbenchError
from workbench.widgets.attention import picture as drawn
from workbench.widgets.attention.data import (
    ArrayAttentionSource,
    AttentionSource,
    ComputedAttentionSource,
    LayerWeightBytes,
    TilePyramid,
    source_of_inspection,
)
from workbench.widgets.attention.picture import NO_TILES, HeatMap, MapLabels, token_label
from workbench.widgets.single_request import single_request
from workbench.widgets.view import PictureWidget, button

if TYPE_CHECKING:
    from workbench.engine.runner import Runner


VIEW_CACHE_BYTES = 256 * 2**20  # limit of cached layers; the visible layer is always kept
STACKED = (("one head", False), ("heads that share keys", True))
QUANTIZED_NOTE = (
    "keys as they were computed, not as the quantized cache reads them: for that, AttentionView(runner, inspection)"
)
EVICTION_NOTE = "every key is there, not only those the eviction keeps: for that, AttentionView(runner, inspection)"


class AttentionView(PictureWidget):
    """A view of the attention weights [row, context] of one layer and head, or of all heads of a KV head, stacked.

    `source` is one of:

    - a runner, with a `prompt` (text, ids or a Request) that is continued by `max_tokens` tokens in the background (0:
      none; `sampling` as in `stream`), or with an `Inspection` as the `prompt`;
    - an `Inspection`;
    - weights [layer, head, row, context] or {layer: [head, row, context]} with rows for the last positions of the
      context; `groups` is the number of KV heads, `tokens` names the positions.

    The map's tiles are sent when they become visible. Masked keys are hatched; lines bound windows and sinks.
    """

    engine_fields = ("_follow", "source", "_tokenizer", "_cells", "_tiles")
    layer = traitlets.Int(0)
    head = traitlets.Int(0)
    stacked = traitlets.Bool(False)
    problem = traitlets.Unicode("")

    def __init__(
        self,
        source: Runner | Any,
        prompt: Any = None,
        *,
        max_tokens: int = 32,
        layer: int | None = None,
        head: int = 0,
        stacked: bool = False,
        groups: int | None = None,
        tokens: Sequence[str] = (),
        **sampling: Any,
    ):
        super().__init__()
        self.map = HeatMap(tell=self._describe_cell, row_title="from", column_title="to")
        self._follow: GenerationFollower | None = None
        self._tokenizer = getattr(source, "tokenizer", None)
        self._tokens, self._noted = tuple(tokens), ""
        self.source = self._read(source, prompt, groups, max_tokens, sampling)
        self.layer, self.head, self.stacked = self.source.layers[0] if layer is None else layer, head, stacked
        self._check()
        self._cells: dict[int, LayerWeightBytes] = {}
        self._tiles: dict[tuple[int, tuple[int, ...]], TilePyramid] = {}
        self._stop = button(self.stop, "stop", tooltip="end the generation")
        self._last: tuple[int, tuple[int, ...]] | None = None  # layer and heads of the large map
        self.watch("layer", "head", "stacked", "problem")
        self.shown.on_pick(self._picked)
        self.show(self._controls(), below=(self.map,))
        if self._follow is not None:
            self._follow.start(self.throttle.mark)

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until the text is generated, at most `seconds`, and save the picture; return whether the text is
        complete."""
        done = self._follow is None or self._follow.wait(seconds)
        self.throttle.flush()
        self.keep()
        return done

    def stop(self) -> None:
        """Stop the generation within a step or two."""
        if self._follow is not None:
            self._follow.stop()

    def weights(self) -> Any:
        """Return the shown weights: float32 [row, context], or [head, row, context] for stacked heads."""
        found, _ = self.source.read(self.layer, 0, len(self.source.positions))
        return found[list(self._heads())] if self.stacked else found[self.head]

    def close(self) -> None:
        self.stop()
        self.map.close()
        super().close()
        self.map.tiles = NO_TILES

    def redraw(self) -> None:
        """Draw the heads, and send the large map as tiles."""
        self._extend()
        labels, key = self._labels(), (self.layer, self._heads())
        markup, height = self._heading(labels.title)
        self.shown.content = svg.document(self.width, height, markup, title=labels.title)
        rows, numbers, columns = labels.axes
        named = {"row_names": rows, "row_numbers": numbers, "column_names": columns}
        self.map.show_tiles(
            self._of(*key), reset_view=key != self._last, marks=labels.marks, label=labels.title, **named
        )
        self._last = key
        self._trim(key[0])

    def picture(self) -> str:
        """Draw heads, legend and map."""
        labels, tiles = self._labels(), self._of(self.layer, self._heads())
        markup, height = self._heading(labels.title)
        shown = drawn.WeightMap(tiles.downsample(256), tiles.rows, tiles.columns, *labels.axes, labels.marks)
        large, tall = drawn.draw_map(shown, height + 8, self.width)
        return svg.document(self.width, height + tall + 8, markup, large, title=labels.title)

    def _read(
        self, source: Any, prompt: Any, groups: int | None, most: int, sampling: dict[str, Any]
    ) -> AttentionSource:
        if hasattr(source, "model"):
            if hasattr(prompt, "weights"):
                return source_of_inspection(prompt, source.model.spec)
            self._follow = GenerationFollower(source, prompt, most, sampling)
            self._noted = self._follow.note
            return self._follow.weights
        if prompt is not None or sampling:
            raise WorkbenchError("AttentionView: a prompt needs a runner: AttentionView(workbench.load(...), prompt)")
        if hasattr(source, "weights"):
            return source_of_inspection(source, None)
        layers = dict(source) if isinstance(source, Mapping) else dict(enumerate(source))
        return ArrayAttentionSource(layers, num_kv_heads=None if groups is None else dict.fromkeys(layers, groups))

    def _check(self) -> None:
        if self.layer not in self.source.layers:
            known = ", ".join(map(str, self.source.layers))
            raise WorkbenchError(f"AttentionView: there is no layer {self.layer}; known: {known}")
        count, groups = self.source.num_heads(self.layer), self.source.num_kv_heads(self.layer)
        if not 0 <= self.head < count:
            message = f"layer {self.layer} has 0 to {count - 1}"
            raise WorkbenchError(f"AttentionView: there is no head {self.head}; {message}")
        if count % groups:
            raise WorkbenchError(f"AttentionView: {count} heads cannot share {groups} groups of keys evenly")

    def _controls(self) -> ipywidgets.Widget:
        layers = ipywidgets.SelectionSlider(options=list(self.source.layers), description="layer")
        head = ipywidgets.IntSlider(max=self.source.num_heads(self.layer) - 1, description="head")
        stacked = ipywidgets.Dropdown(options=STACKED, description="show")
        self.observe(lambda _: setattr(head, "max", self.source.num_heads(self.layer) - 1), ["layer"])
        controls = [self.linked("layer", layers), self.linked("head", head), self.linked("stacked", stacked)]
        return ipywidgets.HBox(controls if self._follow is None or self._follow.done else [*controls, self._stop])

    def _extend(self) -> None:
        """Extend the text by the tokens generated since the last call."""
        if self._follow is None:
            return
        self._stop.disabled = self._follow.done
        try:
            self._follow.extend()
        except WorkbenchError as error:
            self._follow.stop()
            self.problem = str(error)

    def _heads(self) -> tuple[int, ...]:
        if not self.stacked:
            return (self.head,)
        share = self.source.num_heads(self.layer) // self.source.num_kv_heads(self.layer)
        first = self.head // share * share
        return tuple(range(first, first + share))

    def _of(self, layer: int, heads: tuple[int, ...]) -> TilePyramid:
        cells = self._cells.setdefault(layer, LayerWeightBytes(self.source, layer))
        rows, columns = len(heads) * len(self.source.positions), self.source.columns
        tiles = self._tiles.get((layer, heads))
        if tiles is None or (len(heads) > 1 and tiles.rows != rows):  # new rows move the rows of stacked heads
            tiles = self._tiles[layer, heads] = cells.tiles_of_heads(heads)
        elif tiles.rows != rows:
            tiles.grow(rows, columns)
        return tiles

    def _trim(self, layer: int) -> None:
        """Drop the layers drawn longest ago while the cache is too large; `layer` is the one drawn last."""
        self._cells[layer] = self._cells.pop(layer)  # not `self.layer`, which may have changed meanwhile
        while len(self._cells) > 1 and self._cached_bytes() > VIEW_CACHE_BYTES:
            gone = next(iter(self._cells))
            del self._cells[gone]
            self._tiles = {key: tiles for key, tiles in self._tiles.items() if key[0] != gone}

    def _cached_bytes(self) -> int:
        return sum(each.nbytes for each in (*self._cells.values(), *self._tiles.values()))

    def _heading(self, title: str) -> tuple[str, float]:
        count, share = (
            self.source.num_heads(self.layer),
            self.source.num_heads(self.layer) // self.source.num_kv_heads(self.layer),
        )
        chosen = self._heads()
        thumbs = [
            drawn.HeadThumbnail(head, head // share, self._of(self.layer, (head,)).downsample(64), head in chosen)
            for head in range(count)
        ]
        markup, height = drawn.draw_heads(thumbs, [title, *filter(None, [self._noted, self.problem])], self.width)
        legend, more = drawn.draw_legend(height + 6, self._labels().marks)
        return markup + legend, height + more + 6

    def _labels(self) -> MapLabels:
        return MapLabels(self.source, self.layer, self._heads(), self._names())

    def _names(self) -> list[str]:
        if self._tokens:
            return list(self._tokens)
        if self._tokenizer is None or not self.source.token_ids:
            return [str(n) for n in range(self.source.columns)]
        return [token_label(self._tokenizer.token_bytes(n)) for n in self.source.token_ids]

    def _describe_cell(self, row: int, column: int) -> str:
        return self._labels().describe_cell(row, column)

    def _picked(self, key: str) -> None:
        self.head = int(key.removeprefix("head "))


class GenerationFollower:
    """A `prompt` that `runner` continues by at most `max_tokens` tokens. `extend` computes the weights of the new
    tokens between two steps of the runner, and so delays the runner by about a step."""

    def __init__(self, runner: Any, prompt: Any, max_tokens: int, sampling: dict[str, Any]):
        from workbench.engine.runner_thread import RunnerThread
        from workbench.inspect.whole_text import TextAttention
        from workbench.request import Request
        from workbench.trace.events import Decoded

        self._live, self._decoded = RunnerThread.attach(runner), Decoded
        defaults = {"max_tokens": max(1, max_tokens)}
        self._request = single_request("AttentionView", runner, prompt, sampling, defaults, "an Inspection")
        if isinstance(prompt, Request):
            max_tokens = max_tokens and self._request.sampling.max_tokens
        quantized = any(spec.keeps_residual for spec in runner.store.specs)
        self.note = QUANTIZED_NOTE if quantized else EVICTION_NOTE if runner.kv_cache.evictor is not None else ""
        self._handle: Any = None
        self._leave: Callable[[], None] = lambda: None
        self._most, self._num_read = max_tokens, 0
        self._text = self._live.call(lambda runner: TextAttention(runner.model, self._request.prompt_ids))
        self.weights = ComputedAttentionSource(self._text)

    @property
    def done(self) -> bool:
        return not self._most or (self._handle is not None and self._handle.done)

    def start(self, on_event: Callable[[], None]) -> None:
        """Submit the request; `on_event` is called for each event of the runner."""
        if self._most:
            self._leave = self._live.listen(lambda _: on_event())
            self._handle = self._live.submit(self._request)

    def extend(self) -> None:
        if self._handle is None:
            return
        ended, events = self._handle.done, self._handle.events[self._num_read :]
        self._num_read += len(events)
        fresh = [event.token_id for event in events if isinstance(event, self._decoded)]
        room = self._text.model.spec.max_position_embeddings - len(self._text.token_ids)
        if fresh[:room]:
            self._live.call(lambda _: self._text.extend(fresh[:room]))
        if ended:
            self._leave()
            if self._handle.error:
                raise WorkbenchError(self._handle.error)

    def wait(self, seconds: float | None) -> bool:
        return self._handle is None or self._handle.wait(seconds)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.stop()
        self._leave()
