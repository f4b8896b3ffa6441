"""Resolve a backend's name for this machine: for decode steps, for all other steps, and for their attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from compiled_kernels import Lane, lane_problems
from compiled_kernels.lanes import AUTO
from workbench.errors import WorkbenchError, nearest

_OFF_CPU = ", ".join((Lane.TRITON, Lane.INDUCTOR, Lane.EAGER))


@dataclass(frozen=True)
class Lanes:
    """The backends of a model: `decode` for steps of one token per sequence, `blocks` for other steps, and their
    attention.

    What is not `checked` has compiled nothing here yet: under `auto` the first long prefill then finds out whether
    `blocks` fails here (see `FallbackExecutor`).
    """

    decode: Lane
    blocks: Lane
    reads: Lane
    reason: str
    vetted: bool = True

    @classmethod
    def one(cls, lane: Lane, reason: str) -> Lanes:
        return cls(lane, lane, lane, reason)

    def on_eager(self, why: str) -> Lanes:
        """Return the same with eager blocks and attention, after blocks failed."""
        return replace(self, blocks=Lane.EAGER, reads=Lane.EAGER, reason=f"{self.reason}; {why}", vetted=True)

    def __str__(self) -> str:
        if self.decode is self.blocks is self.reads:
            return str(self.decode)
        attention = "" if self.reads is self.blocks else f", its attention: {self.reads}"
        return f"{self.decode} (prefill: {self.blocks}{attention})"


def resolve_lanes(name: str, device: str = "cpu") -> Lanes:
    """Resolve `name` (`auto` or a backend) on this machine for a model on `device` (cpu, cuda).

    Where several backends could decode, `auto` names the one that as a rule is fastest; autotuning compares them for
    one model.

    Raises:
        WorkbenchError: for a backend that is unknown or does not work here.
    """
    problems = dict(lane_problems())
    if device != "cpu":
        problems[Lane.MLIR] = f"it runs on the CPU, and device is {device!r}; there {_OFF_CPU} work"
    if name == AUTO:
        return _auto(problems, device)
    if name not in tuple(Lane):
        known = (AUTO, *Lane)
        raise WorkbenchError(f"unknown lane {name!r}{nearest(name, known)}; known here: {', '.join(known)}")
    if problem := problems[Lane(name)]:
        raise WorkbenchError(f"lane {name!r} does not work here: {problem}")
    return Lanes.one(Lane(name), "asked for")


def _auto(problems: Mapping[Lane, str | None], device: str) -> Lanes:
    if device == "cuda" and not problems[Lane.TRITON]:
        return Lanes.one(Lane.TRITON, AUTO)
    blocks = Lane.EAGER if problems[Lane.INDUCTOR] else Lane.INDUCTOR
    reason = f"auto: inductor does not work here: {problems[Lane.INDUCTOR]}" if problems[Lane.INDUCTOR] else AUTO
    quick = blocks if problems[Lane.MLIR] else Lane.MLIR
    return Lanes(quick, blocks, quick, reason)
