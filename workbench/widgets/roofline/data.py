"""Roofs of a roofline and points on or below them (Williams, Waterman, Patterson 2009), read from steps, benchmark
records and run folders."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from workbench.errors import WorkbenchError
from workbench.files import UnreadableText, read_bytes, read_json_object

KERNEL_SERIES = 3  # the series of what is no phase: prefill, decode and mixed come before it
PHASES = ("prefill", "decode", "mixed")
STEP_FIELDS = (
    "phase",
    "requests",
    "prefill_tokens",
    "predicted_flops",
    "predicted_bytes",
    "forward_seconds",
    "compiles",
)
ACCEPTED_SOURCES = "a run folder, a record of `workbench bench` or `workbench kernels bench` (dict or .json), or Points"


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


def points_of_steps(steps: Iterable[Mapping[str, Any]], dtype: str, name: str = "") -> list[RooflinePoint]:
    """Of steps with `STEP_FIELDS`, one point for all of a phase that have about as many rows: mean FLOPs and bytes,
    median seconds of the forward pass. Steps that compiled a graph count only where there are no others."""
    kinds: dict[tuple[int, int], list[tuple[bool, Mapping[str, Any]]]] = {}
    compiles = 0
    for step in steps:
        quiet, compiles = step["compiles"] == compiles, step["compiles"]
        if step["forward_seconds"] > 0 and step["predicted_bytes"] > 0:
            kinds.setdefault((PHASES.index(step["phase"]), _size(step)), []).append((quiet, step))
    points = []
    for (series, _), found in sorted(kinds.items()):
        mine = [step for quiet, step in found if quiet] or [step for _, step in found]
        points.append(_point_of_steps(series, mine, dtype, name))
    return points


def points_of_record(record: Mapping[str, Any]) -> list[RooflinePoint]:
    """Of a bench, with the ceilings that were measured for each row then. Raises WorkbenchError for other records."""
    rows = record.get("rows")
    if not isinstance(rows, list) or not all(isinstance(row, dict) and "status" in row for row in rows):
        raise WorkbenchError(f"a roofline of a record without rows of work: give {ACCEPTED_SOURCES}")
    timed = [row for row in rows if row["status"] == "ok"]
    return [_point_of_kernel(row) if "operator" in row else _point_of_workload(row) for row in timed]


def points_of(source: Any) -> list[RooflinePoint]:
    """Points of anything but a runner. Raises WorkbenchError for what is none of these things."""
    if isinstance(source, RooflinePoint):
        return [source]
    if isinstance(source, Mapping):
        return points_of_record(source)
    if isinstance(source, str | Path):
        return _points_of_path(Path(source))
    if hasattr(source, "steps") and hasattr(source, "environment"):
        return _points_of_run(source)
    if isinstance(source, Sequence) and all(isinstance(each, RooflinePoint) for each in source):
        return list(source)
    raise WorkbenchError(f"a roofline of {type(source).__name__}: give a runner, {ACCEPTED_SOURCES}")


def _points_of_path(path: Path) -> list[RooflinePoint]:
    if path.suffix == ".json":
        try:
            return points_of_record(read_json_object(read_bytes(path)))
        except UnreadableText as error:
            raise WorkbenchError(f"{path}: no record can be read there ({error})") from None
    from workbench.runs.record import Record

    return _points_of_run(Record.open(path))


def _points_of_run(record: Any) -> list[RooflinePoint]:
    from workbench.experiment.experiment import Experiment
    from workbench.memory.capacity import spec_and_dtype

    dtype = spec_and_dtype(Experiment.from_yaml(record.experiment_text))[1]
    return points_of_steps(record.steps.to_pylist(), dtype, record.name)


def _size(step: Mapping[str, Any]) -> int:
    """Steps of one size are alike: decodes of as many requests, prefills between two powers of two."""
    return step["requests"] if step["phase"] == "decode" else (step["prefill_tokens"] - 1).bit_length()


def _point_of_steps(series: int, steps: Sequence[Mapping[str, Any]], dtype: str, name: str) -> RooflinePoint:
    tokens = sorted({step["prefill_tokens"] for step in steps})
    label = f"{tokens[0]}" if len(tokens) == 1 else f"{tokens[0]}–{tokens[-1]}"
    label = f"decode × {steps[0]['requests']}" if PHASES[series] == "decode" else f"{PHASES[series]} {label}"
    return RooflinePoint(
        f"{name} {label}".strip(),
        fmean(step["predicted_flops"] for step in steps),
        fmean(step["predicted_bytes"] for step in steps),
        median(step["forward_seconds"] for step in steps),
        dtype=dtype,
        series=series,
        note=f"{len(steps)} steps, median of the forward pass",
    )


def _point_of_kernel(row: Mapping[str, Any]) -> RooflinePoint:
    read = row.get("ceiling_bytes_per_s")
    dtype = next((each for each in ("float32", "bfloat16") if each in row["case"]), "")
    return RooflinePoint(
        f"{row['operator']} {row['case']}, {row['backend']}", row["flops"], row["bytes"], row["seconds"],
        read and Roof(_level(row.get("data")), read, row["working_set_bytes"] * row["copies"]),
        read and Roof(dtype, row["ceiling_flops_per_s"]), dtype, KERNEL_SERIES, row["reason"],
    )  # fmt: skip


def _point_of_workload(row: Mapping[str, Any]) -> RooflinePoint:
    """Its record has rates only: the work of one second."""
    series = next((place for place, phase in enumerate(PHASES) if row["work"].startswith(phase)), KERNEL_SERIES)
    depth = f" at {row['depth']:,}" if row["depth"] else ""
    return RooflinePoint(
        f"a second of {row['work']} × {row['batch']}{depth}", row["flops_per_s"], row["bytes_per_s"], 1.0,
        Roof(row["read_level"], row["read_ceiling_bytes_per_s"], row["weight_bytes"] + row["cache_bytes"]),
        Roof(row["gemm_dtype"], row["gemm_ceiling_flops_per_s"]), row["gemm_dtype"], series,
        "its record tells rates: what was computed and moved in a second of forward passes",
    )  # fmt: skip


def _level(data: str | None) -> str:
    return {"memory": "DRAM", "cache": "cache"}.get(data or "", "memory")
