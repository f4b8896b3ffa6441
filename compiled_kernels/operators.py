"""An operator's opaque forms as torch knows them: operations with a schema and a fake.

The backends `eager` and `inductor` run plain torch code, which torch.compile can see through and fuse, wherever a graph
can hold it (attention over spans it cannot: that is opaque on these backends too). Opaque operations are registered
here as `compiled_kernels::<operator>_<backend>` when the package is imported, so that a graph can hold them from the
first call on; a kernel's own module is imported when the kernel first runs.
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
    """A kernel that torch-mlir makes of the specification `function(*tensors, *constants)` for one shape at a time;
    `lanes` as in `mlir.lower`."""

    function: Callable[..., Any]
    lanes: int = 0


LOWERED: dict[str, Lowered] = {}  # by operator


@dataclass(frozen=True)
class Operator:
    """An operator: `implementations` are its opaque operations by backend; a backend without one runs plain torch
    code, or does not have this operator."""

    name: str
    implementations: Mapping[Backend, Callable[..., Any]]

    def implementation(self, backend: Backend) -> Callable[..., Any]:
        """Return the opaque operation of a backend. Raises BackendError where there is none."""
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
    """Register the operator's opaque forms.

    `schema` is that of torch.library without a name; `fake` gives outputs of the right shapes, computing nothing;
    `kernels` says where each backend is written, as "module:function", which takes what the schema lists or what
    `unpack` makes of it; or how torch-mlir makes it.
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
