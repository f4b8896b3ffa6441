"""Measurement of this machine's ceilings: each is the best of several methods, by their medians."""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch

import compiled_kernels
from compiled_kernels import Backend, BackendError
from compiled_kernels.backends import backend_problems
from workbench.errors import WorkbenchError
from workbench.study.machine import cpu_times, last_level_cache, others_cpu_share

MAX_WORKING_SET_BYTES = 512 * 2**20  # past a few times the cache, more bytes read no slower
BUDGET_SECONDS = 0.08  # for each way of reading or multiplying
REPEATS = 25
READ_ROW_LENGTH = 1024  # numbers a row, for methods that read rows
GEMM_SHAPE = (512, 1024, 1024)  # rows, out, in: a prefill chunk through a layer's matrix


@dataclass(frozen=True)
class Ceiling:
    """One measured limit: `value` in `unit`, reached by `method`, the median of `repeats` after a warm-up."""

    kind: str  # read or gemm
    value: float
    unit: str  # bytes/s or FLOP/s
    method: str
    threads: int
    repeats: int
    seconds: float  # the median time of one pass
    working_set_bytes: int
    level: str = ""  # of a read: cache, DRAM, or memory where the cache's size is unknown
    measured_bytes: int = 0  # bytes really read, where a smaller working set suffices
    dtype: str = ""
    shape: tuple[int, ...] = ()
    others_cpu_share: float | None = None  # fraction of the cores used by other processes meanwhile


def memory_level_of(working_set_bytes: int, cache_bytes: int | None) -> str:
    """Return the memory level that holds a working set of this size when it is read repeatedly."""
    if cache_bytes is None:
        return "memory"
    return "cache" if working_set_bytes <= cache_bytes else "DRAM"


def saturating_bytes(cache_bytes: int | None) -> int:
    """Return the size in bytes beyond which a larger working set reads no slower, so that none is measured."""
    return max(MAX_WORKING_SET_BYTES, 4 * (cache_bytes or 0))


def measure_read_bandwidth(
    working_set_bytes: int, threads: int | None = None, compiled: bool = False
) -> Ceiling:
    """Measure the bytes a second at which a working set is streamed, once per pass, by the best of several methods.

    Args:
        working_set_bytes: Size of the working set.
        threads: Intra-operator threads; None keeps the present number.
        compiled: Add a compiled product of one row: MLIR's where that backend works (a fifth of a second the first
            time), else Inductor's where a C++ compiler is found (up to half a minute the first time).
    """
    if working_set_bytes < 4:
        raise WorkbenchError(f"working set of {working_set_bytes} bytes: must be at least 4")
    cache = last_level_cache()
    count = min(working_set_bytes, saturating_bytes(cache)) // 4
    width = min(READ_ROW_LENGTH, count)
    data = _filled(count - count % width).view(-1, width)
    nbytes = data.numel() * 4
    with intra_op_threads(threads) as used, torch.inference_mode():
        ways = _reads(data, compiled)
        before = cpu_times()  # from here on: compiling runs helper processes of our own
        best, method = _best(ways)
    return Ceiling(
        kind="read",
        value=nbytes / best.seconds,
        unit="bytes/s",
        method=method,
        threads=used,
        repeats=best.repeats,
        seconds=best.seconds,
        working_set_bytes=working_set_bytes,
        level=memory_level_of(working_set_bytes, cache),
        measured_bytes=nbytes,
        dtype="float32",
        others_cpu_share=others_cpu_share(before),
    )


