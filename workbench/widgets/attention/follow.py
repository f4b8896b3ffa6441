"""Compute a text a second time beside its runner, so that every row's weights can be shown."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from workbench.errors import WorkbenchError
from workbench.widgets.attention.source import OfText

PACKED = "keys as they were computed, not as the packed cache reads them: for that, AttentionView(runner, inspection)"
EVICTED = "every key is there, not only those the eviction keeps: for that, AttentionView(runner, inspection)"


class Follow:
    """`prompt` and what `runner` makes of it, at most `most` tokens. `take` computes what has come since: it costs the
    runner a step's time, between two of its steps."""

    def __init__(self, runner: Any, prompt: Any, most: int, sampling: dict[str, Any]):
        from workbench.engine.whole_text import WholeText
        from workbench.request import Request
        from workbench.trace.events import Decoded
        from workbench.widgets.live import Live

        self._live, self._decoded = Live.of(runner), Decoded
        if isinstance(prompt, Request):
            (self._request,) = runner.read(prompt, sampling)
            most = most and self._request.sampling.max_tokens
        elif isinstance(prompt, str):
            (self._request,) = runner.read(prompt, {"max_tokens": max(1, most), **sampling})
        else:
            (named,) = runner.read([""], {"max_tokens": max(1, most), **sampling})
            self._request = Request(named.request_id, tuple(int(n) for n in prompt), named.sampling)
        if self._request.fault or not self._request.prompt_ids:
            raise WorkbenchError(f"AttentionView: {self._request.fault or 'the prompt is empty: give text or ids'}")
        if self._request.sampling.samples > 1:
            raise WorkbenchError("AttentionView follows one text: leave out n, best_of and beams")
        packed = any(shape.format.packed for shape in runner.store.shapes)
        self.note = PACKED if packed else EVICTED if runner.cache.evictor is not None else ""
        self._asked: Any = None
        self._leave: Callable[[], None] = lambda: None
        self._most, self._taken = most, 0
        self._text = self._live.call(lambda runner: WholeText(runner.model, self._request.prompt_ids))
        self.weights = OfText(self._text)

    @property
    def done(self) -> bool:
        return not self._most or (self._asked is not None and self._asked.done)

    def start(self, mark: Callable[[], None]) -> None:
        """Have it continued; `mark` is called whenever something came."""
        if self._most:
            self._leave = self._live.listen(lambda _: mark())
            self._asked = self._live.ask(self._request)

    def take(self) -> None:
        if self._asked is None:
            return
        ended, events = self._asked.done, self._asked.events[self._taken :]
        self._taken += len(events)
        fresh = [event.token_id for event in events if isinstance(event, self._decoded)]
        room = self._text.model.spec.context - len(self._text.token_ids)
        if fresh[:room]:
            self._live.call(lambda _: self._text.extend(fresh[:room]))
        if ended:
            self._leave()
            if self._asked.error:
                raise WorkbenchError(self._asked.error)

    def wait(self, seconds: float | None) -> bool:
        return self._asked is None or self._asked.wait(seconds)

    def stop(self) -> None:
        if self._asked is not None:
            self._asked.stop()
        self._leave()
