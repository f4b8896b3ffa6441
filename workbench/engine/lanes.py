"""From a lane's name to what carries out a model here: for decode steps, for all others, and for their attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from compiled_kernels import Lane, lane_problems
from compiled_kernels.lanes import AUTO
from workbench.errors import WorkbenchError, nearest

_OFF_CPU = ", ".join((Lane.TRITON, Lane.INDUCTOR, Lane.EAGER))


@dataclass(frozen=True)
class Lanes:
    """`decode` carries out steps in which every sequence computes one token, `blocks` all other steps, but for their
    attention, which is `reads`. What is not `vetted` has compiled nothing here yet: under `auto` it is then the first
    long prefill that finds out whether `blocks` fails here; its numbers are not checked (see vetting.py)."""

    decode: Lane
    blocks: Lane
    reads: Lane
    reason: str
    vetted: bool = True

    @classmethod
    def one(cls, lane: Lane, reason: str) -> Lanes:
        return cls(lane, lane, lane, reason)

    def on_eager(self, why: str) -> Lanes:
        """The same where blocks turned out to fail: the modules as written run them and their attention."""
        return replace(self, blocks=Lane.EAGER, reads=Lane.EAGER, reason=f"{self.reason}; {why}", vetted=True)

    def __str__(self) -> str:
        if self.decode is self.blocks is self.reads:
            return str(self.decode)
        attention = "" if self.reads is self.blocks else f", its attention: {self.reads}"
        return f"{self.decode} (prefill: {self.blocks}{attention})"


def resolve_lanes(name: str, device: str = "cpu") -> Lanes:
    """What `name` means on this machine for a model on `device` (cpu, cuda), and why: `auto`, or a lane, which is
    taken at its word.

    Where several lanes could decode, `auto` names the one that as a rule is fastest; trial.py compares them for
    one model. Raises WorkbenchError for a lane that is unknown or does not work here.
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
