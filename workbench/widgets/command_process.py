"""Run a command in a process of its own, line by line, with the kernel's stop button for it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence

from workbench.machine.environment import child_environment
from workbench.stop_button import register_stoppable
from workbench.waiting import join_and_serve


class CommandProcess:
    """The command `workbench` with `arguments`.

    `progress_lines` grows line by line (stderr); `on_change` is called, in another thread, with each line and at the
    end, when `returncode` is set (below 0: stopped) and `stdout` is complete.
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
        register_stoppable(self)
        self._thread = threading.Thread(target=self._read_output, name="a command's listener", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Interrupt the command and all its children as Ctrl-C would; finished measurements are kept."""
        if self.returncode is None:
            os.killpg(self._process.pid, signal.SIGINT)

    def wait(self) -> int:
        """Wait until the command has ended and return its code. The stop button stops it."""
        try:
            join_and_serve(self._thread)
        except KeyboardInterrupt:
            self.stop()
            raise
        assert self.returncode is not None
        return self.returncode

    def _read_output(self) -> None:
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
        self._news()
