"""States of widgets that are made by hand, for pictures that are compared with the ones of `golden/`."""

from __future__ import annotations

import os
import re
from pathlib import Path

from tests.serve.watch.logs import log_of
from workbench.serve.watch.serving_log import ServingLog
from workbench.serve.watch.snapshot import Meter, PageUse
from workbench.trace.events import Decoded, Finished, Prefilled, Scheduled, Submitted

GOLDEN = Path(__file__).parent / "golden"
METERS = (Meter("alice: tokens a minute", 60, 60, "tokens", 90.0), Meter("alice: money today", 0.25, 1, "USD"))


def small_log() -> ServingLog:
    """Two requests: one that finished, with three tokens, and one that waits."""
    events = [
        Submitted(10.0, "a", prompt_tokens=40, tenant="alice"),
        Scheduled(10.5, "a", step=1, action="admitted", reason="fits"),
        Prefilled(11.0, "a", step=1, tokens=24, computed=40), Decoded(11.0, "a", "<b>", step=1, token_id=7),
        Decoded(11.5, "a", "\n", step=2, token_id=8, index=1), Decoded(13.5, "a", "", step=3, token_id=9, index=2),
        Finished(13.5, "a", reason="length", token_ids=(7, 8, 9), prompt_tokens=40),
        Submitted(14.0, "b<i>", prompt_tokens=9),
    ]  # fmt: skip
    log = log_of(events, 15.0)
    log._pages, log._meters = lambda: PageUse(2, 3, 5), lambda: METERS
    return log


def is_golden(name: str, markup: str) -> bool:
    """Return whether a picture's marks, words and tips are those that are kept under this name; look at what changed
    and keep the new ones with `WORKBENCH_GOLDEN=1`."""
    plain = re.sub(r"<style>.*?</style>|\bst-\w+|wb-fell-\w+", "", markup, flags=re.S)
    lines = re.sub(r"(?<=>)(?=<[^/])", "\n", plain)
    file = GOLDEN / f"{name}.txt"
    if os.environ.get("WORKBENCH_GOLDEN"):
        file.write_text(lines)
    return lines == file.read_text()
