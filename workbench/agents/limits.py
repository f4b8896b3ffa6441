"""Bound an agent's run: rounds, time, tokens, and what a tool may take and return."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any

from pydantic import Field, ValidationError

from workbench.errors import explain
from workbench.settings import Settings

EXPIRE_TRIES = 20  # attempts per second, since the work to end may not have begun at the first
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Limits(Settings):
    """Limits of a run; each has its own stop reason, except tool limits, which show in results."""

    rounds: Annotated[int, Field(ge=1)] = 8  # maximum answers of the model; stop reason: max_rounds
    seconds: Seconds | None = 120.0  # maximum time; cancels an answer in progress; stop reason: max_seconds
    tokens: Annotated[int, Field(ge=1)] | None = 4096  # maximum generated, with thoughts; stop reason: max_total_tokens
    tool_seconds: Seconds = 10.0  # time limit of a tool call; then its result is an error
    result_characters: Annotated[int, Field(ge=80)] = 8000  # maximum characters of a tool's result; the rest is cut


def parse_limits(values: Limits | Mapping[str, Any] | None) -> Limits:
    """Return the limits given as plain values (WorkbenchError with the path of a wrong value)."""
    if isinstance(values, Limits):
        return values
    try:
        return Limits.model_validate({} if values is None else dict(values))
    except ValidationError as error:
        raise explain(error, "limits", Limits) from None


@contextmanager
def deadline(seconds: float, expire: Callable[[], object]) -> Iterator[None]:
    """Call `expire` from a thread if the block takes longer than `seconds`, also while it compiles a grammar and emits
    no events.
    """
    ended = threading.Event()

    def watch() -> None:
        expired = not ended.wait(max(0.0, seconds))
        for _ in range(EXPIRE_TRIES * expired):
            expire()
            if ended.wait(1 / EXPIRE_TRIES):
                return

    if math.isfinite(seconds):
        threading.Thread(target=watch, name="deadline", daemon=True).start()
    try:
        yield
    finally:
        ended.set()
