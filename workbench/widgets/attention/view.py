"""Show attention weights of a layer and head, also of a text that is being generated.

Such a text is computed a second time beside its runner, so that every row's weights can be shown.
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
from workbench.widgets.view import PictureWidget

if TYPE_CHECKING:
    from workbench.engine.runner import Runner


VIEW_CACHE_BYTES = 256 * 2**20  # bytes of all layers that were looked at; the one in sight is kept in any case
STACKED = (("one head", False), ("heads that share keys", True))
QUANTIZED_NOTE = (
    "keys as they were computed, not as the quantized cache reads them: for that, AttentionView(runner, inspection)"
)
EVICTION_NOTE = "every key is there, not only those the eviction keeps: for that, AttentionView(runner, inspection)"


class AttentionView(PictureWidget):
    """Attention weights [row, context] of one layer and head, or of all heads that share keys, stacked.

    `source` is a runner with a `prompt` (text, ids or a Request, continued by `max_tokens` tokens in the background,
    `sampling` as in `stream`; 0 continues nothing) or with an `Inspection`; an `Inspection` alone; or weights
    [layer, head, row, context] or {layer: [head, row, context]}, whose rows are the last positions of the context, with
    `groups` of heads that share keys and the `tokens`' names. The map is sent in tiles when they come into sight; what
    a query does not look at is hatched, windows and sinks are bounded by lines.
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
        self._stop = ipywidgets.Button(description="stop", tooltip="end the generation")
        self._last: tuple[int, tuple[int, ...]] | None = None  # what the large map shows
        self.watch("layer", "head", "stacked", "problem")
        self.shown.observe(self._picked, ["picked"])
        self.show(self._controls(), below=(self.map,))
        if self._follow is not None:
            self._follow.start(self.throttle.mark)

    def wait(self, seconds: float | None = None) -> bool:
        """Until the text is generated, or so many seconds: whether it is. The saved picture is then of the whole."""
        done = self._follow is None or self._follow.wait(seconds)
        self.throttle.flush()
        self.keep()
        return done

    def stop(self) -> None:
        """End the generation soon."""
        if self._follow is not None:
            self._follow.stop()

    def weights(self) -> Any:
        """Return the shown weights: float32 [row, context], or [head, row, context] where heads are stacked."""
        found, _ = self.source.read(self.layer, 0, len(self.source.positions))
        return found[list(self._heads())] if self.stacked else found[self.head]

    def close(self) -> None:
        self.stop()
        self.map.close()
        super().close()
        self.map.tiles = NO_TILES

    def redraw(self) -> None:
        """The heads as a picture, the large map by its tiles."""
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
        """Heads, legend and map."""
        labels, tiles = self._labels(), self._of(self.layer, self._heads())
        markup, height = self._heading(labels.title)
        shown = drawn.WeightMap(tiles.downsample(256), tiles.rows, tiles.columns, *labels.axes, labels.marks)
        large, tall = drawn.draw_map(shown, height + 8, self.width)
        return svg.document(self.width, height + tall + 8, markup, large, title=labels.title)

    def _read(
        self, source: Any, prompt: Any, groups: int | None, most: int, sampling: dict[str, Any]
    ) -> AttentionSource:
        if hasattr(source, "model"):
            if prompt is None:
                raise WorkbenchError("AttentionView(runner, prompt): a prompt is missing: text, ids or an Inspection")
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
        layer = ipywidgets.SelectionSlider(options=list(self.source.layers), description="layer")
        head = ipywidgets.IntSlider(max=self.source.num_heads(self.layer) - 1, description="head")
        stacked = ipywidgets.Dropdown(options=STACKED, description="show")
        for control, name in ((layer, "layer"), (head, "head"), (stacked, "stacked")):
            ipywidgets.link((self, name), (control, "value"))
        self.observe(lambda _: setattr(head, "max", self.source.num_heads(self.layer) - 1), ["layer"])
        if self._follow is None or self._follow.done:
            return ipywidgets.HBox([layer, head, stacked])
        self._stop.on_click(lambda _: self.stop())
        return ipywidgets.HBox([layer, head, stacked, self._stop])

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
        if tiles is None or (len(heads) > 1 and tiles.rows != rows):  # stacked rows change places
            tiles = self._tiles[layer, heads] = cells.tiles_of_heads(heads)
        elif tiles.rows != rows:
            tiles.grow(rows, columns)
        return tiles

    def _trim(self, layer: int) -> None:
        """Layers looked at longest ago are let go where all together are too large; `layer` is the last one drawn."""
        self._cells[layer] = self._cells.pop(layer)  # another may be chosen meanwhile
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

    def _picked(self, change: dict[str, Any]) -> None:
        self.head = int(str(change["new"]).removeprefix("head "))


class GenerationFollower:
    """`prompt` and what `runner` makes of it, at most `most` tokens. `take` computes what has come since: it costs the
    runner a step's time, between two of its steps."""

    def __init__(self, runner: Any, prompt: Any, max_tokens: int, sampling: dict[str, Any]):
        from workbench.engine.runner_thread import RunnerThread
        from workbench.inspect.whole_text import TextAttention
        from workbench.request import Request
        from workbench.trace.events import Decoded

        self._live, self._decoded = RunnerThread.attach(runner), Decoded
        if isinstance(prompt, Request):
            (self._request,) = runner.make_requests(prompt, sampling)
            max_tokens = max_tokens and self._request.sampling.max_tokens
        elif isinstance(prompt, str):
            (self._request,) = runner.make_requests(prompt, {"max_tokens": max(1, max_tokens), **sampling})
        else:
            (named,) = runner.make_requests([""], {"max_tokens": max(1, max_tokens), **sampling})
            self._request = Request(named.request_id, tuple(int(n) for n in prompt), named.sampling)
        if self._request.invalid_reason or not self._request.prompt_ids:
            raise WorkbenchError(
                f"AttentionView: {self._request.invalid_reason or 'the prompt is empty: give text or ids'}"
            )
        if self._request.sampling.num_sequences > 1:
            raise WorkbenchError("AttentionView follows one text: leave out n, best_of and beams")
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
        """Have it continued; `mark` is called whenever something came."""
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
