"""Call compiled functions on torch's own OpenMP threads, with checked arguments.

Native code reads and writes by bare addresses and believes its compiled shapes, so arguments are checked before a call.
A second pool of threads would compete with torch's for the same cores; torch's threads stay awake between two calls.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from compiled_kernels.backends import BackendError

COMPUTE_DTYPES = (torch.float32, torch.bfloat16)  # types the kernels compute in
FLOAT_DTYPES = (*COMPUTE_DTYPES, torch.float16, torch.float64)
INDEX_DTYPES = (torch.int32, torch.int64)


def check_argument(
    operator: str,
    name: str,
    tensor: Tensor,
    shape: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...],
    contiguous: bool = True,
) -> None:
    """Raise BackendError unless `tensor` is on the CPU, has this shape and one of these types, and is contiguous if
    `contiguous`.

    The check of a right tensor takes about a microsecond.
    """
    if (
        tensor.shape == shape
        and tensor.dtype in dtypes
        and tensor.is_cpu
        and (not contiguous or tensor.is_contiguous())
    ):
        return
    laid_out = "" if tensor.is_contiguous() else ", not contiguous"
    given = f"{list(tensor.shape)} {_plain(tensor.dtype)} on {tensor.device}{laid_out}"
    wanted = f"{list(shape)} {' or '.join(map(_plain, dtypes))} on the CPU{', contiguous' if contiguous else ''}"
    raise BackendError(f"{operator}: backend mlir needs {name} as {wanted}; {given} given")


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@functools.cache
def libgomp_path() -> str:
    """Return the path of torch's libgomp."""
    found = sorted(Path(torch.__file__).parent.glob("lib/libgomp*")) or sorted(
        Path(torch.__file__).parent.parent.glob("torch.libs/libgomp*")
    )
    if not found:
        raise BackendError("backend mlir: this torch does not bring libgomp, whose threads the kernels run on")
    return str(found[0])


@functools.cache
def _parallel() -> Callable[..., None]:
    function = ctypes.CDLL(libgomp_path()).GOMP_parallel
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    function.restype = None
    return function


class BoundCall:
    """A compiled function bound to the tensors that it reads and writes. `address` is that of a `void(void**)`
    function; its arguments are pointers to pointers.

    Calling it runs the function on `threads` threads at once (torch's number unless given), each with its own number.
    Pointers are not looked up again, so the tensors must stay in place.
    """

    def __init__(self, address: int, tensors: Sequence[Tensor]):
        self._kept = tuple(tensors)
        count = len(self._kept)
        self._values = (ctypes.c_void_p * count)(*[tensor.data_ptr() for tensor in self._kept])
        first = ctypes.addressof(self._values)
        size = ctypes.sizeof(ctypes.c_void_p)
        self._pointers = (ctypes.c_void_p * count)(*[first + size * i for i in range(count)])
        self._address, self._arguments = address, ctypes.addressof(self._pointers)
        self._run = _parallel()

    def __call__(self, threads: int | None = None) -> None:
        self._run(self._address, self._arguments, threads or torch.get_num_threads(), 0)
