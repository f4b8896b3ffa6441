"""SIGINT at any line of our own code: where Ctrl-C or a notebook's stop button may find it."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from tests.engine.guesses import model_drafts
from tests.engine.tiny import CONTEXT, layer, model_of, runner_of, spec_of
from workbench.kv_cache.format import CacheFormat
from workbench.speculative.proposers import PromptLookupProposer, Speculator

ROOT = str(Path(__file__).resolve().parents[2])
OURS = (f"{ROOT}/workbench", f"{ROOT}/compiled_kernels")


def at_line(line: int, act: Callable[[], None], work: Callable[[], Any]) -> tuple[Any, int]:
    """Do `work`, and at its line number `line` of our code, wherever that is, `act` in the same thread; return its
    result, and the number of its lines of ours, where that line is not among them."""
    count = 0

    def traced(frame: FrameType, event: str, value: Any) -> Any:
        nonlocal count
        if event == "line":
            count += 1
            if count - 1 == line:
                sys.settrace(None)
                act()
        return traced

    def called(frame: FrameType, event: str, value: Any) -> Any:
        return traced if frame.f_code.co_filename.startswith(OURS) else None

    before = sys.gettrace()
    try:
        sys.settrace(called)
        return work(), count
    finally:
        sys.settrace(before)


def lines_of(work: Callable[[], object]) -> int:
    """Return the number of the library's lines that `work` runs through."""
    return at_line(-1, lambda: None, work)[1]


def interrupted(work: Callable[[], object], line: int) -> bool:
    """Run `work` and send SIGINT at its line number `line`; whether it was left with KeyboardInterrupt."""
    try:
        at_line(line, lambda: signal.raise_signal(signal.SIGINT), work)
    except KeyboardInterrupt:
        return True
    return False


MODEL = model_of(spec_of(layer(), layer(2, 1, sliding_window=9)))
PLAIN = model_of(spec_of(layer(dim=8), layer(dim=8)))
PACKED = CacheFormat(format="int8", quant_group=8, columns=8, residual_length=8)
HOST = {"kind": "memory", "bytes": 2**16}
KINDS: dict[str, Any] = {
    "plain": lambda: runner_of(MODEL),
    "few pages, saved on the host": lambda: runner_of(MODEL, pages=22, prefix="radix", offload=HOST),
    "packed": lambda: runner_of(PLAIN, cache=PACKED, page_size=8),
    "evicting": lambda: runner_of(PLAIN, evict={"kind": "heavy_hitters", "budget": 12}, pages=11, offload=HOST),
    "lookup": lambda: runner_of(MODEL, speculator=drafts(PromptLookupProposer(1, 3))),
    "draft model": lambda: runner_of(MODEL, speculator=drafts(model_drafts(runner_of(PLAIN)))),
}


def drafts(proposer: Any) -> Speculator:
    return Speculator(proposer, 3, CONTEXT, "adaptive")
