"""Continue a prompt twice, in the background: as the engine does, and with heads and layers switched off."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from workbench.errors import WorkbenchError, describe_error
from workbench.inspect.ablation import Ablation, continue_text
from workbench.waiting import join_and_serve
from workbench.widgets.token_path.ablation_picture import Continuations


class AblatedTexts:
    """The continuations of `request`; `live` is the runner's thread, and `pieces` makes text of token ids."""

    def __init__(self, live: Any, request: Any, pieces: Callable[[Sequence[int]], tuple[str, ...]]):
        self._live: Any = live
        self._request, self._pieces = request, pieces
        self._wanted = Ablation()
        self._busy = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._engine: tuple[int, ...] | None = None
        self._plain: tuple[int, ...] = ()
        self._found: dict[Ablation, tuple[int, ...]] = {}
        self._error = ""
        self._handle: Any = None
        self._closed, self._submitting = threading.Event(), threading.Lock()  # no request begins once it is closed

    def ask(self, ablation: Ablation, on_change: Callable[[], None]) -> None:
        """Compute the text without `ablation` soon, unless it is known; `on_change` is called when it is there."""
        if self._closed.is_set():
            return
        self._wanted, self._error = ablation, ""
        if self._engine is not None and (ablation in self._found or not ablation):
            return
        thread = threading.Thread(target=self._compute, args=(ablation, on_change), name="ablated texts", daemon=True)
        self._threads = [each for each in self._threads if each.is_alive()] + [thread]
        thread.start()

    def wait(self, seconds: float | None) -> bool:
        """Wait until what was asked for is computed, at most so many seconds; return whether it is."""
        end = None if seconds is None else time.monotonic() + seconds
        left = (None if end is None else max(0.0, end - time.monotonic()) for _ in self._threads)
        return all([join_and_serve(thread, limit) for thread, limit in zip(self._threads, left, strict=True)])

    def close(self) -> None:
        """End the work after the token that is being computed, and let go of the runner."""
        with self._submitting:
            self._closed.set()
            if self._handle is not None:
                self._handle.stop()
            self._live = self._handle = None

    @property
    def continuations(self) -> Continuations:
        """The texts as far as they are known."""
        engine = self._engine or ()
        found = engine if not self._wanted else self._found.get(self._wanted)
        rounding = next(
            (n for n, pair in enumerate(zip(engine, self._plain, strict=False)) if len(set(pair)) > 1), None
        )
        without = None if found is None or self._engine is None else self._pieces(found)
        return Continuations(self._pieces(engine), without, rounding, self._error)

    def token_ids(self) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
        """Return the engine's tokens, and those without what is off."""
        engine = self._engine or ()
        return engine, engine if not self._wanted else self._found.get(self._wanted)

    def _compute(self, ablation: Ablation, on_change: Callable[[], None]) -> None:
        try:
            with self._busy:
                if self._engine is None:
                    engine = self._generate()
                    self._plain = self._continue_text(Ablation())
                    self._engine = engine
                if ablation and ablation == self._wanted and ablation not in self._found:
                    self._found[ablation] = self._continue_text(ablation)
        except _Closed:
            return
        except Exception as error:
            if ablation == self._wanted:  # an earlier one is not shown any more
                self._error = describe_error(error)
        on_change()

    def _generate(self) -> tuple[int, ...]:
        """Return the engine's tokens."""
        with self._submitting:
            if self._live is None:
                raise _Closed
            handle = self._handle = self._live.submit(self._request)
        handle.wait(None)
        self._raise_if_closed()
        if handle.error:
            raise WorkbenchError(str(handle.error))
        return next(tuple(event.token_ids) for event in handle.events if event.kind == "finished")

    def _continue_text(self, ablation: Ablation) -> tuple[int, ...]:
        with self._submitting:
            if (live := self._live) is None:
                raise _Closed
        ids, sampling, closed = self._request.prompt_ids, self._request.sampling, self._closed.is_set
        made = live.call(lambda runner: continue_text(runner.model, ids, sampling, ablation, closed))
        self._raise_if_closed()
        return made

    def _raise_if_closed(self) -> None:
        if self._closed.is_set():
            raise _Closed


class _Closed(Exception):
    """Stop computing texts that are no longer wanted."""
