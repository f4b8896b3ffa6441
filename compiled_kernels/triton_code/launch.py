"""Run Triton kernels with all arguments of their launches."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from compiled_kernels.backends import BackendError, triton_interpreted

Outputs = TypeVar("Outputs")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NOMINAL_PROCESSORS = 132  # multiprocessors of an H100 or H200, for plans made without a device


@dataclass(frozen=True)
class KernelLaunch:
    """A kernel with all arguments of its launch by name, constants included; a grid with a zero runs nothing."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 3

    def run(self) -> None:
        if all(self.grid):
            self.kernel[self.grid](**self.arguments, num_warps=self.num_warps, num_stages=self.num_stages)


def run(launches: Iterable[KernelLaunch], outputs: Outputs) -> Outputs:
    """Run the launches in order, and return the outputs."""
    for launch in launches:
        launch.run()
    return outputs


def check(operator: str, *tensors: Tensor | None) -> None:
    """Raise BackendError for tensors that the backend triton does not support."""
    for tensor in tensors:
        if tensor is None:
            continue
        if tensor.is_floating_point() and tensor.dtype not in DTYPES:
            raise BackendError(f"{operator}: backend triton supports {', '.join(map(str, DTYPES))}, not {tensor.dtype}")
        if tensor.device.type == "cpu" and not triton_interpreted():
            wanted = "tensors on a CUDA device (or TRITON_INTERPRET=1)"
            raise BackendError(f"{operator}: backend triton needs {wanted}, not on cpu")


@functools.cache
def num_processors(device: torch.device) -> int:
    """Return the number of streaming multiprocessors of `device`."""
    if device.type != "cuda":
        return NOMINAL_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def power_of_two(number: int, least: int = 1) -> int:
    """Return the smallest power of two that is at least `number` and at least `least`."""
    return max(least, 1 << max(number - 1, 0).bit_length())


def floor_power_of_two(number: int) -> int:
    """Return the largest power of two up to `number`; at least 1."""
    return 1 << max(number, 1).bit_length() - 1


def ceil_div(number: int, size: int) -> int:
    return -(-number // size)
