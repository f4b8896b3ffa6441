"""Read the processor's properties, the CPU use of other processes, free memory, and the measured memory of a loaded
model and of this process.

Values come from psutil, except those that it does not report: the processor's name, flags and caches, and the peak of
this process's memory. Formulas of a model's memory are in workbench/model/memory.py.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from workbench.units import format_percent

if TYPE_CHECKING:
    from workbench.engine.runner import Runner

MAX_CONTENTION = 0.1  # fraction of all cores used by other processes above which timings are unreliable
REPORTED_FLAGS = (
    "avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx_vnni", "avx512_vnni", "avx512_bf16",
    "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8", "asimd", "asimddp", "bf16", "i8mm", "sve", "sve2",
)  # fmt: skip
# Levels of x86-64 as stored in records, lowest first, with the flags that each requires besides those of lower
# levels. compiled_kernels/level.py has the whole list; this file needs no torch.
LEVELS = {
    "v3": {"avx2", "fma"},
    "v4": {"avx512f", "avx512bw", "avx512vl"},
    "v4+vnni": {"avx512_vnni"},
    "v4+bf16": {"avx512_bf16"},
}


@dataclass(frozen=True)
class CpuTimes:
    """CPU seconds since boot, summed over all cores: in total, active, used by this process with its ended children,
    and used by each living descendant."""

    total: float
    active: float
    own: float
    below: Mapping[int, float] = field(default_factory=dict)


def cpu_times() -> CpuTimes | None:
    """Read the CPU times of the machine and of this process now; None if the system does not report them."""
    try:
        seconds = psutil.cpu_times()._asdict()
    except OSError:
        return None
    total = sum(value for name, value in seconds.items() if not name.startswith("guest"))  # included in user
    idle = seconds["idle"] + seconds.get("iowait", 0.0)  # waiting for disks
    return CpuTimes(total=total, active=total - idle, own=sum(os.times()[:4]), below=_descendants_seconds())


def _descendants_seconds() -> dict[int, float]:
    """Return the CPU seconds of each living descendant of this process, each without its own children."""
    found = {}
    for each in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            times = each.cpu_times()
            found[each.pid] = times.user + times.system
    return found


def others_cpu_share(before: CpuTimes | None, after: CpuTimes | None = None) -> float | None:
    """Return the fraction of all cores, 0 to 1, that other processes (or stolen time) used since the reading `before`.

    A descendant that has ended since counts as another process, unless this process waited for it."""
    after = after or cpu_times()
    if before is None or after is None or after.total <= before.total:
        return None
    # `own` includes all CPU time of a child that was waited for: subtract the time that `before.below` counted.
    ended = sum(seconds for process, seconds in before.below.items() if process not in after.below)
    below = sum(seconds - before.below.get(process, 0.0) for process, seconds in after.below.items())
    own = max(0.0, after.own - before.own - ended) + below
    others = (after.active - before.active) - own
    return min(1.0, max(0.0, others / (after.total - before.total)))


def is_contended(others: float | None) -> bool:
    """Return whether timings are unreliable because other processes use too much CPU, the fraction `others` of all
    cores. An unknown fraction (None) counts as reliable."""
    return others is not None and others > MAX_CONTENTION


def contention_remark(others: float | None) -> str:
    """Return a warning if other processes make timings unreliable, else an empty text."""
    if not is_contended(others):
        return ""
    return f"other processes took {format_percent(others)} of the processor: do not trust these timings"


def cpu_model() -> str:
    """Return the processor's name, or the best description that the system provides."""
    return _cpuinfo("model name") or _cpuinfo("Processor") or platform.processor() or platform.machine()


def _cpuinfo(key: str) -> str | None:
    try:
        found = re.search(rf"^{key}\s*:(.*)$", Path("/proc/cpuinfo").read_text(), flags=re.MULTILINE)
    except OSError:
        return None
    return found[1].strip() if found else None


def simd_level_of(flags: Iterable[str]) -> str | None:
    """Return the highest of `LEVELS` whose CPU flags, and those of all lower levels, are among `flags`; None if not
    even the lowest has them."""
    mine, found = set(flags), None
    for level, needed in LEVELS.items():
        if not needed <= mine:
            break
        found = level
    return found


def simd_level() -> str | None:
    """Return the SIMD level of this processor, or the lower level set for this process; None below AVX2 and on other
    processors than x86-64."""
    return os.environ.get("WORKBENCH_LEVEL") or simd_level_of((_cpuinfo("flags") or "").split())


def cpu() -> dict:
    flags = set((_cpuinfo("flags") or _cpuinfo("Features") or "").split())
    frequency = None
    with suppress(OSError, NotImplementedError, RuntimeError):  # a virtual machine may not report it
        frequency = psutil.cpu_freq()
    return {
        "model": cpu_model(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "frequency_mhz": frequency.current if frequency else None,
        "flags": [flag for flag in REPORTED_FLAGS if flag in flags],
        "level": simd_level(),
        "last_level_cache_bytes": last_level_cache(),
    }


def last_level_cache(folder: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int | None:
    """Return the size in bytes of the last-level data cache of core 0; None if the system does not report it."""
    best: tuple[int, int] | None = None
    for index in sorted(folder.glob("index*")):
        try:
            level, size = int((index / "level").read_text()), (index / "size").read_text().strip()
            unit = {"K": 2**10, "M": 2**20, "G": 2**30}.get(size[-1:], 1)
            kind = (index / "type").read_text().strip()
            if kind != "Instruction":
                best = max(best or (0, 0), (level, int(size.rstrip("KMG")) * unit))
        except (OSError, ValueError):
            continue
    return best[1] if best else None


def available_bytes(group: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes of memory that a process can still allocate without swapping, within the limit of its control
    group."""
    free = psutil.virtual_memory().available
    with suppress(OSError, ValueError, LookupError):  # no such group, or `max`: no limit
        used = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        free = min(free, int((group / "memory.max").read_text()) - int(used["anon"]))
    return max(0, free)


def allocated_weight_bytes(runner: Runner) -> int:
    """Return the total bytes of the model's parameters and buffers, with shared storage counted once."""
    tensors = [*runner.model.parameters(), *runner.model.buffers()]
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


def resident_bytes() -> int:
    """Return the resident bytes of this process now."""
    return psutil.Process().memory_info().rss


def peak_bytes() -> int | None:
    """Return the peak resident bytes of this process; None if the system does not report them."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024
    except (OSError, StopIteration, ValueError):
        return None
