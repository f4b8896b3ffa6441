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
        self._live, self._request, self._pieces = live, request, pieces
        self._wanted = Ablation()
        self._busy = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._engine: tuple[int, ...] | None = None
        self._plain: tuple[int, ...] = ()
        self._found: dict[Ablation, tuple[int, ...]] = {}
        self._error = ""

    def ask(self, ablation: Ablation, on_change: Callable[[], None]) -> None:
        """Compute the text without `ablation` soon, unless it is known; `on_change` is called when it is there."""
        self._wanted, self._error = ablation, ""
        if self._engine is not None and (ablation in self._found or not ablation):
            return
        thread = threading.Thread(target=self._compute, args=(ablation, on_change), daemon=True)
        self._threads = [each for each in self._threads if each.is_alive()] + [thread]
        thread.start()

    def wait(self, seconds: float | None) -> bool:
        """Wait until what was asked for is computed, at most so many seconds; return whether it is."""
        end = None if seconds is None else time.monotonic() + seconds
        left = (None if end is None else max(0.0, end - time.monotonic()) for _ in self._threads)
        return all([join_and_serve(thread, limit) for thread, limit in zip(self._threads, left, strict=True)])

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
        ids, sampling = self._request.prompt_ids, self._request.sampling
        try:
            with self._busy:
                if self._engine is None:
                    handle = self._live.submit(self._request)
                    handle.wait(None)
                    self._plain = self._live.call(lambda runner: continue_text(runner.model, ids, sampling, Ablation()))
                    self._engine = _tokens(handle)
                if ablation and ablation == self._wanted and ablation not in self._found:
                    made = self._live.call(lambda runner: continue_text(runner.model, ids, sampling, ablation))
                    self._found[ablation] = made
        except Exception as error:
            if ablation == self._wanted:  # an earlier one is not shown any more
                self._error = describe_error(error)
        on_change()


def _tokens(handle: Any) -> tuple[int, ...]:
    if handle.error:
        raise WorkbenchError(str(handle.error))
    return next(tuple(event.token_ids) for event in handle.events if event.kind == "finished")
