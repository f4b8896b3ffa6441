"""Call `expert_linear` while the memory of experts that no row names cannot be read: one line for each way that lives.

python -m tests.kernels.unnamed_experts unnamed|read BACKEND/LAYOUT/FORM/ROWS/KIND ...
"""

from __future__ import annotations

import ctypes
import mmap
import sys

import torch
from torch import Tensor

import compiled_kernels
from compiled_kernels import Backend
from compiled_kernels.expert_linear.cases import random_stack
from compiled_kernels.expert_linear.stacks import stack_to_panels
from compiled_kernels.linear.matrix_format import DENSE_MATRIX, INT8_MATRIX, MatrixFormat

EXPERTS, OUT, WIDTH, NAMED = 6, 64, 4096, [1, 4]
FORMATS = {
    "dense": DENSE_MATRIX, "int8": INT8_MATRIX, "int8 in groups": MatrixFormat("int8", 32, torch.float16),
    "int4": MatrixFormat("int4", 32, torch.float16), **{name: MatrixFormat.named(name) for name in ("mxfp4", "q5_1")},
}  # fmt: skip
libc = ctypes.CDLL(None, use_errno=True)


def mapped(given: Tensor) -> Tensor:
    """Return a copy in pages of its own."""
    memory = mmap.mmap(-1, given.nbytes)
    return torch.frombuffer(memory, dtype=given.dtype).view(given.shape).copy_(given)


def try_way(backend: Backend, layout: str, form: str, rows: int, kind: str, reads: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    stored = random_stack(generator, FORMATS[kind], (EXPERTS, OUT, WIDTH), torch.float32)
    stored = stack_to_panels(*stored) if layout == "panels" else stored
    weight, scales, minima = (None if each is None else mapped(each) for each in stored)
    stacks = [each for each in (weight, scales, minima) if each is not None]
    assert weight is not None
    x, expert = torch.randn(9, WIDTH, generator=generator), torch.tensor([0 if reads else 1, 1, 4, 4, 4, 4, 4, 4, 4])
    expert[1] = 1 if reads else 4

    def call(x: Tensor, expert: Tensor) -> Tensor:
        return compiled_kernels.expert_linear(x, expert, weight, None, scales, minima, FORMATS[kind].codes, backend)

    run = torch.compile(call, fullgraph=True, dynamic=False) if form == "compiled" else call
    stored = weight, None, scales, minima, FORMATS[kind].codes
    compiled_kernels.expert_linear(x[:2], torch.tensor(NAMED), *stored)  # loads what is lazy
    run(x[:rows], expert[:rows] * 0 + 1)
    unnamed = sorted(set(range(EXPERTS)) - set(NAMED))
    for stack in stacks:
        one = stack.nbytes // EXPERTS
        if one % mmap.PAGESIZE:  # scales of whole rows: an expert's share no page
            stack[unnamed] = torch.nan
            continue
        for number in unnamed:
            assert libc.mprotect(ctypes.c_void_p(stack.data_ptr() + number * one), ctypes.c_size_t(one), 0) == 0
    assert run(x[:rows], expert[:rows]).isfinite().all()
    for stack in stacks:  # what ends may be read again
        libc.mprotect(ctypes.c_void_p(stack.data_ptr()), ctypes.c_size_t(stack.nbytes), 3)


if __name__ == "__main__":
    which, *ways = sys.argv[1:]
    for way in ways:
        backend, layout, form, rows, kind = way.split("/")
        try_way(Backend(backend), layout, form, int(rows), kind, which == "read")
        print(way, flush=True)
