"""What a loaded model takes in memory, and what its process has. By formula: workbench/model/memory.py."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a fresh process notes the time before it imports torch
    from workbench.engine.runner import Runner


def weight_bytes(runner: Runner) -> int:
    """Every parameter and buffer of the model, each storage once."""
    tensors = [*runner.model.parameters(), *runner.model.buffers()]
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


def resident_bytes() -> int | None:
    """What of this process lies in memory now; None where the system does not tell."""
    return _status("VmRSS")


def peak_bytes() -> int | None:
    """The most of this process that lay in memory at once."""
    return _status("VmHWM")


def _status(name: str) -> int | None:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024
    except (OSError, StopIteration, ValueError):
        return None
