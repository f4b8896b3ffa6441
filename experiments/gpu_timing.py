"""Time on a GPU: forms in turn, each replayed as a CUDA graph with cold caches, and the card's ceilings."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

Row = dict[str, Any]
Form = Callable[[], Any]
FLUSH_BYTES = 2**28  # written between repetitions: past the 50 MiB of an H100's second-level cache
READ_BYTES = 2**31
MATRIX = 8192


def timed(forms: Mapping[str, Form], repetitions: int) -> dict[str, list[float]]:
    """Return seconds of each form, run in turn; each is replayed as a CUDA graph with cold caches."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    graphs = {name: captured(form) for name, form in forms.items()}
    seconds: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(repetitions):
        for name, graph in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush.zero_()
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            seconds[name].append(start.elapsed_time(end) / 1e3)
    return seconds


def captured(form: Form) -> Any:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            form()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        form()
    return graph


def spread(seconds: list[float]) -> Row:
    """Return the median and the 10th and 90th percentile."""
    ordered = sorted(seconds)
    last = len(ordered) - 1
    low, high = ordered[round(0.1 * last)], ordered[round(0.9 * last)]
    return {"seconds": statistics.median(ordered), "p10": low, "p90": high, "repetitions": len(ordered)}


def ceilings(repetitions: int) -> Row:
    """Measure this card's ceilings in this process: bytes/s read and copied, FLOP/s of a bfloat16 product."""
    data = torch.ones(READ_BYTES // 4, device="cuda")
    half = data[: len(data) // 2]
    other = torch.empty_like(half)
    a, b = (torch.randn(MATRIX, MATRIX, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    found = timed({"read": data.sum, "copy": lambda: other.copy_(half), "matrix": lambda: a @ b}, repetitions)
    median = {name: statistics.median(values) for name, values in found.items()}
    return {
        "read_bytes_per_s": READ_BYTES / median["read"],
        "copy_bytes_per_s": READ_BYTES / median["copy"],  # half of them read, half written
        "matrix_flops_per_s": 2 * MATRIX**3 / median["matrix"],
    }


def or_error(described: Row, rows: Callable[..., Iterator[Row]], *arguments: Any) -> Iterator[Row]:
    """Yield `rows`, each with its description; an exception becomes a row, and the rest goes on."""
    try:
        for row in rows(*arguments):
            yield {**described, **row}
    except Exception as error:
        yield {**described, "error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
