"""Compare modules by structure, to share compiled code and to detect changes.

Both read the live modules, so a user's later changes to a module are included.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import is_dataclass
from enum import Enum
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from workbench.settings import Settings

_TORCHS_OWN = vars(nn.Module()).keys() - {"training"}
_PLAIN = (int, float, str, type(None), torch.dtype, Enum, Settings)
_OURS = ("workbench", "compiled_kernels", "torch")  # packages with code that does not change at run time


def compile_key(module: nn.Module) -> Hashable | None:
    """Return a key for a cache of compiled code: it is equal for modules that compute the same from their inputs and
    weights.

    It covers classes, attributes, submodules, and the weights' shapes and types. None if unknown: foreign code may read
    other state, and its changes cannot be detected.
    """
    own = {name: value for name, value in vars(module).items() if name not in _TORCHS_OWN}
    parts = {name: None if part is None else compile_key(part) for name, part in module._modules.items()}
    missing = [name for name, part in module._modules.items() if part is not None and parts[name] is None]
    if missing or not _ours(module) or not all(map(_fixed, own.values())):
        return None
    tensors = {name: _kind(tensor) for name, tensor in (*module._parameters.items(), *module._buffers.items())}
    return type(module), *(tuple(sorted(each.items(), key=lambda item: item[0])) for each in (own, parts, tensors))


def _fixed(value: Any) -> bool:
    """Return whether a value is constant: a number, a string, or a frozen value of constants."""
    if isinstance(value, tuple):
        return all(map(_fixed, value))
    if is_dataclass(value) and not isinstance(value, type):
        frozen = type(value).__dataclass_params__.frozen  # type: ignore[attr-defined] (every dataclass has it)
        return _ours(value) and frozen and all(map(_fixed, vars(value).values()))
    if isinstance(value, FunctionType):  # `one_rank` of a model that is not split over ranks
        return value.__closure__ is None and value.__module__.split(".")[0] in _OURS
    return isinstance(value, _PLAIN)


def _ours(value: object) -> bool:
    return type(value).__module__.split(".")[0] in _OURS


def _kind(tensor: Tensor | None) -> Hashable:
    return tensor if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


class ModelGuard:
    """A guard that detects modules, parameters or attributes of a model that were replaced since the guard's
    creation.
    """

    def __init__(self, model: nn.Module):
        self._places = [
            (place, len(place), [(name, place[name]) for name in place.keys() - _TORCHS_OWN])
            for module in model.modules()
            for place in (vars(module), module._modules, module._parameters, module._buffers)
        ]

    @property
    def changed(self) -> bool:
        return any(
            len(place) != size or any(place.get(name) is not value for name, value in values)
            for place, size, values in self._places
        )
