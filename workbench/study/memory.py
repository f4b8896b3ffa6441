"""Measured memory of a loaded model and of this process. Formulas: workbench/model/memory.py."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a fresh process notes the time before it imports torch
    from workbench.engine.runner import Runner


def allocated_weight_bytes(runner: Runner) -> int:
    """Return the bytes of all parameters and buffers of the model, each storage counted once."""
    tensors = [*runner.model.parameters(), *runner.model.buffers()]
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


def resident_bytes() -> int | None:
    """Return the resident bytes of this process now; None where the system does not report them."""
    return _status("VmRSS")


def peak_bytes() -> int | None:
    """Return the peak resident bytes of this process; None where the system does not report them."""
    return _status("VmHWM")


def _status(name: str) -> int | None:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024
    except (OSError, StopIteration, ValueError):
        return None
