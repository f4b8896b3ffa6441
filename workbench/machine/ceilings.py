"""Measure this machine's ceilings: read bandwidth and GEMM rate, each the best median of several methods, stored in one
JSON file per machine.

The file may be deleted at any time: its ceilings are then measured again.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

import compiled_kernels
from compiled_kernels import Backend, BackendError
from compiled_kernels.backends import backend_problems
from compiled_kernels.blocked import to_panels
from workbench.errors import WorkbenchError
from workbench.files import cache_directory, read_json_file, write_atomically
from workbench.machine.processor import (
    CpuTimes,
    cpu_model,
    cpu_times,
    last_level_cache,
    others_cpu_share,
    simd_level,
)
from workbench.units import format_percent

MAX_WORKING_SET_BYTES = 512 * 2**20  # beyond a few times the cache size, larger sets read no slower
BUDGET_SECONDS = 0.08  # per method of reading or multiplying
REPEATS = 25
CEILINGS_FILE = "ceilings.json"
READ_ROW_LENGTH = 1024  # numbers a row, for methods that read rows
MAX_OTHER_CORES = 0.2  # used by other processes during a measurement; even a few cores take bandwidth
MAX_SHARE = 1.05  # measured / upper bound; a larger ratio exceeds the scatter and refutes the bound
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
    level: str = ""  # for reads: cache, DRAM, or memory if the cache size is unknown
    measured_bytes: int = 0  # bytes actually read, if a smaller working set suffices
    dtype: str = ""
    shape: tuple[int, ...] = ()
    others_cpu_share: float | None = None  # fraction of the cores used by other processes during it

    @property
    def is_beside_work(self) -> bool:
        """Return whether other processes computed during the measurement, so that the true ceiling may be higher. False
        if unknown."""
        return self.others_cpu_share is not None and self.others_cpu_share * (os.cpu_count() or 1) > MAX_OTHER_CORES


def memory_level_of(working_set_bytes: int, cache_bytes: int | None) -> str:
    """Return the memory level that holds a working set of this size when it is read repeatedly."""
    if cache_bytes is None:
        return "memory"
    return "cache" if working_set_bytes <= cache_bytes else "DRAM"


def saturating_bytes(cache_bytes: int | None) -> int:
    """Return the size in bytes above which a larger working set is read as fast; larger sets are therefore not
    measured."""
    return max(MAX_WORKING_SET_BYTES, 4 * (cache_bytes or 0))


def measure_read_bandwidth(working_set_bytes: int, threads: int | None = None, compiled: bool = False) -> Ceiling:
    """Measure the bytes per second at which a working set is streamed, once per pass, by the best of several methods.

    Args:
        working_set_bytes: Size of the working set.
        threads: Intra-operator threads; None keeps the current number.
        compiled: Add a compiled product of one row: MLIR's if that backend works (a fifth of a second the first
            time), else Inductor's if there is a C++ compiler (up to half a minute the first time).
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
        before = cpu_times()  # after compiling, which runs our own helper processes
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
        others_cpu_share=_beside(before),
    )


def gemm_dtypes(dtype: str) -> tuple[str, ...]:
    """Return the dtypes in which products of `dtype` operands are rated. For bfloat16 these are bfloat16 and float32,
    since processors without bfloat16 instructions are faster after widening; for any other dtype float32."""
    return ("bfloat16", "float32") if dtype == "bfloat16" else ("float32",)


def measure_gemm_rate(
    dtype: torch.dtype | str, shape: tuple[int, int, int] = GEMM_SHAPE, threads: int | None = None
) -> Ceiling:
    """Measure the FLOP/s of `x[rows, in] @ w[out, in].T`, `shape` (rows, out, in), in the best layout of w."""
    rows, out, inner = shape
    if min(shape) < 1:
        raise WorkbenchError(f"GEMM shape {shape}: rows, out and in must be at least 1")
    kind = _dtype(dtype)
    x, w = torch.ones(rows, inner, dtype=kind), torch.ones(out, inner, dtype=kind)
    flat = w.t().contiguous()
    ways = {"mm, weight [out, in]": lambda: x @ w.t(), "mm, weight [in, out]": lambda: x @ flat}
    if backend_problems()[Backend.MLIR] is None:
        with suppress(BackendError, ValueError):  # a shape, or a dtype, that the kernel does not support
            panels = to_panels(w)
            compiled_kernels.linear(x, panels, None, Backend.MLIR)
            ways["mlir product from panels"] = lambda: compiled_kernels.linear(x, panels, None, Backend.MLIR)
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
        others_cpu_share=_beside(before),
    )


