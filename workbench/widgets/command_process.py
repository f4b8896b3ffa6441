"""Run a command in a separate process, read its output line by line, and let the kernel's stop button stop it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence

from workbench.errors import WorkbenchError
from workbench.machine.environment import child_environment
from workbench.widgets.job import Job


class CommandProcess:
    """A process that runs the command `workbench` with `arguments`.

    `progress_lines` holds the lines of stderr so far. `on_change` is called, in another thread, after each line and at
    the end, when `returncode` is set (below 0: stopped) and `stdout` is complete.
    """

    def __init__(self, arguments: Sequence[str], on_change: Callable[[], None]):
        self.progress_lines: list[str] = []
        self.returncode: int | None = None
        self.stdout = ""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "workbench", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=child_environment(), start_new_session=True,
        )  # fmt: skip
        self._news = on_change
        self._job = Job(self._read_output, lambda _: on_change(), self._interrupt, "a command's listener").start()

    def stop(self) -> None:
        """Interrupt the command and all its children as Ctrl-C would; finished measurements are kept."""
        self._job.stop()

    def _interrupt(self) -> None:
        if self.returncode is None:
            os.killpg(self._process.pid, signal.SIGINT)

    def wait(self) -> int:
        """Wait until the command has ended and return its code. The stop button stops it."""
        self._job.wait()
        if self._job.error:
            raise WorkbenchError(self._job.error)
        assert self.returncode is not None
        return self.returncode

    def _read_output(self, _: Job) -> None:
        out, err = self._process.stdout, self._process.stderr
        assert out is not None and err is not None
        whole: list[str] = []
        reader = threading.Thread(target=lambda: whole.append(out.read()))
        reader.start()
        for line in err:
            self.progress_lines.append(line.rstrip())
            self._news()
        reader.join()
        self.stdout = "".join(whole)
        self.returncode = self._process.wait()
