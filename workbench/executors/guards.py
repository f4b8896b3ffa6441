"""Compare modules by structure, to share compiled code and to notice changes.

Both read the live modules: changes made by a person count, not what the module was built with.
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
_OURS = ("workbench", "compiled_kernels", "torch")  # whose code does not change while it runs


def compile_key(module: nn.Module) -> Hashable | None:
    """Return a compile-cache key: equal for modules that compute the same from their inputs and weights.

    It covers classes, attributes, submodules, and the weights' shapes and types. None if that is unknown: code of
    others may read what changes unseen.
    """
    own = {name: value for name, value in vars(module).items() if name not in _TORCHS_OWN}
    parts = {name: None if part is None else compile_key(part) for name, part in module._modules.items()}
    missing = [name for name, part in module._modules.items() if part is not None and parts[name] is None]
    if missing or not _ours(module) or not all(map(_fixed, own.values())):
        return None
    tensors = {name: _kind(tensor) for name, tensor in (*module._parameters.items(), *module._buffers.items())}
    return type(module), *(tuple(sorted(each.items(), key=lambda item: item[0])) for each in (own, parts, tensors))


def _fixed(value: Any) -> bool:
    """Return whether a value is constant: numbers and names, and frozen values of such."""
    if isinstance(value, tuple):
        return all(map(_fixed, value))
    if is_dataclass(value) and not isinstance(value, type):
        frozen = type(value).__dataclass_params__.frozen  # type: ignore[attr-defined] (every dataclass has it)
        return _ours(value) and frozen and all(map(_fixed, vars(value).values()))
    if isinstance(value, FunctionType):  # one_rank, where a model is not cut over ranks
        return value.__closure__ is None and value.__module__.split(".")[0] in _OURS
    return isinstance(value, _PLAIN)


def _ours(value: object) -> bool:
    return type(value).__module__.split(".")[0] in _OURS


def _kind(tensor: Tensor | None) -> Hashable:
    return tensor if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


class ModelGuard:
    """A guard that notices new modules, parameters or attributes in a model since it was made."""

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
