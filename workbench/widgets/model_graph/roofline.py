"""Read the roofs and points of a roofline (Williams, Waterman, Patterson 2009) from steps, benchmark records and run
folders."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from workbench.errors import WorkbenchError
from workbench.files import UnreadableText, read_bytes, read_json_object

if TYPE_CHECKING:
    from workbench.machine.ceilings import Ceiling, MachineCeilings

KERNEL_SERIES = 3  # series of kernels and other work outside the phases, after prefill, decode and mixed
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
    """An upper bound of a rate: the bytes per second of one memory level, or the FLOP/s of one precision."""

    name: str
    rate: float
    size: float = 0.0  # bytes of the working set at which a memory level was measured
    note: str = ""
    contended: bool = False  # measured while other processes used the machine: the true rate may be higher


@dataclass(frozen=True)
class Roofs:
    reads: tuple[Roof, ...] = ()
    gemms: tuple[Roof, ...] = ()

    def read(self, size: float) -> Roof | None:
        """Return the roof of the memory level whose working set is nearest to `size` bytes by ratio; None if there is
        none."""
        return min(self.reads, key=lambda roof: abs(math.log(max(roof.size, 1) / max(size, 1))), default=None)

    def gemm(self, dtype: str) -> Roof | None:
        """Return the roof of this precision, or of another one if this one was not measured; None if there is none."""
        return next((roof for roof in self.gemms if roof.name == dtype), self.gemms[0] if self.gemms else None)

    def relevant_to(self, points: Sequence[RooflinePoint]) -> Roofs:
        """Return the roofs that `points` bring along, and all of these roofs too unless every point brings its own."""
        reads, gemms = [p.read for p in points if p.read], [p.gemm for p in points if p.gemm]
        if not points or set(reads) & set(self.reads) or set(gemms) & set(self.gemms):
            reads, gemms = [*self.reads, *reads], [*self.gemms, *gemms]
        return Roofs(_distinct(reads), _distinct(gemms))


def _distinct(roofs: Sequence[Roof]) -> tuple[Roof, ...]:
    return tuple({(roof.name, roof.rate): roof for roof in roofs}.values())


@dataclass(frozen=True)
class RooflinePoint:
    """One piece of work in FLOPs and bytes, with its measured `seconds` and the roofs that bound its rate."""

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
        """Return the arithmetic intensity in FLOPs per byte."""
        return self.flops / self.bytes

    @property
    def rate(self) -> float | None:
        """Return the measured FLOP/s."""
        return self.flops / self.seconds if self.seconds else None

    @property
    def bound(self) -> Roof | None:
        """Return the roof that limits the work, or None if a roof is unknown."""
        if self.read is None or self.gemm is None:
            return None
        return self.read if self.bytes / self.read.rate >= self.flops / self.gemm.rate else self.gemm

    @property
    def predicted(self) -> float | None:
        """Return a lower bound in seconds: max(compute time, memory time)."""
        if self.read is None or self.gemm is None:
            return None
        return max(self.flops / self.gemm.rate, self.bytes / self.read.rate)

    @property
    def predicted_rate(self) -> float | None:
        return None if not self.predicted else self.flops / self.predicted

    def with_ceilings(self, roofs: Roofs) -> RooflinePoint:
        """Return the point with its own roofs, or else the matching ones of `roofs`."""
        read, gemm = self.read or roofs.read(self.bytes), self.gemm or roofs.gemm(self.dtype)
        return replace(self, read=read, gemm=gemm)


def points_of_steps(steps: Iterable[Mapping[str, Any]], dtype: str, name: str = "") -> list[RooflinePoint]:
    """Return one point for each phase and size of steps with `STEP_FIELDS`: mean FLOPs and bytes, and median seconds of
    the forward pass. Steps that compiled a graph are left out unless a group has no other steps."""
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
    """Return the points of a benchmark record with the ceilings stored in its rows.

    Raises:
        WorkbenchError: the record has no rows of work.
    """
    rows = record.get("rows")
    if not isinstance(rows, list) or not all(isinstance(row, dict) and "status" in row for row in rows):
        raise WorkbenchError(f"a roofline of a record without rows of work: give {ACCEPTED_SOURCES}")
    timed = [row for row in rows if row["status"] == "ok"]
    return [_point_of_kernel(row) if "operator" in row else _point_of_workload(row) for row in timed]


def points_of(source: Any) -> list[RooflinePoint]:
    """Return the points of any source except a runner. Raises WorkbenchError for an unknown source."""
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

    dtype = spec_and_dtype(Experiment.from_record(record.experiment_text))[1]
    return points_of_steps(record.steps.to_pylist(), dtype, record.name)


def _size(step: Mapping[str, Any]) -> int:
    """Return the size class of a step: the number of requests of a decode, else the bit length of prefill tokens."""
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
    """Return the work of one second, because the record has rates only."""
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


def roofs_of(ceilings: MachineCeilings | Roofs | str) -> Roofs:
    """Return the roofs of measured ceilings or of a machine's data sheet. Raises WorkbenchError for unknown names."""
    if isinstance(ceilings, Roofs):
        return ceilings
    if isinstance(ceilings, str):
        from workbench.simulate.roofline import named_hardware

        sheet = named_hardware(ceilings)
        note = f"from the {sheet.source}"
        read = Roof(f"{sheet.name} memory", sheet.bandwidth, sheet.memory, note)
        return Roofs((read,), (Roof("bfloat16", sheet.flops, 0, note),))
    return Roofs(
        *(
            tuple(_roof(each) for each in dict.fromkeys(kind))
            for kind in (ceilings.read_ceilings, ceilings.gemm_ceilings)
        )
    )


def _roof(ceiling: Ceiling) -> Roof:
    from workbench.machine.processor import is_contended
    from workbench.units import format_bytes, format_percent

    size, others = ceiling.working_set_bytes, ceiling.others_cpu_share
    name = f"{ceiling.level} ({format_bytes(size)})" if ceiling.kind == "read" else ceiling.dtype
    busy = "" if others is None else f", others took {format_percent(others)} of the processor"
    note = f"Median of {ceiling.repeats} by {ceiling.method}, {ceiling.threads} threads{busy}"
    return Roof(name, ceiling.value, size, note, is_contended(others))
