"""Continue a prompt twice in the background: with the whole model, and with heads and layers switched off."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from workbench.errors import WorkbenchError
from workbench.inspect.ablation import Ablation, continue_text
from workbench.widgets.job import Job
from workbench.widgets.token_path.ablation_picture import Continuations


class AblatedTexts:
    """The continuations of `request` under various ablations; `live` is the runner's thread, and `pieces` turns token
    ids into texts."""

    def __init__(self, live: Any, request: Any, pieces: Callable[[Sequence[int]], tuple[str, ...]]):
        self._live: Any = live
        self._request, self._pieces = request, pieces
        self._wanted = Ablation()
        self._busy = threading.Lock()
        self._jobs: list[Job] = []
        self._engine: tuple[int, ...] | None = None
        self._plain: tuple[int, ...] = ()
        self._found: dict[Ablation, tuple[int, ...]] = {}
        self._error = ""
        self._handle: Any = None
        self._closed, self._submitting = threading.Event(), threading.Lock()  # no request is submitted after `close`

    def ask(self, ablation: Ablation, on_change: Callable[[], None]) -> None:
        """Compute the text under `ablation` soon, unless it is known; call `on_change` when it is done."""
        if self._closed.is_set():
            return
        self._wanted, self._error = ablation, ""
        if self._engine is not None and (ablation in self._found or not ablation):
            return

        def end(job: Job) -> None:
            if ablation == self._wanted and not self._closed.is_set():  # an outdated ablation is not shown
                self._error = job.error
            on_change()

        job = Job(lambda _: self._compute(ablation), end, name="ablated texts").start()
        self._jobs = [each for each in self._jobs if not each.done] + [job]

    def wait(self, seconds: float | None) -> bool:
        """Wait until the requested texts are computed, at most `seconds`; return whether they are."""
        end = None if seconds is None else time.monotonic() + seconds
        left = (None if end is None else max(0.0, end - time.monotonic()) for _ in self._jobs)
        return all([job.wait(limit) for job, limit in zip(self._jobs, left, strict=True)])

    def close(self) -> None:
        """Stop the work after the present token, and drop the reference to the runner."""
        with self._submitting:
            self._closed.set()
            if self._handle is not None:
                self._handle.stop()
            self._live = self._handle = None

    @property
    def continuations(self) -> Continuations:
        """Return the two texts for the picture: the engine's, and the ablated model's if it is known."""
        engine = self._engine or ()
        found = engine if not self._wanted else self._found.get(self._wanted)
        rounding = next(
            (n for n, pair in enumerate(zip(engine, self._plain, strict=False)) if len(set(pair)) > 1), None
        )
        without = None if found is None or self._engine is None else self._pieces(found)
        return Continuations(self._pieces(engine), without, rounding, self._error)

    def token_ids(self) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
        """Return the engine's tokens, and the ablated model's tokens or None while they are computed."""
        engine = self._engine or ()
        return engine, engine if not self._wanted else self._found.get(self._wanted)

    def _compute(self, ablation: Ablation) -> None:
        with self._busy:
            if self._engine is None:
                engine = self._generate()
                self._plain = self._continue_text(Ablation())
                self._engine = engine
            if ablation and ablation == self._wanted and ablation not in self._found:
                self._found[ablation] = self._continue_text(ablation)

    def _generate(self) -> tuple[int, ...]:
        """Submit the request and return the engine's tokens."""
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
    """Raised to stop the computation after `close`."""
