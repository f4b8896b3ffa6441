"""Checks of what native code is given: it reads and writes by bare addresses, and believes its compiled shapes."""

from __future__ import annotations

import torch
from torch import Tensor

from compiled_kernels.backends import BackendError

COMPUTE_DTYPES = (torch.float32, torch.bfloat16)  # types the kernels compute in
FLOAT_DTYPES = (*COMPUTE_DTYPES, torch.float16, torch.float64)
INDEX_DTYPES = (torch.int32, torch.int64)


def check_argument(
    operator: str, name: str, tensor: Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], contiguous: bool = True
) -> None:
    """Raise BackendError unless `tensor` is of this shape and one of these types, on the CPU, and (`contiguous`)
    contiguous.

    The check of a right tensor takes about a microsecond.
    """
    if tensor.shape == shape and tensor.dtype in dtypes and tensor.is_cpu and (not contiguous or tensor.is_contiguous()):
        return
    laid_out = "" if tensor.is_contiguous() else ", not contiguous"
    given = f"{list(tensor.shape)} {_plain(tensor.dtype)} on {tensor.device}{laid_out}"
    wanted = f"{list(shape)} {' or '.join(map(_plain, dtypes))} on the CPU{', contiguous' if contiguous else ''}"
    raise BackendError(f"{operator}: backend mlir wants {name} as {wanted}; {given} given")


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
