"""A command of the workbench in a process of its own: what it says is heard while it goes on, and it can be stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from workbench.widgets.stop_button import reached

ROOT = Path(__file__).resolve().parents[2]


def surroundings() -> dict[str, str]:
    """The environment of a process that is to find this workbench."""
    place = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": place}


class Job:
    """`workbench` with `words`. `said` grows line by line; `news` is called, in another thread, with each line and at
    the end, when `code` is no longer None (below 0: it was stopped) and `out` is whole."""

    def __init__(self, words: Sequence[str], news: Callable[[], None]):
        self.said: list[str] = []
        self.code: int | None = None
        self.out = ""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "workbench", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=surroundings(), start_new_session=True,
        )  # fmt: skip
        self._news = news
        reached(self)
        self._thread = threading.Thread(target=self._hear, name="a command's listener", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """As Ctrl-C would, for all that it has started: what was measured is kept."""
        if self.code is None:
            os.killpg(self._process.pid, signal.SIGINT)

    def wait(self) -> int:
        """Until it has ended: its code. The stop button stops it."""
        try:
            self._thread.join()
        except KeyboardInterrupt:
            self.stop()
            raise
        assert self.code is not None
        return self.code

    def _hear(self) -> None:
        out, err = self._process.stdout, self._process.stderr
        assert out is not None and err is not None
        whole: list[str] = []
        reader = threading.Thread(target=lambda: whole.append(out.read()))
        reader.start()
        for line in err:
            self.said.append(line.rstrip())
            self._news()
        reader.join()
        self.out = "".join(whole)
        self.code = self._process.wait()
        self._news()
