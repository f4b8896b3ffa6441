"""Find, without timing, the first backend that computes an operator correctly on this machine; results are cached."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch

from compiled_kernels.agreement import disagreement
from compiled_kernels.backends import Backend, BackendError, backend_problems
from compiled_kernels.cases import Case, CaseCost, suite_of
from compiled_kernels.check import device_of, to_device
from compiled_kernels.result_cache import ResultCache, cpu_model, machine_key, user_cache_directory

FILE = "correct_backends.json"
TRANSIENT_ERRORS = (MemoryError, OSError, ImportError)  # missing memory, disk space or module: never cached
# Raised by compilers, or if their libraries cannot be loaded; other errors, such as TypeError, are our own bugs.
COMPILER_ERRORS = (RuntimeError, *TRANSIENT_ERRORS)


class CorrectBackend(NamedTuple):
    """A backend that is correct, and the `reason` for choosing it: when it was checked, and why preferred backends were
    not chosen.
    """

    backend: Backend
    reason: str


def first_correct_backend(
    operator: str, arguments: Mapping[str, Any], backends: Iterable[Backend], folder: Path | None = None
) -> CorrectBackend:
    """Return the first of several backends, in order of preference, that agrees with the specification in float64.

    Each backend runs once, as a handwritten kernel, not in a compiled graph: this takes a fraction of a second, while
        timing takes seconds to a minute.

    Args:
        operator: the operator's name.
        arguments: arguments of a case of the operator (`Case.arguments`).
        backends: the backends in order of preference.
        folder: folder of cached results, by default `$WORKBENCH_CACHE_DIR` or the user's cache. A result after a
            transient error (`TRANSIENT_ERRORS`) is not cached.

    Raises:
        BackendError: for an unknown operator, and if no backend is correct.
    """
    backends, kept = tuple(backends), ResultCache((folder or user_cache_directory()) / FILE)
    key = _key(operator, arguments, backends)
    if (known := _sound(kept.load().get(key), backends)) is not None:
        return known
    suite, case, refused, passing = suite_of(operator), Case("chosen", arguments, CaseCost(0, 0)), {}, False
    for backend in backends:
        try:
            problem = backend_problems()[backend] or disagreement(
                suite, case, to_device(suite.make_inputs(case), device_of(backend)), backend
            )
        except COMPILER_ERRORS as error:  # a BackendError too
            problem = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            passing = passing or isinstance(error, TRANSIENT_ERRORS)
        if problem:
            refused[str(backend)] = problem
            continue
        checked = f"on {cpu_model()}, {datetime.now(UTC):%Y-%m-%d}"
        entry = {"operator": operator, "arguments": _plain(arguments), "backend": str(backend), "refused": refused}
        entry |= {"checked": checked}
        if not passing:
            kept.add(key, entry)
        return CorrectBackend(backend, _reason(backend, checked, refused))
    reasons = "; ".join(f"{backend}: {reason}" for backend, reason in refused.items()) or "no backend was given"
    raise BackendError(f"{operator}: no backend works for {_plain(arguments)}: {reasons}")


def _reason(backend: Backend, checked: str, refused: Mapping[str, str]) -> str:
    return "; ".join((f"on {backend}, checked {checked}", *(f"{other}: {why}" for other, why in refused.items())))


def _sound(entry: Any, backends: tuple[Backend, ...]) -> CorrectBackend | None:
    """Read a cached entry; None if it is invalid."""
    try:
        backend = Backend(entry["backend"])
        reason = _reason(backend, entry["checked"], dict(entry["refused"]))
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
    return CorrectBackend(backend, reason) if backend in backends else None


def _key(operator: str, arguments: Mapping[str, Any], backends: tuple[Backend, ...]) -> str:
    parts = [machine_key(), torch.get_num_threads(), operator, _plain(arguments), backends]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _plain(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Convert arguments to JSON values: masks and types by their printed form."""
    return {
        name: value if isinstance(value, (int, float, str, bool, type(None))) else repr(value)
        for name, value in arguments.items()
    }
