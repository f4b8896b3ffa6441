"""Roofs of a roofline and points on or below them (Williams, Waterman, Patterson 2009)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

KERNEL_SERIES = 3  # the series of what is no phase: prefill, decode and mixed come before it


@dataclass(frozen=True)
class Roof:
    """A rate that nothing exceeds: bytes a second of one level of memory, or FLOP/s of one precision."""

    name: str
    rate: float
    size: float = 0.0  # of a level: the working set at which it was measured
    note: str = ""
    contended: bool = False  # measured while others used the machine: it may be higher


@dataclass(frozen=True)
class Roofs:
    reads: tuple[Roof, ...] = ()
    gemms: tuple[Roof, ...] = ()

    def read(self, size: float) -> Roof | None:
        """The level whose working set is nearest to `size` bytes, as a ratio."""
        return min(self.reads, key=lambda roof: abs(math.log(max(roof.size, 1) / max(size, 1))), default=None)

    def gemm(self, dtype: str) -> Roof | None:
        """Of this precision; of any where it was not measured."""
        return next((roof for roof in self.gemms if roof.name == dtype), self.gemms[0] if self.gemms else None)

    def relevant_to(self, points: Sequence[RooflinePoint]) -> Roofs:
        """Those that hold for points, and with them all of these, unless every point brought its own."""
        reads, gemms = [p.read for p in points if p.read], [p.gemm for p in points if p.gemm]
        if not points or set(reads) & set(self.reads) or set(gemms) & set(self.gemms):
            reads, gemms = [*self.reads, *reads], [*self.gemms, *gemms]
        return Roofs(_distinct(reads), _distinct(gemms))


def _distinct(roofs: Sequence[Roof]) -> tuple[Roof, ...]:
    return tuple({(roof.name, roof.rate): roof for roof in roofs}.values())


@dataclass(frozen=True)
class RooflinePoint:
    """Work of so many FLOPs and bytes, `seconds` as measured, and the roofs that it cannot pass."""

    name: str
    flops: float
    bytes: float
    seconds: float | None = None
    read: Roof | None = None
    gemm: Roof | None = None
    dtype: str = ""
    series: int = KERNEL_SERIES
    note: str = ""

    @property
    def intensity(self) -> float:
        """FLOPs a byte."""
        return self.flops / self.bytes

    @property
    def rate(self) -> float | None:
        """FLOP/s, as measured."""
        return self.flops / self.seconds if self.seconds else None

    @property
    def bound(self) -> Roof | None:
        """The roof that binds."""
        if self.read is None or self.gemm is None:
            return None
        return self.read if self.bytes / self.read.rate >= self.flops / self.gemm.rate else self.gemm

    @property
    def predicted(self) -> float | None:
        """Seconds that it takes at the least: the slower of computing and moving."""
        if self.read is None or self.gemm is None:
            return None
        return max(self.flops / self.gemm.rate, self.bytes / self.read.rate)

    @property
    def predicted_rate(self) -> float | None:
        return None if not self.predicted else self.flops / self.predicted

    def with_ceilings(self, roofs: Roofs) -> RooflinePoint:
        """With the roofs that hold for it, where it brought none."""
        read, gemm = self.read or roofs.read(self.bytes), self.gemm or roofs.gemm(self.dtype)
        return replace(self, read=read, gemm=gemm)
