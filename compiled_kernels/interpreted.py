"""Check the backend triton with Triton's interpreter in a child process: a process selects the interpreter at start."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import torch

from compiled_kernels.backends import BackendError, triton_interpreted


def needs_interpreter() -> bool:
    """Return whether Triton is installed but can only run in its interpreter: there is no GPU, and the interpreter is
    not selected.
    """
    return bool(importlib.util.find_spec("triton")) and not triton_interpreted() and not torch.cuda.is_available()


@contextmanager
def interpreting(operators: Sequence[str]) -> Iterator[Iterator[dict]]:
    """Check the backend triton in the interpreter, in parallel with the caller; yields the fields of `check`'s rows.

    Rows arrive as they are computed, operator by operator. Reading them raises BackendError if the process fails.
    """
    place = os.pathsep.join(filter(None, [str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": place}
    command = [sys.executable, "-m", "compiled_kernels.check", *operators]
    with (
        tempfile.TemporaryFile() as words,
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=words, text=True) as process,
    ):
        try:
            yield _rows(process, words)
        finally:
            process.kill()  # no effect if it has ended


def _rows(process: subprocess.Popen, words: IO[bytes]) -> Iterator[dict]:
    yield from map(json.loads, process.stdout or ())
    if process.wait():
        words.seek(0)
        last = words.read().decode(errors="replace").strip().splitlines()[-1:]
        raise BackendError(
            f"backend triton: the interpreter's process ended with {process.returncode}: {' '.join(last)}"
        )
