"""Lanes timed in a process of their own: what this one compiles or serves is not in the way, nor thrown away."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from workbench.errors import WorkbenchError

ROOT = Path(__file__).resolve().parents[2]


class Timing:
    """`workbench kernels bench` of one case, under way from the start on; `told` is called when it is done."""

    def __init__(self, operator: str, case: str, lanes: Sequence[str], seconds: float, told: Callable[[], None]):
        self.record: dict[str, Any] = {}
        self.error = ""
        self._stopped, self._told = False, told
        chosen = [word for lane in lanes for word in ("--lane", lane)]
        asked = ["--operator", operator, "--case", case, "--seconds", str(seconds), *chosen, "--json"]
        place = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "workbench", "kernels", "bench", *asked], text=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": place},
        )  # fmt: skip
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self, seconds: float | None = None) -> bool:
        """The stop button ends it."""
        try:
            self._thread.join(seconds)
        except KeyboardInterrupt:
            self.stop()
            raise
        return self.done

    def stop(self) -> None:
        self._stopped = True
        self._process.terminate()

    def _read(self) -> None:
        out, words = self._process.communicate()
        try:
            if self._process.returncode:
                raise WorkbenchError((words.strip().splitlines() or ["no words"])[-1])
            self.record = json.loads(out)
        except (WorkbenchError, ValueError) as error:
            self.error = "the timing was stopped" if self._stopped else f"the timing broke: {error}"
        self._told()
