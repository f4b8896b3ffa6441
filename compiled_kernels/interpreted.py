"""Triton's interpreter, which a process has on or off from its start: the backend's check in a process of its own."""

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
    """Return whether Triton is here, and neither a GPU nor the interpreter to run it on."""
    return bool(importlib.util.find_spec("triton")) and not triton_interpreted() and not torch.cuda.is_available()


@contextmanager
def interpreting(operators: Sequence[str]) -> Iterator[Iterator[dict]]:
    """Check the backend triton, interpreted, while the caller does something else; gives the fields of `check`'s rows.

    They come as they are found, one operator after another. Reading them raises BackendError if the process breaks.
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
            process.kill()  # nothing, where it has ended


def _rows(process: subprocess.Popen, words: IO[bytes]) -> Iterator[dict]:
    yield from map(json.loads, process.stdout or ())
    if process.wait():
        words.seek(0)
        last = words.read().decode(errors="replace").strip().splitlines()[-1:]
        raise BackendError(
            f"backend triton: the interpreter's process ended with {process.returncode}: {' '.join(last)}"
        )
