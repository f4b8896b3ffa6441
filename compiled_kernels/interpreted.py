"""Triton's interpreter, which a process has on or off from its start: the check of that lane in a process of its own."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch

from compiled_kernels.lanes import Lane, LaneError, interpreted


def needs_interpreter() -> bool:
    """Whether Triton is here, and neither a GPU nor the interpreter to run it on."""
    return bool(importlib.util.find_spec("triton")) and not interpreted() and not torch.cuda.is_available()


def rows_of_interpreter(operator: str) -> Iterator[dict]:
    """The fields of `check`'s rows of the lane triton, interpreted, as they are found. Raises LaneError if the
    process breaks."""
    place = os.pathsep.join(filter(None, [str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH")]))
    surroundings = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": place}
    command = [sys.executable, "-m", "compiled_kernels.interpreted", operator]
    with subprocess.Popen(command, env=surroundings, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield from map(json.loads, process.stdout or ())
        except BaseException:
            process.kill()
            raise
    if process.returncode:
        raise LaneError(f"lane triton: the interpreter's process ended with {process.returncode} in {operator}")


def main(operator: str) -> None:
    from compiled_kernels.check import check

    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a kernel prints is no row
    for row in check((Lane.TRITON,), operator):
        print(json.dumps(asdict(row)), file=answers)


if __name__ == "__main__":
    main(sys.argv[1])
