"""Resolve a backend's name for this machine: for decode steps, for all other steps, and for their attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from compiled_kernels import Backend, backend_problems
from compiled_kernels.backends import AUTO_BACKEND
from workbench.errors import WorkbenchError, nearest

_OFF_CPU = ", ".join((Backend.TRITON, Backend.INDUCTOR, Backend.EAGER))


@dataclass(frozen=True)
class Backends:
    """The backends of a model: `decode` for steps of one token per sequence, `blocks` for other steps, and their
    attention.

    What is not `checked` has compiled nothing here yet: under `auto` the first long prefill then finds out whether
    `blocks` fails here (see `FallbackExecutor`).
    """

    decode: Backend
    blocks: Backend
    attention: Backend
    reason: str
    checked: bool = True

    @classmethod
    def uniform(cls, backend: Backend, reason: str) -> Backends:
        return cls(backend, backend, backend, reason)

    def fall_back_to_eager(self, why: str) -> Backends:
        """Return the same with eager blocks and attention, after blocks failed."""
        return replace(self, blocks=Backend.EAGER, attention=Backend.EAGER, reason=f"{self.reason}; {why}", checked=True)

    def __str__(self) -> str:
        if self.decode is self.blocks is self.attention:
            return str(self.decode)
        attention = "" if self.attention is self.blocks else f", its attention: {self.attention}"
        return f"{self.decode} (prefill: {self.blocks}{attention})"


def resolve_backends(name: str, device: str = "cpu") -> Backends:
    """Resolve `name` (`auto` or a backend) on this machine for a model on `device` (cpu, cuda).

    Where several backends could decode, `auto` names the one that as a rule is fastest; autotuning compares them for
    one model.

    Raises:
        WorkbenchError: for a backend that is unknown or does not work here.
    """
    problems = dict(backend_problems())
    if device != "cpu":
        problems[Backend.MLIR] = f"it runs on the CPU, and device is {device!r}; there {_OFF_CPU} work"
    if name == AUTO_BACKEND:
        return _auto(problems, device)
    if name not in tuple(Backend):
        known = (AUTO_BACKEND, *Backend)
        raise WorkbenchError(f"unknown backend {name!r}{nearest(name, known)}; known here: {', '.join(known)}")
    if problem := problems[Backend(name)]:
        raise WorkbenchError(f"backend {name!r} does not work here: {problem}")
    return Backends.uniform(Backend(name), "asked for")


def _auto(problems: Mapping[Backend, str | None], device: str) -> Backends:
    if device == "cuda" and not problems[Backend.TRITON]:
        return Backends.uniform(Backend.TRITON, AUTO_BACKEND)
    blocks = Backend.EAGER if problems[Backend.INDUCTOR] else Backend.INDUCTOR
    reason = f"auto: inductor does not work here: {problems[Backend.INDUCTOR]}" if problems[Backend.INDUCTOR] else AUTO_BACKEND
    quick = blocks if problems[Backend.MLIR] else Backend.MLIR
    return Backends(quick, blocks, quick, reason)
