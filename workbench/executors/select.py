"""Select the backends for a model, cache and settings on this machine before loading or compiling, or refuse with a
reason (see capabilities.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from compiled_kernels import Backend, backend_problems
from compiled_kernels.backends import AUTO_BACKEND
from workbench.errors import WorkbenchError, nearest
from workbench.executors.capabilities import Role, unsupported
from workbench.executors.requirements import Requirements
from workbench.kv_cache.store import KVStore
from workbench.model.transformer import Transformer


@dataclass(frozen=True)
class Backends:
    """The backends selected for a model: `decode` for steps of one token per sequence, `blocks` for other steps, and
    `attention` for the attention of these other steps.

    If not `checked`, no code has been compiled here yet; under `auto` the first long prefill then shows whether
    `blocks` fails on this machine (see `StepRunner`).
    """

    decode: Backend
    blocks: Backend
    attention: Backend
    reason: str
    checked: bool = True
    decodes_by_blocks: bool = False  # the reason if `decode` is mlir without a whole step for this model or cache

    @classmethod
    def uniform(cls, backend: Backend, reason: str, requirements: Requirements = Requirements()) -> Backends:  # noqa: B008 (frozen)
        """Return `backend` in all roles; its operators must support the requirements."""
        no_step = unsupported(backend, requirements, "step") if backend is Backend.MLIR else None
        reason += f"; it decodes by its blocks: {no_step.reason}" if no_step else ""
        return cls(backend, backend, backend, reason, decodes_by_blocks=no_step is not None)

    @classmethod
    def own(cls, model: Transformer, store: KVStore) -> Backends:
        """Return the model's own backend in all roles."""
        return cls.uniform(model.backend, "the model's", Requirements.from_model(model, store))

    @property
    def has_step(self) -> bool:
        """Return whether `decode` computes a step as rows of compiled functions."""
        return self.decode is Backend.MLIR and not self.decodes_by_blocks

    def fall_back_to_eager(self, why: str) -> Backends:
        """Return a copy with eager blocks and attention, after a failure of `blocks`."""
        return replace(
            self, blocks=Backend.EAGER, attention=Backend.EAGER, reason=f"{self.reason}; {why}", checked=True
        )

    def __str__(self) -> str:
        if self.decode is self.blocks is self.attention:
            return str(self.decode)
        attention = "" if self.attention is self.blocks else f", its attention: {self.attention}"
        return f"{self.decode} (prefill: {self.blocks}{attention})"


def select_backends(name: str, requirements: Requirements) -> Backends:
    """Select the backends for `name` (`auto` or a backend) and the requirements on this machine.

    If several backends can decode, `auto` picks the one that is usually the fastest; autotuning compares them for one
    model.

    Raises:
        WorkbenchError: for a backend that is unknown, does not work here or does not support the requirements.
    """
    if name != AUTO_BACKEND and name not in tuple(Backend):
        known = (AUTO_BACKEND, *Backend)
        raise WorkbenchError(f"unknown backend {name!r}{nearest(name, known)}; known here: {', '.join(known)}")
    if requirements.batch_invariant:
        backend = Backend.MLIR if name == AUTO_BACKEND else Backend(name)
        if problem := _problem(backend, requirements, "step"):
            others = "" if backend is Backend.MLIR else "; backend 'mlir' keeps it"
            raise WorkbenchError(f"batch_invariant: backend {str(backend)!r} {problem}{others}")
        why = "of all backends this one keeps it" if name == AUTO_BACKEND else "asked for"
        return Backends(backend, backend, backend, f"batch_invariant: {why}")
    if name == AUTO_BACKEND:
        return _select_auto(requirements)
    if problem := _problem(Backend(name), requirements, "blocks"):
        raise WorkbenchError(f"backend {name!r} {problem}")
    return Backends.uniform(Backend(name), "asked for", requirements)


def _select_auto(requirements: Requirements) -> Backends:
    """Select for each role the first backend, in order of preference, that works here and supports the requirements."""
    refused: dict[Backend, str] = {}

    def first(role: Role, *candidates: Backend) -> Backend:
        for backend in candidates:
            if (problem := _problem(backend, requirements, role)) is None:
                return backend
            refused.setdefault(backend, problem)
        return Backend.EAGER

    quickest = [Backend.TRITON] if requirements.device == "cuda" else []
    if requirements.ranks == 1:
        quickest.append(Backend.INDUCTOR)
    elif requirements.device == "cpu":  # Inductor compiles on each rank, so it is only used if requested by name
        quickest.append(Backend.MLIR)
    blocks = first("blocks", *quickest)
    quick = (Backend.MLIR, blocks) if requirements.device == "cpu" else (blocks,)
    attention, decode = first("attention", *quick), first("step", *quick)
    reason = "; ".join(f"{backend} {problem}" for backend, problem in refused.items())
    return Backends(decode, blocks, attention, f"auto: {reason}" if reason else "auto")


def _problem(backend: Backend, requirements: Requirements, role: Role) -> str | None:
    """Return why `backend` does not work on this machine, or does not support the requirements in this role."""
    if problem := backend_problems()[backend]:
        return f"does not work here: {problem}"
    refusal = unsupported(backend, requirements, role)
    return refusal and str(refusal)


def why_no_early_layers(backends: Backends, batch_invariant: bool, ranks: int) -> str | None:
    """Return the reason why filters cannot use the logits of early layers here; None if they can. Steps with early
    layers run block by block, which `batch_invariant` does not allow.
    """
    role: Role = "step" if batch_invariant else "blocks"
    refusal = unsupported(backends.blocks, Requirements(early_layers=True, ranks=ranks), role)
    setting = "batch_invariant: " if batch_invariant else ""
    return refusal and f"{setting}backend {str(backends.blocks)!r} {refusal}"
