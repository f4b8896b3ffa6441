"""What a model needs in memory while it decodes, by formula, and what its process has."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a fresh process notes the time before it imports torch
    from workbench.engine.runner import Runner
    from workbench.model.spec import ModelSpec


def weight_bytes(runner: Runner) -> int:
    """Every parameter and buffer of the model, each storage once."""
    tensors = [*runner.model.parameters(), *runner.model.buffers()]
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


def activation_bytes(spec: ModelSpec, rows: int, itemsize: int) -> int:
    """Rows in and out of a layer, the widest layer's own rows (attention's or the feed-forward's), and logits of
    every row in float32."""
    widest = max(
        max((2 * kind.attention.heads + 2 * kind.attention.groups) * kind.attention.dim, 3 * kind.hidden)
        for kind in spec.layers
    )
    return rows * ((2 * spec.width + widest) * itemsize + 4 * spec.vocab)


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
