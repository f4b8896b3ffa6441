"""A torch module as the text IREE compiles: weights are named parameters, inputs that it writes to stay in place."""

# The stubs of these optional packages, where installed, do not list what they export.
# pyright: reportAttributeAccessIssue=false, reportMissingImports=false
from __future__ import annotations

import copy
import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from compiled_kernels.backends import BackendError

INSTALL = "pip install 'inference-workbench[iree]'"
PACKAGES = ("iree.compiler", "iree.runtime", "iree.turbine", "ml_dtypes")
SCOPE = "model"


@dataclass(frozen=True)
class IreeExport:
    """`text` in the torch dialect; `parameters` by name, sharing the module's memory; `written` are the places of the
    inputs it mutates, `results` how many tensors it gives."""

    text: str
    parameters: dict[str, Tensor]
    written: frozenset[int]
    results: int


def iree_problem() -> str | None:
    """Return why IREE does not work here; None where it does."""
    if importlib.util.find_spec("iree") is None:
        return f"IREE is not installed: {INSTALL}"
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    return f"IREE lacks {', '.join(missing)}: {INSTALL}" if missing else None


def export(module: nn.Module, inputs: Sequence[Tensor], name: str) -> IreeExport:
    """Export a module for IREE. Raises BackendError where IREE is missing, or torch or IREE cannot export the module."""
    if problem := iree_problem():
        raise BackendError(f"{name}: {problem}")
    from iree.turbine import aot

    own = _sharing_memory(module)
    try:
        with torch.no_grad():
            program = torch.export.export(own, tuple(inputs), strict=False).run_decompositions(_decompositions())
        _externalize(own)
        text = str(aot.export(program).mlir_module)
    except (RuntimeError, ValueError, TypeError, KeyError, NotImplementedError, AssertionError) as error:
        raise BackendError(f"{name}: IREE's exporter: {type(error).__name__}: {_line(error)}") from error
    signature = program.graph_signature
    places = {given: place for place, given in enumerate(signature.user_inputs)}
    written = frozenset(places[given] for given in signature.user_inputs_to_mutate.values())
    parameters = {key: each.detach() for key, each in own.state_dict().items()}
    return IreeExport(text, parameters, written, len(signature.user_outputs))


def _sharing_memory(module: nn.Module) -> nn.Module:
    """Return a copy over the same tensors: IREE's exporter marks the tensors it makes parameters of, and these are
    ours."""
    memo: dict[int, Any] = {id(each): nn.Parameter(each.detach(), requires_grad=False) for each in module.parameters()}
    memo |= {id(each): each.detach() for each in module.buffers()}
    return copy.deepcopy(module, memo).eval()


def _externalize(module: nn.Module) -> None:
    from iree.turbine.aot import ExternalTensorTrait

    for name, tensor in module.state_dict(keep_vars=True).items():
        ExternalTensorTrait(external_scope=SCOPE, external_name=name).set(tensor)


def _decompositions() -> dict[Any, Any]:
    table = torch.export.default_decompositions()
    aten = torch.ops.aten
    for operation, decomposed in ((aten.index_put, _index_put), (aten.cos, _cos), (aten.sin, _sin)):
        table[operation.default] = decomposed
    return table


def _index_put(x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False) -> Any:
    """Give indices one for every axis: IREE does not take `pages[page, :, offset] = rows` with an axis left out
    (`failed to legalize operation 'torch.constant.bool'`). The indexed axes come first in `values`."""
    given = [each for each in indices if each is not None]
    whole = [axis for axis in range(x.dim()) if axis >= len(indices) or indices[axis] is None]
    places = [axis for axis in range(x.dim()) if axis not in whole]
    apart = places[-1] - places[0] + 1 != len(places)
    if not apart or any(each.dtype == torch.bool for each in given):
        return NotImplemented
    shape = torch.broadcast_shapes(*(each.shape for each in given))
    full = []
    for axis in range(x.dim()):
        if axis in whole:
            after = len(whole) - whole.index(axis) - 1
            full.append(torch.arange(x.shape[axis], device=x.device).view(-1, *[1] * after))
        else:
            index = indices[axis]
            assert index is not None
            full.append(index.expand(shape).reshape(*shape, *[1] * len(whole)))
    filled = values.expand(*shape, *(x.shape[axis] for axis in whole))
    return torch.ops.aten.index_put(x, full, filled, accumulate)


def _cos(x: Tensor) -> Any:
    if x.dtype != torch.float64:
        return NotImplemented
    near, rest = _turned(x)
    return (torch.cos(near) - rest * torch.sin(near)).double()


def _sin(x: Tensor) -> Any:
    if x.dtype != torch.float64:
        return NotImplemented
    near, rest = _turned(x)
    return (torch.sin(near) + rest * torch.cos(near)).double()


def _turned(angle: Tensor) -> tuple[Tensor, Tensor]:
    """Reduce an angle by its whole turns, to a float32 and the rest: IREE has no sine in float64 (`undefined symbol:
    sin`), and a float32 of the whole angle would lose it."""
    part = angle - torch.round(angle / (2 * math.pi)) * (2 * math.pi)
    near = part.float()
    return near, (part - near.double()).float()


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:400]
