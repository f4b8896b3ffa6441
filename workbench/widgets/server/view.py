"""Show a running server: requests, rates, latencies, pages, limits and cost, and the trace of a chosen request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ipywidgets
import traitlets

from workbench.serve.watch.serving_log import RATE_SECONDS
from workbench.serve.watch.snapshot import ACTIVE
from workbench.widgets.server.data import SPANS, open_source, with_traces
from workbench.widgets.server.picture import draw_server
from workbench.widgets.throttle import Throttle
from workbench.widgets.view import PictureWidget

REDRAW_SECONDS = 0.25  # between two redraws, because drawing takes processor time from the server
CLOCK_SECONDS = 1.0  # between two redraws without events: only the time moves on


class ServerView(PictureWidget):
    """A view of a server: requests by state and over time, tokens per second, latencies, pages, cache hits, limits and
    cost.

    `source` is a server (`workbench.serve(runner)`), which the view follows until it is closed, or a snapshot, or the
    file of a saved snapshot. `chosen` is the id of a request (click on it, or choose it with Enter): its tokens and
    decisions are shown below. `span` is the length of the time axis. `snapshot` is the present content, and `save`
    writes it to a file with all its traces.
    """

    span = traitlets.Enum(tuple(SPANS), "60 s")
    chosen = traitlets.Unicode("")

    _was_busy = _closed = False

    def __init__(self, source: Any):
        super().__init__()
        self._source = open_source(source)
        self.throttle = Throttle(self.redraw, REDRAW_SECONDS)
        self.snapshot = self._source.read()
        self.watch("span", "chosen")
        self.shown.on_pick(self._pick)
        spans = ipywidgets.Dropdown(description="show", options=tuple(SPANS), layout={"width": "12em"})
        self.show(self.linked("span", spans))
        if self._source.watch is not None:
            self._leave = self._source.watch(self.throttle.mark)

    def redraw(self) -> None:
        if self._closed:
            return
        self.snapshot = self._source.read()
        super().redraw()
        if self._source.watch is None:
            return
        is_busy = any(self.snapshot.requests[state] for state in ACTIVE)
        if self._was_busy and not is_busy:
            self.keep()
        self._was_busy = is_busy
        rates = self.snapshot.rates[-RATE_SECONDS:]
        if is_busy or any(rate.output_tokens or rate.prompt_tokens for rate in rates):
            self.throttle.mark_later(CLOCK_SECONDS)  # rates fall and bars grow without any event

    def keep(self) -> None:
        self.snapshot = self._source.read()
        super().keep()

    def picture(self) -> str:
        """Draw `snapshot`, and the trace of the chosen request."""
        trace = self._source.trace(self.chosen) if self.chosen else None
        return draw_server(self.snapshot, SPANS[self.span], self.chosen, trace, self._source.address, self.width)

    def save(self, path: str | Path) -> Path:
        """Write `snapshot` with its traces to a JSON file, which `ServerView(path)` shows again; return its path."""
        return with_traces(self.snapshot, self._source).save(path)

    def close(self) -> None:
        self._closed = True
        super().close()

    def _pick(self, key: str) -> None:
        if key.startswith("@"):
            self.chosen = "" if key[1:] == self.chosen else key[1:]
