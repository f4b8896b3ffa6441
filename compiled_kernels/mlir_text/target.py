"""What kernels are written for: a processor's vectors, and how MLIR spells types and numbers."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

TYPES = {
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.int8: "i8",
    torch.uint8: "i8",
    torch.int32: "i32",
    torch.int64: "i64",
}
PAGES = 1 << 24  # a bound for types only: no kernel depends on the size of the pool of pages
SUMS = 16  # vectors of sums kept in registers, of the 32 there are


@dataclass(frozen=True)
class Target:
    """What kernels may count on: lanes of float32 a vector, dot products of bfloat16 pairs, and of four bytes."""

    lanes: int = 8
    bf16_dots: bool = False
    byte_dots: bool = False

    @classmethod
    @functools.cache
    def here(cls) -> Target:
        """This machine, by /proc/cpuinfo; plain vectors of 8 where there is none."""
        try:
            flags = set(re.findall(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)[0].split())
        except (OSError, IndexError):
            return cls()
        wide = "avx512f" in flags
        return cls(16 if wide else 8, wide and "avx512_bf16" in flags, wide and "avx512_vnni" in flags)


def divisor(count: int, most: int) -> int:
    """The largest power of two up to `most` that divides `count`."""
    return next(size for size in (64, 32, 16, 8, 4, 2, 1) if size <= most and count % size == 0)


def memref(shape: Iterable[int], kind: str) -> str:
    return f"memref<{'x'.join(map(str, shape))}x{kind}>"


def vector(lanes: int, kind: str = "f32") -> str:
    return f"vector<{lanes}x{kind}>"


def number(value: float) -> str:
    """A float32 constant as MLIR reads it: always with a point."""
    return f"{value:.9e}"