def _beside(before: CpuTimes | None) -> float | None:
    """Return the fraction of all cores used by other processes since `before`; child processes count as others here."""
    after = cpu_times()
    if before is None or after is None:
        return None
    return others_cpu_share(replace(before, below={}), replace(after, below={}))


def bound_fault(what: str, share: float) -> str:
    """Return an error message if the measurement `what` exceeds its upper bound (`share` is measured / bound), else an
    empty text."""
    if share <= MAX_SHARE:
        return ""
    return (
        f"{what} was faster than its upper bound ({format_percent(share)} of it), so the bound is wrong: a ceiling of "
        "this machine was measured too low; measure it again while nothing else runs"
    )


@contextmanager
def intra_op_threads(threads: int | str | None) -> Iterator[int]:
    """Set torch's intra-operator threads to `threads` (None, `auto`: unchanged), yield their number, and restore it."""
    before = torch.get_num_threads()
    count = threads if isinstance(threads, int) else before
    if count < 1:
        raise WorkbenchError(f"threads {threads}: must be at least 1")
    torch.set_num_threads(count)
    try:
        yield count
    finally:
        torch.set_num_threads(before)


def engine_threads(threads: int | str, engines: int) -> int:
    """Return the number of threads for each of `engines` engines on this machine: `threads`, or an equal share of the
    cores."""
    return threads if isinstance(threads, int) else max(1, (os.cpu_count() or 1) // engines)


@dataclass(frozen=True)
class _Timing:
    seconds: float
    repeats: int


def _filled(count: int) -> torch.Tensor:
    # Write it once: untouched pages all map to one page of zeros, which stays in the cache.
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
        with suppress(BackendError):  # the kernel does not support this row length: other methods remain
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
    """Return the median time of a pass: one warm-up, then 1 to `REPEATS` passes within the budget."""
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


@dataclass(frozen=True)
class MachineCeilings:
    """The measured ceilings of one machine: read bandwidth by working set size, and GEMM rates by dtype."""

    read_ceilings: tuple[Ceiling, ...]
    gemm_ceilings: tuple[Ceiling, ...]

    def read_ceiling(self, working_set_bytes: int) -> Ceiling:
        """Return the read ceiling measured at the working set nearest to this size, by ratio."""
        return min(self.read_ceilings, key=lambda c: abs(math.log(c.working_set_bytes / max(working_set_bytes, 1))))

    def gemm_ceiling(self, dtype: str) -> Ceiling:
        """Return the GEMM ceiling for operands of this dtype: the highest over `gemm_dtypes`. Raises WorkbenchError if
        it was not measured."""
        kinds = gemm_dtypes(dtype)
        if any(ceiling.dtype == kinds[0] for ceiling in self.gemm_ceilings):
            return max((each for each in self.gemm_ceilings if each.dtype in kinds), key=lambda each: each.value)
        known = ", ".join(c.dtype for c in self.gemm_ceilings) or "none"
        raise WorkbenchError(f"GEMM ceiling of {dtype}: not measured; measured: {known}")

    def roofline_seconds(self, flops: float, read_bytes: float, dtype: str, working_set_bytes: int) -> float:
        """Return the minimum seconds of a step with these FLOPs and bytes: the larger of its compute time and its
        memory time."""
        return max(flops / self.gemm_ceiling(dtype).value, read_bytes / self.read_ceiling(working_set_bytes).value)

    def as_json(self) -> dict:
        return {"reads": [asdict(c) for c in self.read_ceilings], "gemms": [asdict(c) for c in self.gemm_ceilings]}


def ceilings_for(
    *working_sets: int,
    threads: int | None = None,
    dtypes: Iterable[str] = ("float32", "bfloat16"),
    gemm_shape: tuple[int, int, int] = GEMM_SHAPE,
    compiled: bool = False,
    refresh: bool = False,
    cache_dir: Path | None = None,
) -> MachineCeilings:
    """Return the ceilings for working sets of the given sizes in bytes, read from this machine's file, or measured now
    and stored there.

    A stored ceiling serves sizes within a factor of 2^(1/4), for the same SIMD level, processor, threads and torch. A
    ceiling measured under contention is measured again, and the higher value stored. A damaged file is rewritten; if no
    file can be written, everything is measured each time.

    Args:
        working_sets: Working sets of steps in bytes.
        threads: Intra-operator threads; None is torch's current number.
        dtypes: Names of the dtypes for GEMM rates.
        gemm_shape: Rows, output and input columns of the GEMM.
        compiled: Also try compiled methods of reading.
        refresh: Measure again, ignoring stored ceilings.
        cache_dir: Folder of the file; None is the cache directory of the workbench.
    """
    threads = threads or torch.get_num_threads()
    file = (cache_dir or cache_directory()) / CEILINGS_FILE
    kept = {} if refresh else _load(file)
    measured: dict[str, Ceiling] = {}

    def find(key: str, measure: Callable[[], Ceiling]) -> Ceiling:
        before = kept.get(key)
        if before is None or before.is_beside_work:
            now = measure()
            higher = now if before is None or now.value >= before.value else before
            # Store today's contention with the higher value: a ceiling measured without contention is final.
            kept[key] = measured[key] = replace(higher, others_cpu_share=now.others_cpu_share)
        return kept[key]

    reads = tuple(
        find(
            _read_key(threads, size, compiled),
            lambda size=size: measure_read_bandwidth(size, threads, compiled),
        )
        for size in working_sets
    )
    gemms = tuple(
        find(
            _gemm_key(threads, dtype, gemm_shape),
            lambda dtype=dtype: measure_gemm_rate(dtype, gemm_shape, threads),
        )
        for dtype in dtypes
    )
    if measured:
        _save(file, _load(file) | measured)  # keep entries that another process has added
    return MachineCeilings(reads, gemms)


def stored_ceilings(
    *working_sets: int,
    threads: int | None = None,
    dtypes: Iterable[str] = ("float32", "bfloat16"),
    cache_dir: Path | None = None,
) -> MachineCeilings:
    """Return the ceilings stored by `ceilings_for`, without measuring; each is the higher of the plain and the compiled
    one."""
    threads, kept = threads or torch.get_num_threads(), _load((cache_dir or cache_directory()) / CEILINGS_FILE)
    reads = [_highest(kept, *(_read_key(threads, size, way) for way in (False, True))) for size in working_sets]
    gemms = [_highest(kept, _gemm_key(threads, dtype, GEMM_SHAPE)) for dtype in dtypes]
    return MachineCeilings(tuple(c for c in reads if c), tuple(c for c in gemms if c))


def _highest(stored: dict[str, Ceiling], *keys: str) -> Ceiling | None:
    return max((stored[key] for key in keys if key in stored), key=lambda ceiling: ceiling.value, default=None)


def _read_key(threads: int, size: int, compiled: bool) -> str:
    cache = last_level_cache()
    bucket = _bucket(min(size, saturating_bytes(cache)))  # beyond that, one measurement serves all sizes
    return f"{_machine(threads)}, read {bucket} {memory_level_of(size, cache)}{' compiled' * compiled}"


def _gemm_key(threads: int, dtype: str, shape: tuple[int, int, int]) -> str:
    return f"{_machine(threads)}, gemm {dtype} {'x'.join(map(str, shape))}"


def _machine(threads: int) -> str:
    level = f"level {simd_level()}, torch's {torch.backends.cpu.get_cpu_capability()}"
    return f"{cpu_model()} x {os.cpu_count()}, {level}, threads {threads}, torch {torch.__version__}"


def _bucket(size: int) -> str:
    """Round a size to a power of the square root of 2, so that near sizes share one measurement."""
    return f"2^{round(2 * math.log2(max(size, 1))) / 2:g}"


def _load(file: Path) -> dict[str, Ceiling]:
    """Read every valid entry of the file and ignore the others."""
    try:
        entries = dict(read_json_file(file)["ceilings"])
    except (ValueError, LookupError, TypeError):
        return {}
    return {key: ceiling for key, entry in entries.items() if (ceiling := _ceiling(entry))}


def _ceiling(entry: object) -> Ceiling | None:
    names = {f.name for f in fields(Ceiling)}
    if not isinstance(entry, dict) or set(entry) != names or not isinstance(entry["shape"], list):
        return None
    for value in (entry["value"], entry["working_set_bytes"]):
        if not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
            return None
    values: dict[str, Any] = entry | {"shape": tuple(entry["shape"])}
    return Ceiling(**values)


def _save(file: Path, stored: dict[str, Ceiling]) -> None:
    text = json.dumps({"ceilings": {key: asdict(ceiling) for key, ceiling in stored.items()}}, indent=2)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, lambda out: out.write(text.encode()))
    except OSError:
        return  # an unwritable cache must not fail the run
