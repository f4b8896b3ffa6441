"""Time functions on a GPU in turn, each replayed as a CUDA graph with cold caches, and measure the card's ceilings.

Under TRITON_INTERPRET=1 this is a rehearsal without a GPU: small shapes, each called once, and meaningless times.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from compiled_kernels.backends import triton_interpreted
from workbench.executors.programs.cuda_graph import capture_cuda_graph
from workbench.runs.metrics import percentile

REHEARSED = triton_interpreted()
DEVICE = "cpu" if REHEARSED else "cuda"
Row = dict[str, Any]
Form = Callable[[], Any]
# Bytes written between repetitions: past the 50 MiB of an H100's second-level cache; read; and a matrix's sides.
FLUSH_BYTES, READ_BYTES, MATRIX = (2**10, 2**13, 64) if REHEARSED else (2**28, 2**31, 8192)


def timed(forms: Mapping[str, Form], repetitions: int) -> dict[str, list[float]]:
    """Return the seconds of every call of each form. Forms run in turn, each replayed as a CUDA graph with cold
    caches."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=DEVICE)
    graphs = {name: captured(form) for name, form in forms.items()}
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(1 if REHEARSED else repetitions):
        for name, graph in graphs.items():
            flush.zero_()
            seconds[name].append(elapsed(graph))
    return seconds


def elapsed(form: Form) -> float:
    """Return the seconds of one call, measured by the device's clock."""
    if REHEARSED:
        began = time.perf_counter()
        form()
        return time.perf_counter() - began
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    form()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def captured(form: Form) -> Form:
    return form if REHEARSED else capture_cuda_graph(form)


def spread(seconds: list[float]) -> Row:
    """Return the median and the 10th and 90th percentile of `seconds`, and the number of repetitions."""
    figures = {name: percentile(seconds, q) for name, q in (("seconds", 50), ("p10", 10), ("p90", 90))}
    return {**figures, "repetitions": len(seconds)}


def ceilings(repetitions: int) -> Row:
    """Return this card's ceilings, measured in this process: bytes/s read and copied, and FLOP/s of a bfloat16
    product."""
    data = torch.ones(READ_BYTES // 4, device=DEVICE)
    half = data[: len(data) // 2]
    other = torch.empty_like(half)
    a, b = (torch.randn(MATRIX, MATRIX, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    found = timed({"read": data.sum, "copy": lambda: other.copy_(half), "matrix": lambda: a @ b}, repetitions)
    median = {name: statistics.median(values) for name, values in found.items()}
    return {
        "read_bytes_per_s": READ_BYTES / median["read"],
        "copy_bytes_per_s": READ_BYTES / median["copy"],  # half of them read, half written
        "matrix_flops_per_s": 2 * MATRIX**3 / median["matrix"],
    }


def or_error(described: Row, rows: Callable[..., Iterator[Row]], *arguments: Any) -> Iterator[Row]:
    """Yield `rows`, each merged with `described`; an exception becomes a row with its message."""
    try:
        for row in rows(*arguments):
            yield {**described, **row}
    except Exception as error:
        yield {**described, "error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
