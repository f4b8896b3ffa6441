"""Ceilings of this machine, stored in one JSON file per machine that may be deleted at any time."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from compiled_kernels.level import LEVEL_VARIABLE
from compiled_kernels.remembered import user_cache_directory
from workbench.errors import WorkbenchError
from workbench.files import read_json_file
from workbench.study.machine import cpu_model, is_contended, last_level_cache
from workbench.study.measure_ceilings import (
    GEMM_SHAPE,
    Ceiling,
    saturating_bytes,
    memory_level_of,
    measure_gemm_rate,
    measure_read_bandwidth,
)
from workbench.study.run_folder import write_atomically

CEILINGS_FILE = "ceilings.json"

__all__ = ["Ceiling", "Ceilings", "ceilings_for", "kept_ceilings", "measure_gemm_rate", "measure_read_bandwidth"]


@dataclass(frozen=True)
class MachineCeilings:
    """Measured ceilings of one machine: read bandwidth by working set, GEMM rates by dtype."""

    read_ceilings: tuple[Ceiling, ...]
    gemm_ceilings: tuple[Ceiling, ...]

    def read_ceiling(self, working_set_bytes: int) -> Ceiling:
        """Return the read ceiling measured at the working set nearest to this size, by ratio."""
        return min(self.read_ceilings, key=lambda c: abs(math.log(c.working_set_bytes / max(working_set_bytes, 1))))

    def gemm_ceiling(self, dtype: str) -> Ceiling:
        """Return the GEMM ceiling of this dtype. Raises WorkbenchError if it was not measured."""
        for ceiling in self.gemm_ceilings:
            if ceiling.dtype == dtype:
                return ceiling
        known = ", ".join(c.dtype for c in self.gemm_ceilings) or "none"
        raise WorkbenchError(f"GEMM ceiling of {dtype}: not measured; measured: {known}")

    def roofline_seconds(self, flops: float, read_bytes: float, dtype: str, working_set_bytes: int) -> float:
        """Return the minimum seconds of a step with these FLOPs and bytes: the longer of computing and reading."""
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
    """Return the ceilings for working sets of these bytes, from this machine's file or measured now and stored there.

    A stored ceiling serves sizes within a factor of 2^(1/4), for the same SIMD level, processor, threads and torch. A
    ceiling measured under contention is measured again, and the higher one stored. A damaged file is rewritten; where
    none can be written, everything is measured each time.

    Args:
        working_sets: Bytes that a step reads.
        threads: Intra-operator threads; None is torch's present number.
        dtypes: Names of the dtypes whose GEMM rate is wanted.
        gemm_shape: Rows, output and input columns of the GEMM.
        compiled: Also try compiled ways to read.
        refresh: Measure again whatever is stored.
        cache_dir: Folder of the file; None is the cache directory of the workbench.
    """
    threads = threads or torch.get_num_threads()
    file = (cache_dir or user_cache_directory()) / CEILINGS_FILE
    kept = {} if refresh else _load(file)
    measured: dict[str, Ceiling] = {}

    def find(key: str, measure: Callable[[], Ceiling]) -> Ceiling:
        before = kept.get(key)
        if before is None or is_contended(before.others_cpu_share):
            now = measure()
            higher = now if before is None or now.value >= before.value else before
            # Stored with the contention of today: a ceiling measured without contention is final.
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
        _save(file, _load(file) | measured)  # what another process added meanwhile stays
    return MachineCeilings(reads, gemms)


def stored_ceilings(
    *working_sets: int,
    threads: int | None = None,
    dtypes: Iterable[str] = ("float32", "bfloat16"),
    cache_dir: Path | None = None,
) -> MachineCeilings:
    """Return the ceilings that `ceilings_for` stored, each the higher of plain and compiled; measure nothing."""
    threads, kept = threads or torch.get_num_threads(), _load((cache_dir or user_cache_directory()) / CEILINGS_FILE)
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
    held = f", held to {os.environ[LEVEL_VARIABLE]}" if os.environ.get(LEVEL_VARIABLE) else ""  # torch is held with us
    return f"{cpu_model()} x {os.cpu_count()}{held}, threads {threads}, torch {torch.__version__}"


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
        return  # a cache that cannot be written costs time, not the run
