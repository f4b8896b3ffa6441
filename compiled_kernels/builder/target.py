"""The processor that kernels are built for: its vector registers, and the MLIR spelling of types and arguments."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from compiled_kernels.backends import UNSUPPORTED_CPU, BackendError
from compiled_kernels.level import Level, current_level

MLIR_TYPES = {
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.int8: "i8",
    torch.uint8: "i8",
    torch.float8_e4m3fn: "i8",
    torch.int32: "i32",
    torch.int64: "i64",
}
SIZE_BOUND = 1 << 24  # a size for types only: no kernel depends on the size of a page pool


@dataclass(frozen=True)
class Target:
    """The features of an instruction set level that kernels may use: length and number of vector registers."""

    level: Level

    @classmethod
    def current(cls) -> Target:
        """Return the target of this process. Raises BackendError if the machine supports no level."""
        level = current_level()
        if level is None:
            raise BackendError(f"backend mlir: {UNSUPPORTED_CPU}")
        return _TARGETS[level]

    @property
    def lanes(self) -> int:
        """Return the number of float32 numbers in a vector."""
        return 8 if self.level is Level.V3 else 16

    @property
    def registers(self) -> int:
        """Return the number of vector registers."""
        return 16 if self.level is Level.V3 else 32

    @property
    def accumulators(self) -> int:
        """Return the number of vectors of sums that a kernel keeps in registers: half of all registers."""
        return self.registers // 2

    @property
    def has_bf16_dot(self) -> bool:
        """Return whether the processor has dot products of bfloat16 pairs."""
        return self.level is Level.V4_BF16

    @property
    def has_int8_dot(self) -> bool:
        """Return whether the processor has dot products of four bytes."""
        return self.level in (Level.V4_VNNI, Level.V4_BF16)


_TARGETS = {level: Target(level) for level in Level}


def largest_divisor(count: int, most: int) -> int:
    """Return the largest power of two up to `most` that divides `count`."""
    return next(size for size in (64, 32, 16, 8, 4, 2, 1) if size <= most and count % size == 0)


def memref(shape: Iterable[int], kind: str) -> str:
    return f"memref<{'x'.join(map(str, shape))}x{kind}>"


class Named(NamedTuple):
    """A name of a value with its MLIR type."""

    name: str
    type: str


def indices(*names: str) -> list[Named]:
    """Return arguments of type index, one for each name."""
    return [Named(name, "index") for name in names]
