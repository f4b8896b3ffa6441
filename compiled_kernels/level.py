"""Define levels of the x86-64 instruction set, for which kernels are compiled and to which a process can be limited.

| level | has | vector registers |
|---|---|---|
| `v3` | AVX2, FMA, F16C | 16 of 256 bits |
| `v4` | AVX-512 F, BW, CD, DQ, VL | 32 of 512 bits |
| `v4+vnni` | and dot products of four bytes | 32 of 512 bits |
| `v4+bf16` | and dot products of pairs of bfloat16, and its rounding | 32 of 512 bits |

v3 and v4 are defined by the x86-64 psABI. Each level includes the previous one, so a machine runs every level up to its
own. `WORKBENCH_LEVEL=v3` limits a whole process to less than its machine supports: this package's kernels, torch,
oneDNN, MKL and Inductor's vectors.

Imports only the standard library, so that limits can be set before torch is loaded.
"""

from __future__ import annotations

import functools
import getpass
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path

LEVEL_VARIABLE = "WORKBENCH_LEVEL"
_V3 = {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "abm"}  # abm: Linux's name for LZCNT
_V4 = {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}


class LevelError(ValueError):
    """Raised if WORKBENCH_LEVEL, or a requested level, cannot be executed here."""


class Level(StrEnum):
    V3 = "v3"
    V4 = "v4"
    V4_VNNI = "v4+vnni"
    V4_BF16 = "v4+bf16"

    @property
    def rank(self) -> int:
        return list(Level).index(self)

    @property
    def cpuinfo_flags(self) -> frozenset[str]:
        """Return the features that /proc/cpuinfo must list if the machine has this level."""
        added = {Level.V3: _V3, Level.V4: _V4, Level.V4_VNNI: {"avx512_vnni"}, Level.V4_BF16: {"avx512_bf16"}}
        return frozenset().union(*(added[each] for each in Level if each.rank <= self.rank))

    @property
    def llvm_cpu(self) -> str:
        """Return LLVM's name of the processor for this level."""
        return "x86-64-v3" if self is Level.V3 else "x86-64-v4"

    @property
    def llvm_features(self) -> tuple[str, ...]:
        """Return LLVM's names of the features that this level has beyond `llvm_cpu`; never empty, since LLVM would then
        use the machine's.
        """
        added = {Level.V3: "+avx2", Level.V4: "+avx512f", Level.V4_VNNI: "+avx512vnni", Level.V4_BF16: "+avx512bf16"}
        return tuple(added[each] for each in Level if each.rank <= self.rank)


def level_of(flags: frozenset[str]) -> Level | None:
    """Return the highest level with all its features in `flags` (names as in /proc/cpuinfo); None if there is none."""
    return max((each for each in Level if each.cpuinfo_flags <= flags), key=lambda each: each.rank, default=None)


@functools.cache
def machine_level() -> Level | None:
    """Return the highest level that this machine executes; None without AVX2 and FMA, or if it is not x86-64."""
    return level_of(frozenset(cpuinfo().get("flags", "").split()))


@functools.cache
def cpuinfo() -> dict[str, str]:
    """Return the fields of /proc/cpuinfo for the first processor; empty if there is no such file."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return {}
    return dict(reversed(re.findall(r"^(\w[\w ]*?)\s*:[ \t]*(.*?)[ \t]*$", text, re.MULTILINE)))


def current_level() -> Level | None:
    """Return the level for which kernels are compiled: the machine's, unless limited (`WORKBENCH_LEVEL`, `limited_to`).

    Raises LevelError if WORKBENCH_LEVEL is not a level, or above the machine's.
    """
    return _held[-1] if _held else _asked()


def available_levels() -> tuple[Level, ...]:
    """Return all levels that can be executed here, lowest first; none above WORKBENCH_LEVEL."""
    highest = _asked()
    return tuple(each for each in Level if highest is not None and each.rank <= highest.rank)


@contextmanager
def limited_to(level: Level) -> Iterator[None]:
    """Compile this package's kernels for `level` within the `with` block, in all threads: for checks of all levels.

    Instructions that the machine lacks are emulated (see mlir/emulate.py)."""
    if not available_levels():
        raise LevelError(f"level {level}: this machine executes none of the levels")
    _held.append(level)
    try:
        yield
    finally:
        _held.pop()


def executed_as(level: Level) -> Level:
    """Return the level of the instructions in the code of kernels for `level`: `level` itself, or the machine's if
    `limited_to` sets a higher one.
    """
    return min(level, available_levels()[-1], key=lambda each: each.rank) if level in _held[-1:] else level


def limit_libraries() -> None:
    """Limit torch, oneDNN, MKL and Inductor to WORKBENCH_LEVEL, if it is set, by environment variables that these
    libraries read at first use; variables that are already set stay unchanged. AMX is above all levels here, so it is
    disabled. Inductor's cache is in a separate folder per level.
    """
    if not os.environ.get(LEVEL_VARIABLE) or (level := _asked()) is None:
        return
    vectors = "avx2" if level is Level.V3 else "avx512"  # also sets Inductor's vector length
    onednn = {Level.V3: "AVX2", Level.V4: "AVX512_CORE", Level.V4_VNNI: "AVX512_CORE_VNNI"}
    os.environ.setdefault("ATEN_CPU_CAPABILITY", vectors)
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", onednn.get(level, "AVX512_CORE_BF16"))
    os.environ.setdefault("MKL_ENABLE_INSTRUCTIONS", "AVX2" if level is Level.V3 else "AVX512")
    # Inductor (torch 2.13) keys cached kernels only by the graph; kernels for longer vectors give wrong results here.
    kept = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or f"{tempfile.gettempdir()}/torchinductor_{getpass.getuser()}"
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = kept if kept.endswith(f"@{level}") else f"{kept}@{level}"


def main() -> None:
    """Print the levels of this machine, for the Makefile."""
    print(*available_levels())


_held: list[Level] = []


@functools.cache
def _asked() -> Level | None:
    text, highest = os.environ.get(LEVEL_VARIABLE, ""), machine_level()
    if not text:
        return highest
    if text not in tuple(Level):
        raise LevelError(f"{LEVEL_VARIABLE}={text!r} is no level; known: {', '.join(Level)}")
    if highest is None or Level(text).rank > highest.rank:
        raise LevelError(f"{LEVEL_VARIABLE}={text}: this machine executes {highest or 'none of the levels'} at most")
    return Level(text)
