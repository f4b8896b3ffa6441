"""Run a command of the workbench in a process of its own, read its progress, and stop it."""

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
    """Return the environment of a child process that imports this workbench."""
    place = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": place}


class Job:
    """The command `workbench` with `arguments`.

    `progress_lines` grows line by line (stderr); `on_change` is called, in another thread, with each line and at the
    end, when `returncode` is set (below 0: stopped) and `stdout` is complete.
    """

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
        """Interrupt the command and all its children as Ctrl-C would; finished measurements are kept."""
        if self.code is None:
            os.killpg(self._process.pid, signal.SIGINT)

    def wait(self) -> int:
        """Wait until the command has ended and return its code. The stop button stops it."""
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
