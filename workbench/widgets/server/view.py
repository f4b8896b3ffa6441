"""Show a server at work: requests, rates, latencies, pages, limits and money, and the trace of a chosen request."""

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

REDRAW_SECONDS = 0.25  # a reader's thread takes its time from the server's
CLOCK_SECONDS = 1.0  # between pictures in which nothing but time has changed


class ServerView(PictureWidget):
    """A server's requests by state and over time, tokens a second, latencies, pages, cache hits, limits and money.

    Given a server (`workbench.serve(runner)`), the view follows it until it is closed; given a snapshot, or the file
    that one was saved to, it shows this. `chosen` is the id of the request whose tokens and decisions are shown below
    (click on it, or choose it with Enter); `span` says how far back requests are drawn. `snapshot` is what is shown,
    and `save` writes it to a file with all its traces.
    """

    span = traitlets.Enum(tuple(SPANS), "60 s")
    chosen = traitlets.Unicode("")

    _was_busy = _closed = False

    def __init__(self, source: Any):
        super().__init__()
        self._source = open_source(source)
        self.throttle = Throttle(self.redraw, REDRAW_SECONDS)
        span = ipywidgets.Dropdown(description="show", options=tuple(SPANS))
        span.layout.width = "12em"
        traitlets.link((self, "span"), (span, "value"))
        self.snapshot = self._source.read()
        self.watch("span", "chosen")
        self.shown.observe(lambda change: self._pick(change["new"]), "picked")
        self.show(span)
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
            self.throttle.mark_later(CLOCK_SECONDS)  # rates fall and bars grow though nothing is reported

    def keep(self) -> None:
        self.snapshot = self._source.read()
        super().keep()

    def picture(self) -> str:
        """Draw the snapshot that is shown."""
        trace = self._source.trace(self.chosen) if self.chosen else None
        return draw_server(self.snapshot, SPANS[self.span], self.chosen, trace, self._source.address, self.width)

    def save(self, path: str | Path) -> Path:
        """Write the snapshot that is shown, with its traces, to a JSON file that `ServerView(path)` shows again."""
        return with_traces(self.snapshot, self._source).save(path)

    def close(self) -> None:
        self._closed = True
        super().close()

    def _pick(self, key: str) -> None:
        if key.startswith("@"):
            self.chosen = "" if key[1:] == self.chosen else key[1:]