def measure_gemm_rate(
    dtype: torch.dtype | str, shape: tuple[int, int, int] = GEMM_SHAPE, threads: int | None = None
) -> Ceiling:
    """Measure the FLOP/s of `x[rows, in] @ w[out, in].T`, `shape` (rows, out, in), in the better of two layouts of w.
    """
    rows, out, inner = shape
    if min(shape) < 1:
        raise WorkbenchError(f"GEMM shape {shape}: rows, out and in must be at least 1")
    kind = _dtype(dtype)
    x, w = torch.ones(rows, inner, dtype=kind), torch.ones(out, inner, dtype=kind)
    flat = w.t().contiguous()
    ways = {"mm, weight [out, in]": lambda: x @ w.t(), "mm, weight [in, out]": lambda: x @ flat}
    before = cpu_times()
    with intra_op_threads(threads) as used, torch.inference_mode():
        best, method = _best(ways)
    return Ceiling(
        kind="gemm",
        value=2 * rows * out * inner / best.seconds,
        unit="FLOP/s",
        method=method,
        threads=used,
        repeats=best.repeats,
        seconds=best.seconds,
        working_set_bytes=(x.numel() + w.numel() + rows * out) * kind.itemsize,
        dtype=str(kind).removeprefix("torch."),
        shape=shape,
        others_cpu_share=others_cpu_share(before),
    )


@contextmanager
def intra_op_threads(threads: int | None) -> Iterator[int]:
    """Set torch's intra-operator threads to `threads` (None keeps them), yield the number, and restore it after."""
    before = torch.get_num_threads()
    if threads is not None and threads < 1:
        raise WorkbenchError(f"threads {threads}: must be at least 1")
    torch.set_num_threads(threads or before)
    try:
        yield threads or before
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class _Timing:
    seconds: float
    repeats: int


def _filled(count: int) -> torch.Tensor:
    # Written once: untouched pages all map to one page of zeros, which the cache would serve.
    return torch.empty(count, dtype=torch.float32).fill_(1.0)


def _reads(data: torch.Tensor, compiled: bool) -> dict[str, Callable[[], object]]:
    """Return methods that read all of `data` [row, number] once and write next to nothing."""
    flat, vector = data.view(-1), torch.ones(data.shape[1])
    ways: dict[str, Callable[[], object]] = {
        "torch.sum": lambda: torch.sum(flat),
        "torch.amax": lambda: torch.amax(flat),
        "torch.dot with itself": lambda: torch.dot(flat, flat),
        "torch.mv": lambda: torch.mv(data, vector),
        "torch.sum of rows": lambda: torch.sum(data, dim=1),
    }
    if flat.numel() % 2 == 0:
        ways["torch.sum of int64 views"] = lambda: torch.sum(flat.view(torch.int64))
    if compiled and backend_problems()[Backend.MLIR] is None:
        row = vector[None]
        with suppress(BackendError):  # rows of a width that the kernel does not support: the other methods remain
            compiled_kernels.linear(row, data, backend=Backend.MLIR)
            ways["mlir product of one row"] = lambda: compiled_kernels.linear(row, data, backend=Backend.MLIR)
    elif compiled and any(shutil.which(name) for name in ("c++", "g++", "clang++")):
        reduce = torch.compile(_multiply_reduce, dynamic=False)
        with suppress(RuntimeError):  # a compiler without Python's headers: the other methods remain
            reduce(data, vector)
            ways["compiled multiply-reduce"] = lambda: reduce(data, vector)
    return ways


def _multiply_reduce(matrix: torch.Tensor, vector: torch.Tensor) -> torch.Tensor:
    return (matrix * vector).sum(dim=-1)


def _best(ways: Mapping[str, Callable[[], object]]) -> tuple[_Timing, str]:
    timings = [(_median(way), name) for name, way in ways.items()]
    return min(timings, key=lambda timing: timing[0].seconds)


def _median(way: Callable[[], object]) -> _Timing:
    """Return the median time of a pass: one to warm up, then up to `REPEATS` within the budget, at least one."""
    way()
    times: list[float] = []
    while not times or (len(times) < REPEATS and sum(times) < BUDGET_SECONDS):
        start = time.perf_counter()
        way()
        times.append(max(time.perf_counter() - start, 1e-9))
    return _Timing(statistics.median(times), len(times))


def _dtype(dtype: torch.dtype | str) -> torch.dtype:
    kind = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(kind, torch.dtype) or not kind.is_floating_point:
        raise WorkbenchError(f"GEMM precision {dtype!r}: must be a floating-point type such as bfloat16")
    return kind
