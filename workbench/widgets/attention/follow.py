"""Compute a text a second time beside its runner, so that every row's weights can be shown."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from workbench.errors import WorkbenchError
from workbench.widgets.attention.source import ComputedAttentionSource

QUANTIZED_NOTE = "keys as they were computed, not as the packed cache reads them: for that, AttentionView(runner, inspection)"
EVICTION_NOTE = "every key is there, not only those the eviction keeps: for that, AttentionView(runner, inspection)"


class GenerationFollower:
    """`prompt` and what `runner` makes of it, at most `most` tokens. `take` computes what has come since: it costs the
    runner a step's time, between two of its steps."""

    def __init__(self, runner: Any, prompt: Any, max_tokens: int, sampling: dict[str, Any]):
        from workbench.engine.whole_text import TextAttention
        from workbench.request import Request
        from workbench.trace.events import Decoded
        from workbench.widgets.live import RunnerThread

        self._live, self._decoded = RunnerThread.attach(runner), Decoded
        if isinstance(prompt, Request):
            (self._request,) = runner.read(prompt, sampling)
            max_tokens = max_tokens and self._request.sampling.max_tokens
        elif isinstance(prompt, str):
            (self._request,) = runner.read(prompt, {"max_tokens": max(1, max_tokens), **sampling})
        else:
            (named,) = runner.read([""], {"max_tokens": max(1, max_tokens), **sampling})
            self._request = Request(named.request_id, tuple(int(n) for n in prompt), named.sampling)
        if self._request.invalid_reason or not self._request.prompt_ids:
            raise WorkbenchError(f"AttentionView: {self._request.invalid_reason or 'the prompt is empty: give text or ids'}")
        if self._request.sampling.num_sequences > 1:
            raise WorkbenchError("AttentionView follows one text: leave out n, best_of and beams")
        packed = any(shape.format.packed for shape in runner.store.shapes)
        self.note = QUANTIZED_NOTE if packed else EVICTION_NOTE if runner.cache.evictor is not None else ""
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
