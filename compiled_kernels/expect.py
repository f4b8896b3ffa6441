"""Checks of what native code is given: it reads and writes by bare addresses, and believes its compiled shapes."""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_kernels.lanes import LaneError

COMPUTED = (torch.float32, torch.bfloat16)  # types the kernels compute in
FLOATING = (*COMPUTED, torch.float16, torch.float64)
INTEGERS = (torch.int32, torch.int64)


def expect(
    operator: str, name: str, tensor: Tensor, shape: tuple[int, ...], types: tuple[torch.dtype, ...], dense: bool = True
) -> None:
    """Raise LaneError unless `tensor` is of this shape and one of these types, on the CPU, and (`contiguous`)
    contiguous.

    The check of a right tensor takes about a microsecond.
    """
    if tensor.shape == shape and tensor.dtype in types and tensor.is_cpu and (not dense or tensor.is_contiguous()):
        return
    laid_out = "" if tensor.is_contiguous() else ", not contiguous"
    given = f"{list(tensor.shape)} {_plain(tensor.dtype)} on {tensor.device}{laid_out}"
    wanted = f"{list(shape)} {' or '.join(map(_plain, types))} on the CPU{', contiguous' if dense else ''}"
    raise LaneError(f"{operator}: lane mlir wants {name} as {wanted}; {given} given")


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
