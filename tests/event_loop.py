"""Run a coroutine in a loop of its own thread: where a browser test ran before, this thread's loop never ends."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

Result = TypeVar("Result")


def run_async(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Return the result of `coroutine`; playwright's loop, which stays open, forbids `asyncio.run` in its thread."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, coroutine).result()
