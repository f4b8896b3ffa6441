"""Register an operator's opaque forms with torch: operations with a schema and a fake implementation, which graphs
contain but do not trace.

The backends `eager` and `inductor` run plain torch code, which torch.compile can trace and fuse if a graph can express
it (it cannot express attention over spans, which is therefore opaque on these backends too). Opaque operations are
registered here as `compiled_kernels::<operator>_<backend>` when the package is imported, so that graphs can contain
them from the first call on; a kernel's own module is imported when the kernel first runs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from compiled_kernels.backends import Backend, BackendError

LIBRARY = torch.library.Library("compiled_kernels", "DEF")


@dataclass(frozen=True)
class Lowered:
    """A kernel that torch-mlir generates from the specification `function(*tensors, *constants)` for one shape at a
    time; `lanes` as in `mlir.lower`."""

    function: Callable[..., Any]
    lanes: int = 0


LOWERED: dict[str, Lowered] = {}  # by operator


@dataclass(frozen=True)
class Operator:
    """An operator: `implementations` has an opaque operation for each backend that needs one. Any other backend runs
    plain torch code, or does not support the operator."""

    name: str
    implementations: Mapping[Backend, Callable[..., Any]]

    def implementation(self, backend: Backend) -> Callable[..., Any]:
        """Return the opaque operation of a backend. Raises BackendError if there is none."""
        if backend not in self.implementations:
            known = [each for each in Backend if each in (Backend.EAGER, Backend.INDUCTOR, *self.implementations)]
            raise BackendError(f"{self.name} has no backend {backend}; it has {', '.join(known)}")
        return self.implementations[backend]


def define_operator(
    name: str,
    schema: str,
    fake: Callable[..., Any],
    kernels: Mapping[Backend, str | Lowered],
    unpack: Callable[..., tuple] | None = None,
) -> Operator:
    """Register an operator's opaque forms with torch, and return the operator.

    `schema` is a torch.library schema without a name; `fake` returns outputs of the right shapes without computing.
    `kernels` gives the implementation of each backend: "module:function", which takes the schema's arguments or the
    result of `unpack`, or a kernel that torch-mlir generates.
    """
    forms = {}
    for backend, place in kernels.items():
        full = f"{name}_{backend}"
        if isinstance(place, Lowered):
            LOWERED[name] = place
            run = _imported_when_used("compiled_kernels.mlir.leaf:run", lambda *given: (name, *given))
        else:
            run = _imported_when_used(place, unpack)
        LIBRARY.define(f"{full}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
        LIBRARY.impl(full, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"compiled_kernels::{full}", fake, lib=LIBRARY)
        forms[backend] = getattr(torch.ops.compiled_kernels, full).default
    return Operator(name, forms)


def _imported_when_used(place: str, unpack: Callable[..., tuple] | None) -> Callable[..., Any]:
    module, _, function = place.partition(":")

    def run(*arguments: Any) -> Any:
        return getattr(importlib.import_module(module), function)(*(unpack(*arguments) if unpack else arguments))

    return run
